"""The report: what is read of a run's folder, also where it is damaged; what stands on the page; the command; and the
picture of a mesh."""

import json
import math
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

import halfmesh
from halfmesh import InputError
from halfmesh.cli import app
from halfmesh.options import Options
from halfmesh.parallel.axis import Axis
from halfmesh.report.mesh_picture import compress, describe_shards, draw
from halfmesh.report.page import thinned
from halfmesh.report.run import Series
from tests.report.report_runs import data_of, make_config, make_plan, make_records, page_of, write_run


def section(page, key):
    return re.search(rf'<section id="{key}".*?</section>', page, re.DOTALL).group()


def charts_of(page):
    """What the page draws."""
    return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1))


def rows(text):
    """Names and texts of a section's tables."""
    found = re.findall(r'<tr><th scope="row">(.*?)</th>(.*?)</tr>', text)
    return {name: re.findall("<td>(.*?)</td>", cells) for name, cells in found}


def labels(chart):
    return [line["label"] for line in chart["lines"]]


def test_all_sections(tmp_path):
    records = make_records()
    records[1]["warnings"] = [[0, "capped <at> 32768"], [15, "data"]]
    records[3]["warnings"] = [[35, "data"]]
    page = page_of(write_run(tmp_path / "one", records=records))
    charts = ["loss", "lr", "loss_scale", "grad_norm", "throughput", "memory"]
    keys = re.findall(r'<section id="([\w-]+)"', page)
    assert keys == ["warnings", "summary", "plan", *charts, "skips", "mesh", "precision", "config"]
    assert set(charts_of(page)) == set(charts)
    for key, words in {
        "summary": "8 x NVIDIA H200",
        "plan": "mode naive, compute float16",
        "skips": "3-4, 57, 200-202",
        "mesh": "blocks.0-5",
        "precision": "more than 5% of the gradients of blocks.1",
        "config": "NUM_EPOCHS",
    }.items():
        assert words in section(page, key)
    assert rows(section(page, "summary"))["Duration"] == ["1 h 1 min"]
    assert rows(section(page, "summary"))["Optimizer"] == ["AdamW, lr 0.001, betas [0.9, 0.95]"]
    said = re.findall("<li>(.*?)</li>", section(page, "warnings"))
    assert said == ["after 0 updates: capped &lt;at&gt; 32768", "after 15 updates: data"]
    chart = charts_of(page)["loss_scale"]
    scale, marks = chart["lines"]
    assert chart["log"] == 2
    assert (marks["label"], marks["kind"], marks["x"]) == ("skipped updates", "skips", [3, 4, 57, 200, 201, 202])
    assert all(mark < min(scale["y"]) for mark in marks["y"])


def test_figures_have_their_values_in_a_table_and_gaps_are_gaps(tmp_path):
    records = [{"step": step, "loss": value} for step, value in enumerate([4.0, 8.0, math.nan, 2.0, None, 3.5])]
    page = page_of(write_run(tmp_path / "one", records=[*records, {"step": 6, "eval_accuracy": 0.5}]))
    assert rows(section(page, "loss")) == {"train": ["4", "3.5", "2", "8"]}
    (line,) = charts_of(page)["loss"]["lines"]
    assert line["y"] == [4.0, 8.0, None, 2.0, None, 3.5]
    assert [chart["title"] for chart in charts_of(page).values()] == ["Loss", "Eval accuracy"]
    for words in ("Loss scale: only runs in fp16", "Gradient norm: measured in", "Memory: the hook"):
        assert words in section(page, "absent")


def test_memory_against_the_plan_and_changes_where_a_run_was_resumed(tmp_path):
    config = make_config()
    config["sessions"].append(config["sessions"][0] | {"from_step": 5, "config": {"NUM_EPOCHS": 4}})
    page = page_of(write_run(tmp_path / "one", config, records=[{"step": 1, "memory_mib": 7030}]))
    lines = {line["label"]: line["y"] for line in charts_of(page)["memory"]["lines"]}
    assert lines == {"measured": [7030], "planned, without activations": [3072, 3072]}
    assert "from update 5: NUM_EPOCHS 3 -&gt; 4" in section(page, "config")
    assert "hysteresis" in section(page, "config"), "all keys"


