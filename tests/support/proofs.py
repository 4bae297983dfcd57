"""`halfmesh.verify` on the processes that tests have already, where it starts its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from halfmesh.verify import phases
from halfmesh.verify.ranks import RankError
from halfmesh.verify.report import VerifyReport

from .ranks import RankFailure, run_ranks


class TeamWork(phases.Work):
    """The ranks of a layout are a team that waits for calls; what needs one process runs in this one."""

    def _references(self, jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        for function, args in jobs:
            function(*args)

    def _run(self, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        if world_size == 1:
            return [function(*args)]
        try:
            return run_ranks(call, world_size, function, args, timeout=self.timeout)
        except RankFailure as failure:
            refused = re.search(r"halfmesh\.errors\.\w+: (.*?)(\nafterwards|\Z)", str(failure), re.DOTALL)
            raise RankError(failure.rank, str(failure), "", refusal=refused[1] if refused else "") from failure


def call(rank: int, world_size: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """What `function` returns on this rank."""
    return function(*args)


def prove(config: Any, build: Callable[[], Any], world_size: int, **options: Any) -> VerifyReport:
    """What `halfmesh.verify` returns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "Work", TeamWork)
        return phases.verify(config, build, world_size=world_size, shrink=False, timeout=120.0, **options)
