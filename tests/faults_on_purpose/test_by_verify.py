"""`halfmesh verify` reports faults of the engine and of users' models, and names their place first."""

import pytest

from .by_verify import judged, verifying
from .page import read
from .table import FAULTS

pytestmark = pytest.mark.distributed

QUICK = {
    "Layers divided by columns sum the gradient of their input twice: an all-reduce too many in backward",
    "The last token of each rank has no target",
    "Data ranks keep their own gradients: an all-reduce is missing",
    "The norm is measured, and nothing is clipped",
    "The loss scale never moves",
    "The forward subtracts the mean over the rows of its batch",
    "The criterion is a mean over the targets that count, of which each batch has another number",
}
"""One of each kind of place; the others are slow."""
PLACES = [(fault, place) for fault in FAULTS for place in fault.layouts]
OTHERS = [(fault, place) for fault, place in PLACES if fault.texts and (place.build or place.more)]
ONCE = {repr((place.config(), place.build)): (fault, place) for fault, place in OTHERS}
"""An engine's fault for each model and layout that is no cell of `tests/composition`."""


@pytest.fixture(scope="module")
def verify():
    with verifying() as verify:
        yield verify


def params(places):
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(*each, id=f"{each[0].what}-{each[1]}", marks=marks[each[0].what in QUICK]) for each in places]


@pytest.mark.parametrize(("fault", "place"), params(PLACES))
def test_a_fault_is_reported_as_the_page_says(verify, fault, place):
    report = verify(fault, place, True)
    assert judged(place, report) == read()[fault.what, str(place)], str(report)
    assert not place.cause or place.cause in f"{report.first.cause} {report.first.advice}", str(report)


@pytest.mark.parametrize(("fault", "place"), params(ONCE.values()))
def test_without_the_fault_all_is_equal(verify, fault, place):
    report = verify(fault, place, False)
    assert report.equal, str(report)
