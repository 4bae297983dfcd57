"""What of an engine is needed to compute a batch once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..engine.accumulation import Accumulation
from ..engine.executor import Executor
from ..engine.parts import EngineParts
from ..parallel.context import ParallelContext

if TYPE_CHECKING:
    from ..division import Division


@dataclass(frozen=True)
class Parts:
    """An engine's parts."""

    model: nn.Module
    criterion: Callable[..., Any] | None
    update: MixedPrecisionOptimizer
    precision: Precision
    context: ParallelContext
    executor: Executor
    division: Division
    accumulation: Accumulation

    @classmethod
    def of(cls, parts: EngineParts) -> Parts:
        """Those of an engine."""
        return cls(**{name: getattr(parts, name) for name in cls.__dataclass_fields__})

    def modules(self) -> Iterator[nn.Module]:
        """Those of the model, and of a criterion that is one."""
        yield from self.model.modules()
        if isinstance(self.criterion, nn.Module):
            yield from self.criterion.modules()

    def others(self) -> Iterator[nn.Parameter]:
        """The parameters of a criterion that has some."""
        if isinstance(self.criterion, nn.Module):
            yield from self.criterion.parameters()

    def hooked(self) -> dict[nn.Module, str]:
        """The modules that are called as such, by their names in the whole model. Stages of a pipeline call those below
        others."""
        partition = self.division.plans.partition
        passed_by = set() if partition is None else {module for _, module in partition.not_called(self.model)}
        return {module: name for name, module in self.model.named_modules() if module not in passed_by}
