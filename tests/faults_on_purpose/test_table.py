"""The table of faults fits the source, and the page has all of it."""

from __future__ import annotations

from .page import PAGE, rates, read
from .table import FAULTS


def test_each_text_stands_in_the_source_once():
    known = {text.file: text.path.read_text() for fault in FAULTS for text in fault.texts}
    counts = {(text.file, text.old): known[text.file].count(text.old) for fault in FAULTS for text in fault.texts}
    assert [place for place, count in counts.items() if count != 1] == [], "say where the fault would be now"


def test_the_page_has_all_faults_and_verify_names_most():
    rows = read()
    assert list(rows) == [(fault.what, str(place)) for fault in FAULTS for place in fault.layouts], "write it anew"
    reported, right = rates(list(rows.values()))
    assert reported >= 0.95
    assert right >= 0.9
    assert f"{reported:.0%} are reported; {right:.0%} name the right place first" in PAGE.read_text()
