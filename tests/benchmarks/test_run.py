"""The arithmetic of a measurement, and the page with one row for each workload."""

import re
from pathlib import Path

import pytest
from torch import nn

from benchmarks import run
from benchmarks.harness import Contender, Quartiles, Row, on_ranks, ratio, rounds_within, take_turns


def test_ratios_are_of_the_same_round():
    rows = [Row("first", [1.0, 2.0, 4.0]), Row("other", [0.5, 3.0, 1.0])]
    # 0.5, 1.5 and 0.25: not the ratio of the medians, which is 0.5
    assert ratio(rows, "other", "first") == (0.5, 0.375, 1.0)
    assert ratio(rows, "first", "other") == (2.0, 4 / 3, 3.0)
    assert str(Quartiles(1.0, 0.98765, 1.5)) == "1.000 [0.988, 1.500]"


def test_everyone_is_first_equally_often():
    log = []
    contenders = [Contender(name, lambda name=name: log.append(name), nn.Linear(2, 2)) for name in "abc"]
    rows = take_turns(contenders, rounds=2, steps=2)
    assert "".join(log) == "aabbcc" + "bbccaa"
    assert [(row.name, len(row.seconds)) for row in rows] == [(name, 2) for name in "abc"]


def test_rounds_are_odd_and_fit_into_the_time():
    assert [rounds_within(30.0, seconds) for seconds in (100.0, 3.0, 2.9, 1e-3)] == [7, 11, 11, 101]


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, pytest.param(True, marks=pytest.mark.distributed)])
def test_a_row_is_measured(several, monkeypatch):
    monkeypatch.setattr(run, "BLOCK_S", 0.01)
    case = run.Case("mlp", layout="DDP") if several else run.Case("mlp", "NAIVE bf16", 1.0)
    cells, missing = on_ranks(2, run.measure, case, 0.1)[0] if several else run.measure(case, 0.1)
    over_loop, over_fused, again, peer, reads, kept = cells
    assert all(ratio.endswith("]") for ratio in (over_loop, over_fused, again))
    assert several or (peer, missing) == ("not measured", [])
    assert reads == "0"
    assert kept.startswith("16.0, " if several else "18.0, ")


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
