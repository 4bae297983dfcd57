"""The suite turns red when the engine is broken: faults on purpose, each in the cell that has to see it."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import pytest

from tests.support.ranks import RankFailure, run_jobs

from .mutants import MUTANTS, Mutant, run_mutant
from .overflows import find_overflow_problems, overflow
from .parity import find_problems

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def check(mutant: Mutant, result: list[Any] | RankFailure) -> list[str]:
    """What the suite says of it."""
    if mutant.job is overflow:
        return [str(result)] if isinstance(result, RankFailure) else find_overflow_problems(result)
    return find_problems(mutant.cell, result)


@pytest.fixture(scope="module")
def results() -> dict[Any, list[Any] | RankFailure]:
    """What each mutant did, by its name, and each of their cells without a fault."""
    by_world = defaultdict(dict)
    for number, mutant in enumerate(MUTANTS):
        jobs = by_world[mutant.cell.world_size]
        jobs[mutant.name] = partial(run_mutant, number=number)
        jobs[mutant.job, mutant.cell] = partial(mutant.job, cell=mutant.cell)
    found = {}
    for world_size, jobs in by_world.items():
        found |= dict(zip(jobs, run_jobs(list(jobs.values()), world_size), strict=True))
    return found


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_fault_is_seen(mutant, results):
    problems = check(mutant, results[mutant.name])
    assert any(mutant.seen_as in problem for problem in problems), problems
    assert not check(mutant, results[mutant.job, mutant.cell])
