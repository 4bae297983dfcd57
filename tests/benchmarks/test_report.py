"""The arithmetic of a measurement, goals, the page of a small result, and what stands where nothing was measured."""

import pytest
from torch import nn

from benchmarks import goals, plot, report, run
from benchmarks.harness import (
    AGAIN,
    FUSED,
    HALFMESH,
    LOOP,
    Contender,
    Quartiles,
    Result,
    Row,
    load,
    take_turns,
)

COUNTS = {"Python calls": 1000, "aten ops": 50, "host reads": 1, "step counter reads": 8}
OURS = {"Python calls": 300, "aten ops": 40, "host reads": 0, "step counter reads": 0}


# --- measuring -----------------------------------------------------------------------------------------------------


def contender(name, step=lambda: None, model=None, **options):
    return Contender(name, step, model or nn.Linear(2, 2), **options)


def test_ratios_are_of_the_same_round():
    rows = [Row("first", [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]), Row("other", [0.5, 3.0, 1.0], [2.0, 3.0, 4.0])]
    result = Result("work", "a work", "fp32", [*rows, Row("absent", missing="not installed")])
    # 0.5, 1.5 and 0.25: not the ratio of the medians, which is 0.5
    assert result.ratios("other") == Quartiles(0.5, 0.375, 1.0)
    assert result.ratios("first", of="other") == Quartiles(2.0, 4 / 3, 3.0)
    assert result.ratios("other", clock="cpu") == Quartiles(3.0, 2.5, 3.5)
    assert result.ratios("absent") is None
    assert str(Quartiles(1.0, 0.98765, 1.5)) == "1.000 [0.988, 1.500]"


def test_everyone_is_first_equally_often():
    log = []
    contenders = [contender(name, lambda name=name: log.append(name)) for name in "abc"]
    rows = take_turns(contenders, rounds=2, steps=2)
    assert "".join(log) == "aabbcc" + "bbccaa"
    assert [(row.name, len(row.wall), len(row.cpu)) for row in rows] == [(name, 2, 2) for name in "abc"]


# --- the page ------------------------------------------------------------------------------------------------------


def small(**changes):
    rows = [
        Row(LOOP, [1.0, 1.0, 1.0], [1.0, 1.0, 1.0], "float16", 3.0, dict(COUNTS)),
        Row(AGAIN, [1.0, 1.02, 1.06], [1.0, 1.0, 1.0], "float16", 3.0, dict(COUNTS)),
        Row(FUSED, [0.8, 0.8, 0.8], [0.8, 0.8, 0.8], "float16", 3.0, dict(COUNTS)),
        Row(HALFMESH, [0.4, 0.5, 0.45], [0.4, 0.4, 0.4], "float16", 3.0, dict(OURS)),
        Row("peer", missing="not importable: no module"),
    ]
    options = {"work": "mlp", "title": "a small MLP", "precision": "fp16", "rows": rows, "clip": 1.0} | changes
    return Result(**options)


def find(goals_found, text):
    return next(goal for goal in goals_found if text in goal.figure)


def test_goals():
    found = goals.judge([small()])
    assert find(found, "mlp_fp16_clip: time over the hand").reached == "yes"
    assert find(found, "mlp_fp16_clip: time over the hand").shown == "0.450 [0.425, 0.475]"
    fused = find(found, "mlp_fp16_clip: time over the same loop's with fused=True")
    assert (fused.limit, fused.measured) == (pytest.approx(1.04), pytest.approx(0.5625))
    assert find(found, "Python calls").measured == pytest.approx(0.3)
    assert find(found, "vit_bf16").reached == "not measured"
    slow = small()
    slow.rows[3].wall, slow.rows[3].counts["host reads"] = [0.9, 0.9, 0.9], 2
    found = goals.judge([slow])
    assert find(found, "mlp_fp16_clip: time over the hand").reached == "no"
    table = goals.table(found)
    assert "| host reads in the median step, one process and data parallel | <= 0 | 2 (mlp_fp16_clip 2) | no |" in table
    assert set(goals.STEP_RATIOS) <= {case.key for cases in run.WORKS.values() for case in cases}


def test_table():
    text = report.one(small())
    assert "### a small MLP; fp16, clipped at 1" in text
    assert f"| {HALFMESH} | 0.450 [0.425, 0.475] | 0.400 | 0.562 | 300 | 40 | 0 |" in text
    assert f"| {LOOP} | 1.000 [1.000, 1.000] | 1.000 | 1.250 | 1,000 | 50 | 1 + 8 |" in text
    assert "| peer | not measured: not importable: no module |" in text


def test_the_whole_page_and_the_plot(tmp_path):
    raw = tmp_path / "results" / "raw"
    results = [small(), small(work="vit", precision="bf16", clip=0.0), small(work="naive_tail", group="tail")]
    for result in results:
        result.save(raw)
    assert sorted(one.work for one in load(raw)) == ["mlp", "naive_tail", "vit"]
    (raw / "machine.txt").write_text('{"processor": "a fast one"}')
    assert report.write(raw, tmp_path / "results", ["dp2_fp32"]) == tmp_path / "RESULTS.md"
    text = (tmp_path / "RESULTS.md").read_text()
    parts = ["a fast one", "## Goals", "### a small MLP; bf16", "results/speed.png"]
    assert all(part in text for part in [*parts, "- dp2_fp32: it failed in this run"])
    drawn = plot.draw(raw, tmp_path / "results" / "speed.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_only_what_was_asked_for_is_measured(monkeypatch, capsys, tmp_path):
    measured = []
    monkeypatch.setattr(run, "measure_all", lambda cases, *_: measured.extend(case.key for case in cases) or ["it"])
    chosen = ["transformer", "startup", "--precisions", "fp32", "fp16"]
    for arguments in (["--out", str(tmp_path), "--works", *chosen], ["--rounds", "10"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
        with pytest.raises(SystemExit):
            run.main()
    assert measured == ["transformer_fp32", "transformer_fp16_clip", "import_none", "construction_none"]
    assert "--rounds 10: give an odd number of at least 9" in capsys.readouterr().err
