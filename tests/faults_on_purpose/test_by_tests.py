"""Tests turn red when a line of the source that they guard is broken."""

from __future__ import annotations

import pytest

from .by_tests import testing
from .table import FAULTS, TESTS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
PAIRS = [pytest.param(fault, test, id=fault.what) for fault in FAULTS for test in fault.tests]


@pytest.fixture(scope="module")
def run():
    with testing(test.partition("::")[0] for test in TESTS) as run:
        yield run


@pytest.mark.parametrize(("fault", "test"), PAIRS)
def test_the_fault_is_seen(run, fault, test):
    result = run(fault.texts, [test])
    assert result.red, result.output[-2000:]