def test_files_and_lines_that_are_unreadable_or_missing_are_named(tmp_path):
    folder = write_run(tmp_path / "one", precision=None)
    (folder / "plan.json").unlink()
    (folder / "config.json").write_text('{"sessions": [')
    run = data_of(folder)
    assert run["skipped"] == [3, 4, 57, 200, 201, 202]
    problems = {"config.json": "JSONDecodeError", "plan.json": "FileNotFoundError"}
    assert run["notes"] == [f"{name} is unreadable ({problem})" for name, problem in problems.items()]
    assert all(note in section(page_of(folder), "notes") for note in run["notes"])
    folder = write_run(tmp_path / "two", records=[], precision=None)
    assert "has no records" in data_of(folder)["notes"][0]
    (folder / "metrics.jsonl").write_text('{"step": 5, "skipped": [2, 3], "skipped_steps": 3}\n')
    assert data_of(folder)["notes"][0].startswith("the numbers of 1 of 3 skipped updates are unknown: ")
    lines = ["[1, 2]", '{"loss": 3}', '{"step": "x"}', '{"step": -1}', "\x00\x00", '{"step": 410, "loss": 0.']
    lines += ['{"step": 2, "loss": 1.5, "note": "text"}', '{"step": 1, "loss": NaN}', '{"step": 2, "eval_loss": 2}']
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = data_of(folder)
    assert run["notes"] == ["metrics.jsonl: 6 unreadable lines left out"]
    assert run["notes"][0] in section(page_of(folder), "notes")
    series = {"loss": {"step": [1, 2], "value": [None, 1.5]}, "eval_loss": {"step": [2], "value": [2]}}
    assert run["series"] == series


def test_several_runs_side_by_side(tmp_path):
    plan = make_plan()
    plan["plans"][0]["rows"]["batch"] = "4 per rank"
    one = write_run(tmp_path / "one", make_config(config={"LR": 0}, settings={"seed": 1024}))
    config = {"bf16": {"mode": "naive"}, "LR": 1}
    two = write_run(tmp_path / "two", make_config(config=config, settings={"seed": 7}), plan)
    page = page_of(one, two)
    assert re.findall(r'<section id="([\w-]+)"', page)[:3] == ["differences", "summary", "plan"]
    differences = {"LR": ["0", "1"], "bf16.mode": ["(not set)", "naive"], "seed": ["1024", "7"]}
    differences["plan: batch"] = ["", "4 per rank"]
    assert rows(section(page, "differences")) == differences
    charts = charts_of(page)
    assert labels(charts["loss"]) == ["one train", "one eval", "two train", "two eval"]
    assert [line["colour"] for line in charts["loss"]["lines"]] == [0, 0, 1, 1]
    assert labels(charts["loss_scale"]) == ["one", "two", "one skipped updates", "two skipped updates"]
    done = CliRunner().invoke(app, ["report", str(one), str(two), "--json"])
    assert json.loads(done.stdout)["differences"]["LR"] == ["0", "1"]


def test_nothing_of_a_run_is_markup(tmp_path):
    bad = "</script><b>bold</b><script>alert(1)</script>\"'&\ud800"
    config = make_config(config={bad: {bad: bad}}, argv=[bad], error=bad, status="failed", versions={bad: bad})
    plan = make_plan()
    plan["plans"][0]["rows"][bad] = bad
    plan["plans"][0]["values"]["ranks"][0]["holds"] = [bad]
    records = [{"step": 1, bad: 1.0, "loss": 2.0, "warnings": [[1, bad]]}, {"step": 2, bad: 1.5, "loss": 1.0}]
    precision = {"step": bad, "report": {"findings": [bad]}, "text": bad}
    page = page_of(write_run(tmp_path / "<b>one", config, plan, records, precision), write_run(tmp_path / "two"))
    assert "<b>" not in page
    assert page.count("<script") == page.count("</script>") == 2
    own = page[: page.index("<script>")]
    assert not re.search(r"https?://(?!www.w3.org/2000/svg)|@import|url\(|src=|<img|<iframe", own), "it loads nothing"
    assert "Copyright (c) 2022 Leon Sorokin" in page, "uPlot is in the page, and so is its licence"


def test_a_huge_run_is_a_small_page(tmp_path):
    records = make_records(steps=40_000, every=1, skipped=range(1, 40_001, 2))
    records[30_000]["loss"] = 987.5
    page = page_of(write_run(tmp_path / "one", records=records))
    assert len(page.encode()) < 1_500_000
    assert 987.5 in charts_of(page)["loss"]["lines"][0]["y"], "thinning keeps extremes"


