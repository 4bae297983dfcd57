"""The arithmetic of a measurement, and the page with one row for each workload."""

import re
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.harness import Quartiles, Row, ratio


def test_ratios_are_of_the_same_round():
    rows = [Row("first", [1.0, 2.0, 4.0]), Row("other", [0.5, 3.0, 1.0])]
    assert ratio(rows, "other", "first") == (0.5, 0.375, 1.0)
    assert ratio(rows, "first", "other") == (2.0, 4 / 3, 3.0)
    assert str(Quartiles(1.0, 0.98765, 1.5)) == "1.000 [0.988, 1.500]"


def test_the_page_keeps_rows_of_the_same_commit_only(monkeypatch, tmp_path, capsys):
    measured = ["1"] * (len(run.COLUMNS) - 1), ["DeepSpeed: not installed"]
    monkeypatch.setattr(run, "on_ranks", lambda *_: [measured])
    page = tmp_path / "RESULTS.md"
    for commit, only, expected in (("a", "MLP", 5), ("a", "ViT", 9), ("b", "ViT", 4)):
        monkeypatch.setattr(run, "describe", lambda commit=commit: {"halfmesh": f"commit {commit}"})
        monkeypatch.setattr("sys.argv", ["benchmarks", "--only", only, "--out", str(page)])
        run.main()
        text = page.read_text()
        assert len([line for line in text.splitlines() if line.startswith("| ") and "---" not in line]) == 1 + expected
        assert f"- halfmesh: commit {commit}\n" in text
        assert text.count("DeepSpeed: not installed") == 1
    monkeypatch.setattr("sys.argv", ["benchmarks", "--only", "nothing"])
    with pytest.raises(SystemExit):
        run.main()
    assert "no workload is named so; there are:\nMLP; " in capsys.readouterr().err


def test_the_committed_page_is_what_its_figures_render_to():
    page = Path(run.__file__).with_name("RESULTS.md")
    text = page.read_text()
    machine = dict(re.findall(r"^- ([A-Za-z-]+): (.*)$", text.partition("\n| ")[0], re.MULTILINE))
    notes = re.findall(r"^- (.*)$", text.partition(run.LIMITS)[2], re.MULTILINE)
    assert set(run.rows_of(page, machine["halfmesh"])) >= {case.name for case in run.CASES}
    assert "\n\n".join(run.render(run.rows_of(page, machine["halfmesh"]), machine, notes)) + "\n" == text
