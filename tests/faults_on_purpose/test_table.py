"""The table of faults fits the source and the tests that it names, and the page has all of it."""

import ast

from .fault import ROOT
from .page import PAGE, rates, read
from .table import FAULTS, TESTS


def test_each_text_stands_in_the_source_once():
    known = {text.file: text.path.read_text() for fault in FAULTS for text in fault.texts}
    counts = {(text.file, text.old): known[text.file].count(text.old) for fault in FAULTS for text in fault.texts}
    assert [place for place, count in counts.items() if count != 1] == [], "say where the fault would be now"


def test_each_test_that_is_named_exists():
    for file in {test.partition("::")[0] for test in TESTS}:
        assert (ROOT / file).is_file(), f"{file} is not there: name a test that sees the fault"
        found = {node.name for node in ast.walk(ast.parse((ROOT / file).read_text())) if hasattr(node, "name")}
        named = {test.partition("::")[2].partition("[")[0] for test in TESTS if test.startswith(f"{file}::")}
        assert not named - found, f"{file} has no {named - found}: name a test that sees the fault"


def test_the_page_has_all_faults_and_verify_names_most():
    rows = read()
    layouts = [(fault.what, str(place)) for fault in FAULTS for place in fault.layouts]
    assert [key for key, place in rows.items() if place != "red"] == layouts, f"write {PAGE} anew"
    assert {what for what, _ in rows} == {fault.what for fault in FAULTS}  # the names of tests may be others by now
    reported, right = rates(list(rows.values()))
    assert reported >= 0.95
    assert right >= 0.9
    assert f"{reported:.0%} are reported; {right:.0%} name the right place first" in PAGE.read_text()
    assert set(rows.values()) <= {"right", "another", "missed", "red"}
