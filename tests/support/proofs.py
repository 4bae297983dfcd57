"""`halfmesh.verify` on the processes that tests have already, where it starts its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest

from halfmesh.verify import phases
from halfmesh.verify.report import Phase, VerifyReport

from .ranks import ranks_on, run_ranks

LEFT_OUT = Phase("", "", True, None, 0, {}, {}, 0.0)
"""In the place of a phase that is not proven."""


class TeamWork(phases.Work):
    """The ranks of a layout are a team that waits for calls; what needs one process runs in this one."""

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if world_size == 1:
            return [function(*args)]
        return run_ranks(call, world_size, function, args, timeout=self.options.timeout)


def call(rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What `function` returns on this rank."""
    return function(*args)


class StructureAlone(TeamWork):
    """Without the proof of the format."""

    def format(self, *_: Any) -> Phase:
        return LEFT_OUT


class FormatAlone(TeamWork):
    """Without the proof of the structure."""

    def structure(self, *_: Any) -> Phase:
        return LEFT_OUT


def prove(
    config: Any, build: Callable[[], Any], world_size: int, work: type[TeamWork] = TeamWork, **options: Any
) -> VerifyReport:
    """What `halfmesh.verify` returns, of the phases that `work` has."""
    device = "cpu" if ranks_on() == "gloo-cpu" else "cuda"
    given = {"world_size": world_size, "shrink": False, "timeout": 120.0, "device": device}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "Work", work)
        report = phases.verify(config, build, **given, **options)
    return replace(report, phases=tuple(phase for phase in report.phases if phase.name))


@dataclass(frozen=True)
class Row:
    """A training that has to be that of one process.

    Attributes:
        build: as of `halfmesh.verify`: makes (model, inputs) or (model, (inputs, targets), criterion); a list in place
            of the second is of batches.
        optimizer: makes it of the parameters; None: SGD with momentum.
        updates: how many are compared.
        work: the phases that prove it: the layout in float64, the mode in the layout, or both.
        accumulated: compare with one process that takes the batches one by one.
        slow: leave it to `make test-all`.
    """

    name: str
    build: Callable[[], Any]
    config: Mapping[str, Any]
    ranks: int = 2
    optimizer: Callable[[Any], Any] | None = None
    updates: int = 2
    work: type[TeamWork] = StructureAlone
    accumulated: bool = False
    slow: bool = False

    def prove(self) -> None:
        options = {"optimizer": self.optimizer, "updates": self.updates, "accumulated": self.accumulated}
        report = prove(self.config, self.build, self.ranks, self.work, **options)
        assert report.equal, str(report)
        assert min(phase.compared for phase in report.phases) > 10


def rows(*given: Row) -> Any:
    """Parametrizes a test by the argument `row`."""
    params = [pytest.param(row, id=row.name, marks=[pytest.mark.slow] * row.slow) for row in given]
    return pytest.mark.parametrize("row", params)
