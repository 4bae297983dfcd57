"""The suite turns red when the engine is broken: faults on purpose, each in a cell that has to see it."""

from __future__ import annotations

import pytest

from tests.support.ranks import RankFailure

from .mutants import MUTANTS, run_mutant
from .overflows import find_overflow_problems, overflow
from .parity import find_problems
from .training import run_cell

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=lambda number: MUTANTS[number].name)
def test_the_fault_is_seen(number):
    mutant = MUTANTS[number]
    find = find_overflow_problems if mutant.job is overflow else lambda result: find_problems(mutant.cell, result)
    try:
        problems = find(run_cell(mutant.cell, run_mutant, number))
    except RankFailure as failure:
        problems = [str(failure)]
    assert any(mutant.seen_as in problem for problem in problems), problems
