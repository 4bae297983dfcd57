"""Faults put into the engine, or into a model, on purpose: verify reports them, and names their place first."""

from __future__ import annotations

import pytest

from .faults import table
from .faults.corpus import FAULTS, Fault
from .faults.runs import runs

pytestmark = pytest.mark.distributed

QUICK = {
    "output_summed_twice-none-gpt-tp2-dp1-x1",
    "input_gradient_summed_twice-none-gpt-tp2-dp1-x1",
    "activations_of_the_first_microbatch-none-mlp-tp1-dp1-pp2_1f1b_m2-x1",
    "border_label_lost-none-gpt-tp1-dp1-cp2-x1",
    "data_not_reduced-none-mlp-tp1-dp2-x1",
    "not_clipped-none-mlp-tp1-dp2-x1-clip_grad_norm",
    "local_verdict-none-mlp-tp2-dp1-x1-clip_grad_norm",
    "scale_kept-naive_fp16-mlp-tp1-dp2-x1",
    "rows_mixed-none-mlp-tp1-dp2-x1",
    "unequal_counts-none-mlp-tp1-dp2-x1",
}
"""One of each kind of place; the others are slow."""
ONCE = tuple({str((fault.config(), fault.builder)): fault for fault in FAULTS if not fault.is_users}.values())
"""An engine's fault for each model and layout."""


@pytest.fixture(scope="module")
def each():
    with runs() as found:
        yield found


def _params(faults: tuple[Fault, ...]) -> list[object]:
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(fault, id=fault.name, marks=marks[fault.name in QUICK]) for fault in faults]


@pytest.mark.parametrize("fault", _params(FAULTS))
def test_a_fault_is_reported_as_the_page_says(each, fault):
    report = each.report(fault)
    rows = dict(table.read())
    assert table.place_of(fault, report) == rows[fault.name], str(report)
    assert fault.cause in f"{report.first.cause} {report.first.advice}" if fault.cause else True, str(report)


@pytest.mark.parametrize("fault", _params(ONCE))
def test_without_the_fault_all_is_equal(each, fault):
    report = each.report(fault, is_clean=True)
    assert report.equal, str(report)


def test_the_page_has_all_faults_and_most_are_named():
    rows = table.read()
    assert [row.fault for row in rows] == [fault.name for fault in FAULTS]
    reported, right = table.rates(rows)
    assert len(rows) >= 66
    assert reported >= 0.95
    assert right >= 0.9
    assert f"{reported:.0%} are reported; {right:.0%} name the right place first" in table.PAGE.read_text()
