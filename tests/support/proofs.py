"""`halfmesh.verify` on the processes that tests have already, where it starts its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from halfmesh.verify import phases
from halfmesh.verify.report import Phase, VerifyReport
from halfmesh.verify.run import record

from .ranks import ranks_on, run_ranks

LEFT_OUT = Phase("", "", True, None, 0, {}, {}, 0.0)
"""In the place of a phase that is not proven."""


class TeamWork(phases.Work):
    """The ranks of a layout are a team that waits for calls; what needs one process runs in this one."""

    def _references(self, jobs: Sequence[tuple[Any, ...]]) -> None:
        for job in jobs:
            record(*job)

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
