"""Tests turn red when a line of the source that they guard is broken."""

import pytest

from .by_tests import running_tests
from .table import FAULTS

pytestmark = pytest.mark.distributed

QUICK = {
    "The loss scale leaves its bounds",
    "An error in backward leaves half a gradient",
    "New weights are used before they have arrived",
}
"""The others are slow."""
MARKS = {True: (), False: pytest.mark.slow}
PAIRS = [(fault, test) for fault in FAULTS for test in fault.tests]


@pytest.fixture(scope="module")
def run(request):
    """Runs tests of the files of those that were chosen."""
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]
    with running_tests(params["test"].partition("::")[0] for params in chosen) as run:
        yield run


@pytest.mark.parametrize(
    ("fault", "test"), [pytest.param(*pair, id=pair[0].what, marks=MARKS[pair[0].what in QUICK]) for pair in PAIRS]
)
def test_the_fault_is_seen(run, fault, test):
    result = run(fault.texts, [test])
    assert result.red, result.output[-2000:]
