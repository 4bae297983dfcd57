"""Table, goals and plot of a small result, and what stands where nothing was measured."""

import pytest

from benchmarks import goals, plot, report, run
from benchmarks.harness import AGAIN, FUSED, HALFMESH, LOOP, Result, Row, load
from benchmarks.machine import stamp

COUNTS = {"Python calls": 1000, "aten ops": 50, "host reads": 1, "step counter reads": 8}
OURS = {"Python calls": 300, "aten ops": 40, "host reads": 0, "step counter reads": 0}


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
    assert find(found, "host reads").reached == "yes"
    assert find(found, "vit_bf16").reached == "not measured"
    assert find(found, "`import halfmesh").reached == "not measured"


def test_goals_that_are_not_reached():
    slow = small()
    slow.rows[3].wall, slow.rows[3].counts["host reads"] = [0.9, 0.9, 0.9], 2
    found = goals.judge([slow])
    assert find(found, "mlp_fp16_clip: time over the hand").reached == "no"
    assert find(found, "fused=True").reached == "no"
    table = goals.table(found)
    assert "| host reads in the median step, one process and data parallel | <= 0 | 2 (mlp_fp16_clip 2) | no |" in table


def test_looks_that_are_rare_are_told():
    rare = small()
    rare.rows[3].counts["most host reads"] = 2
    table = goals.table(goals.judge([rare]))
    assert "<= 0 | 0 (at times: mlp_fp16_clip 2) | yes |" in table
    assert "| 300 | 40 | 0, at times 2 |" in report.one(rare)


def test_goals_of_the_start():
    imports = Result(
        "import",
        "import",
        "none",
        [Row("torch alone", [1.0], [1.0]), Row(HALFMESH, [1.01], [1.02], counts={"new modules": 1})],
        group="import",
    )
    rows = [Row("fp32", [0.5], counts={"seconds": 0.5}), Row("NAIVE fp16", [2.5], counts={"seconds": 2.5})]
    found = goals.judge([imports, Result("construction", "", "none", rows, group="construction")])
    assert find(found, "`import halfmesh").reached == "yes"
    assert "| halfmesh | 1.010 [1.010, 1.010] | 1.020 | 1 |" in report.one(imports)
    assert [find(found, f"{name}: making an engine").reached for name in ("fp32", "NAIVE fp16")] == ["yes", "no"]


def test_table():
    text = report.one(small())
    assert "### a small MLP; fp16, clipped at 1" in text
    assert "First row: 1e+03 ms a step. 3 rounds of 1 step(s) each." in text
    assert f"| {HALFMESH} | 0.450 [0.425, 0.475] | 0.400 | 0.562 | 300 | 40 | 0 |" in text
    assert f"| {LOOP} | 1.000 [1.000, 1.000] | 1.000 | 1.250 | 1,000 | 50 | 1 + 8 |" in text
    assert "| peer | not measured: not importable: no module |" in text


def test_ranks_have_columns_for_bytes():
    shared = small(ranks=2, group="layouts")
    for row in shared.rows:
        row.counts |= {"bytes reduced": 3469312, "bytes sent": 0}
    lines = report.one(shared).splitlines()
    header = next(line for line in lines if "bytes reduced" in line)
    row = next(line for line in lines if line.startswith(f"| {HALFMESH} "))
    assert "| 3,469,312 | 0 |" in row
    assert header.count("|") == row.count("|")


def test_the_whole_page_and_the_plot(tmp_path):
    raw = tmp_path / "results" / "raw"
    for result in (small(), small(work="vit", precision="bf16", clip=0.0), small(work="naive_tail", group="tail")):
        result.save(raw)
    (raw / "machine.txt").write_text('{"processor": "a fast one"}')
    assert report.write(raw, tmp_path / "results", ["dp2_fp32"]) == tmp_path / "RESULTS.md"
    text = (tmp_path / "RESULTS.md").read_text()
    for part in (
        "a fast one",
        "## Goals",
        "### a small MLP; bf16",
        "results/speed.png",
        "- dp2_fp32: it failed in this run",
    ):
        assert part in text
    drawn = plot.draw(raw, tmp_path / "results" / "speed.png")
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_goals_have_a_work_that_measures_them():
    """A key that no case has would be `not measured` for ever."""
    keys = {case.key for cases in run.WORKS.values() for case in cases}
    assert set(goals.STEP_RATIOS) <= keys
    assert {"import_none", "construction_none"} <= keys


def test_even_or_few_rounds_are_refused(monkeypatch, capsys):
    for rounds in ("10", "7"):
        monkeypatch.setattr("sys.argv", ["benchmarks", "--rounds", rounds])
        with pytest.raises(SystemExit):
            run.main()
        assert f"--rounds {rounds}: give an odd number of at least 9" in capsys.readouterr().err


def test_only_what_was_asked_for_is_measured(monkeypatch, capsys, tmp_path):
    measured = []
    monkeypatch.setattr(run, "measure_all", lambda cases, *_: measured.extend(case.key for case in cases) or ["it"])
    for chosen in (["transformer", "startup", "--precisions", "fp32", "fp16"], ["tail", "--precisions", "fp32"]):
        monkeypatch.setattr("sys.argv", ["benchmarks", "--out", str(tmp_path), "--works", *chosen])
        with pytest.raises(SystemExit):
            run.main()
    assert measured == ["transformer_fp32", "transformer_fp16_clip", "import_none", "construction_none"]
    assert "tail is not measured in fp32; leave --precisions out" in capsys.readouterr().err


def test_what_an_earlier_run_has_measured_is_said_to_be_so():
    old, new = ({"halfmesh": f"commit {number}", "date": f"2026-02-0{number}"} for number in (1, 2))
    results = [small(measured=stamp(old)), small(work="vit", title="a small ViT", measured=stamp(new))]
    _, first, second = report.render(results, new).split("### ")
    assert "Measured by an earlier run: commit 1, 2026-02-01." in first
    assert "earlier run" not in second


def test_each_result_says_which_commit_it_is_of(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure", lambda *_: small())
    (tmp_path / "machine.txt").write_text('{"halfmesh": "commit 3", "date": "2026-03-03", "torch": "2"}')
    run.one(run.Case("mlp", "fp16", 1.0), 3, True, str(tmp_path))
    (saved,) = load(tmp_path)
    assert saved.measured == "commit 3, 2026-03-03"