def test_the_command_replaces_nothing_but_reports(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, out = write_run(tmp_path / "first"), tmp_path / "report.html"
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        done = CliRunner().invoke(app, ["report", "first"])
        assert done.exit_code == 0, done.output
        assert re.fullmatch(r"report\.html \(\d+ KiB\)\n", done.stdout)
    for arguments, words in (
        (["first", "frist", "--out", "other.html"], "frist is not a folder; give the folder of a RunFolder"),
        (["empty"], "empty holds none of config.json, "),
        (["first", "--out", "q.pdf"], "give a name that ends in .html"),
    ):
        done = CliRunner().invoke(app, ["report", *arguments])
        assert (done.exit_code, words in done.output) == (2, True), done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "first", "report.html"]
    with pytest.raises(InputError, match="cannot be written: there is no folder "):
        halfmesh.write_report(run, out=tmp_path / "deep" / "report.html")
    out.write_text("mine")
    with pytest.raises(InputError, match="exists and is not a report; give another name"):
        halfmesh.write_report(run, out=out)
    assert out.read_text() == "mine"
    assert CliRunner().invoke(app, ["report", "first", "--force"]).exit_code == 0
    assert "halfmesh report" in out.read_text()


def test_what_the_page_is_made_of_is_packaged():
    root = Path(__file__).resolve().parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["halfmesh"]
    packaged = {path for pattern in patterns for path in (root / "halfmesh").glob(pattern)}
    needed = {path for path in (root / "halfmesh" / "report").rglob("*") if path.suffix not in (".py", ".pyc")}
    assert {path for path in needed if path.is_file()} <= packaged


def texts(svg):
    return [element.text for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def parallel_of(**parallel):
    return halfmesh.Config.model_validate({"parallel": parallel}).parallel


def test_an_axis_of_others_appears_in_the_picture_by_itself():
    class WideOptions(Options):
        size: int = 1

    class Wide(Axis):
        dim, options = "wp", WideOptions

    halfmesh.AXES.register("wide", Wide)
    try:
        parallel = parallel_of(pipeline={"size": 2, "microbatches": 2}, tensor=2, wide=3, data="fsdp")
        dims = parallel.dims(24)
        assert describe_shards(parallel, dims, 23) == "tensor 2/2, wide 3/3, fsdp 2/2"
    finally:
        halfmesh.AXES.unregister("wide")
    drawn = texts(draw(dims.sizes, lambda rank: []))
    assert drawn[0] == "24 ranks: pp 2 x dp 2 x wp 3 x tp 2 (10 are not drawn)"
    assert {"dp 1, wp 2, tp 1", "rank 23", "..."} <= set(drawn)


def test_a_rank_has_its_lines_and_its_node():
    svg = draw({"pp": 2, "dp": 1, "tp": 2}, lambda rank: [f"blocks.{rank} <&>", "", "1.0 GiB"], node=2)
    assert texts(svg) == [
        "4 ranks: pp 2 x dp 1 x tp 2", "tp 0", "tp 1",
        "pp 0", "rank 0", "node 0", "blocks.0 <&>", "1.0 GiB", "rank 1", "node 0", "blocks.1 <&>", "1.0 GiB",
        "pp 1", "rank 2", "node 1", "blocks.2 <&>", "1.0 GiB", "rank 3", "node 1", "blocks.3 <&>", "1.0 GiB",
    ]  # fmt: skip
    names = ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.7", "head", "0", "1"]
    assert compress(names) == ["embed", "blocks.0-2", "blocks.7", "head", "0-1"]
    hybrid = {"strategy": "fsdp", "hybrid": 2}
    for data, expected in (("replicate", [""] * 4), (hybrid, ["fsdp 1/2", "fsdp 2/2"] * 2)):
        parallel = parallel_of(data=data)
        assert [describe_shards(parallel, parallel.dims(4), rank) for rank in range(4)] == expected


def test_a_long_series_keeps_its_ends_and_the_extremes_of_600_buckets():
    steps = list(range(1799))
    kept = thinned(Series(steps, [float(step % 7) for step in steps])).step
    assert (kept[0], kept[-1], 1000 < len(kept) <= 1202) == (0, 1798, True)
