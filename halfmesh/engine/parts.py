"""The parts of an engine."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..amp.step_result import StepResult
from ..data.loader import EngineDataLoader
from ..errors import InputError
from ..parallel.mesh import ParallelContext
from .accumulation import Accumulation
from .ema import WeightAverage
from .executor import DirectExecutor
from .guards import ModelGuard
from .lr_scheduler import LRAdvance

if TYPE_CHECKING:
    from ..config import Config
    from .parallelize import ParallelModel
    from .pipeline_executor import PipelineExecutor

RESULT_HISTORY = 60
"""Step results that an engine keeps."""


@dataclass(eq=False)
class EngineParts:
    """The parts of an engine, for the engine itself, its hooks, checkpoints and reports."""

    model: nn.Module
    criterion: Callable[..., Any] | None
    update: MixedPrecisionOptimizer
    precision: Precision
    context: ParallelContext
    executor: DirectExecutor | PipelineExecutor
    division: ParallelModel
    accumulation: Accumulation
    lr: LRAdvance
    config: Config
    dataloader: EngineDataLoader | None
    eval_dataloader: EngineDataLoader | None
    average: WeightAverage
    guard: ModelGuard
    results: deque[StepResult] = field(default_factory=lambda: deque(maxlen=RESULT_HISTORY))  # the newest last
    global_step: int = 0
    calls: Counter[str] = field(default_factory=Counter)  # of the engine's model
    closed: bool = False

    def refuse_if_closed(self) -> None:
        """Raise InputError if the engine is closed."""
        if self.closed:
            raise InputError("this engine is closed; call the model itself, or make a new engine with initialize")

    def before_call(self, call: str, keeps_gradients: bool = True) -> None:
        """Before a `call` ("engine.save()") that all ranks make together.

        Raises InputError if the engine is closed or has averaged weights or, with `keeps_gradients`, within an
        accumulation cycle.
        """
        self.refuse_if_closed()
        if keeps_gradients:
            self.accumulation.refuse_unfinished(call)
        else:
            self.accumulation.refuse_averaged(call)
        self.context.agree_on_call(call.removesuffix("()"))
