"""The report: what is read of a run's folder, also where it is damaged; what stands on the page; the command."""

from __future__ import annotations

import json
import math
import random
import re
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

import halfmesh
from halfmesh import InputError
from halfmesh.cli import app
from tests.support.report_runs import PRECISION, data_of, make_config, make_plan, make_records, page_of, write_run


def find_svgs(page):
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def section(page, key):
    return re.search(rf'<section id="{key}".*?</section>', page, re.DOTALL).group()


# --- what is on the page -------------------------------------------------------------------------------------------


def test_all_sections(tmp_path):
    page = page_of(write_run(tmp_path / "one"))
    charts = ["loss", "lr", "loss_scale", "grad_norm", "throughput", "memory"]
    keys = re.findall(r'<section id="([\w-]+)"', page)
    assert keys == ["summary", "plan", *charts, "skips", "mesh", "precision", "config"]
    for key, words in {
        "summary": "8 x NVIDIA H200",
        "plan": "mode naive, compute float16",
        "skips": "3-4, 57, 200-202",
        "memory": "plan, without activations: 3.0 GiB",
        "mesh": "blocks.0-5",
        "precision": "more than 5% of the gradients of blocks.1",
        "config": "NUM_EPOCHS",
    }.items():
        assert words in section(page, key)


def test_gaps_are_gaps(tmp_path):
    values = [1.0, 2.0, math.nan, 3.0, None, 4.0, 5.0]
    records = [{"step": step, "loss": value} for step, value in enumerate(values)]
    for picture in find_svgs(section(page_of(write_run(tmp_path / "one", records=records)), "loss")):
        (path,) = [p.get("d") for p in picture.iter("path") if "line" in p.get("class")]
        assert path.count("M") == 2
        assert len(re.findall(r"\d+\.\d \d+\.\d", path)) == 4
        assert len(list(picture.iter("circle"))) == 1  # the value between two gaps


@pytest.mark.parametrize("count", [6, 3000])
def test_every_skipped_update_has_its_mark(tmp_path, count):
    """Also where they are so many that their marks touch, and where records are thinned."""
    skipped = list(range(2, 2 + 33 * count, 33))
    records = make_records(steps=33 * count + 100, every=100, skipped=skipped)
    page = page_of(write_run(tmp_path / "one", records=records))
    assert all(f" {number}," in section(page, "skips").replace(">2,", "> 2,") for number in skipped[:-1])
    for picture in find_svgs(section(page, "loss_scale"))[2:]:
        left, right, high = (float(picture.get(f"data-{name}")) for name in ("left", "right", "high"))
        d = next(p.get("d") for p in picture.iter("path") if "skip" in p.get("class"))
        marks = {float(x) for x in re.findall(r"M([\d.]+) ", d)}
        wanted = {left + number / high * (right - left) for number in skipped}
        assert all(min(abs(mark - x) for mark in marks) < 0.11 for x in wanted)


def test_several_runs_side_by_side(tmp_path):
    config = {"bf16": {"mode": "naive"}, "LR": 1}
    one = write_run(tmp_path / "one", make_config(config={"LR": 0}))
    two = write_run(tmp_path / "two", make_config(config=config, settings={"bf16": {"mode": "naive"}, "seed": 7}))
    page = page_of(one, two)
    keys = re.findall(r'<section id="([\w-]+)"', page)
    assert keys[:3] == ["differences", "summary", "plan"]
    assert '<th scope="row">LR</th><td>0</td><td>1</td>' in section(page, "differences")
    assert "LR" not in section(page, "config").partition("<details>")[0]
    assert re.findall(r'<line class="line (s\d)"[^>]*></line></svg>(\w+)', section(page, "differences")) == [
        ("s0", "one"),
        ("s1", "two"),
    ]
    styles = {p.get("class") for p in find_svgs(section(page, "loss"))[-1].iter("path")}
    assert styles == {"line s0", "line s0 eval", "line s1", "line s1 eval"}
    assert page.count("3-4, 57, 200-202") == 2
    done = CliRunner().invoke(app, ["report", str(one), str(two), "--json"])
    differences = json.loads(done.stdout)["differences"]
    assert differences["seed"] == ["1024", "7"]
    assert differences["bf16.mode"] == [None, "naive"]


def test_what_differs_comes_first(tmp_path):
    """Also what is no key of the config: a plan, the size of the batches that came."""
    plan = make_plan()
    plan["plans"][0]["values"]["batch"] = {"per_rank": None, "data_ranks": 2, "accumulated": 4}
    plan["plans"][0]["rows"]["batch"] = "? per rank x 2 data rank(s) x 4 accumulated"
    one, two = (write_run(tmp_path / str(size), make_config(batch_rows=size), plan) for size in (3, 5))
    first = section(page_of(one, two), "differences")
    assert re.findall('<th scope="row">(.*?)</th>', first) == ["plan: batch"]
    for size in (3, 5):
        assert f"{size} per rank (the first batch) x 2 data rank(s) x 4 accumulated = {8 * size} samples" in first
    assert "none in config and plan" in section(page_of(one, one), "differences")
    assert 'id="differences"' not in page_of(one)


def test_each_run_has_a_colour_of_its_own(tmp_path):
    records = make_records(steps=20, every=10)
    page = page_of(*(write_run(tmp_path / str(number), records=records) for number in range(9)))
    rules = dict(re.findall(r"^\.(s\d+) { --c: (.*); }$", page, re.MULTILINE))
    assert len(set(rules.values())) == len(rules) == 9
    for kind, found in {"path": {"line", "skip"}, "line": {"level"}}.items():
        classes = re.findall(rf'<{kind} class="(\w+) (s\d+)', section(page, "loss_scale") + section(page, "memory"))
        for what in found:
            assert {style for name, style in classes if name == what} == set(rules), what


def test_warnings_of_a_run(tmp_path):
    records = make_records(steps=40)
    records[1]["warnings"] = [[0, "capped <at> 32768"], [15, "data"], [15], "x", [True, "y"], [1, 2]]
    records[3]["warnings"] = [[35, "data"]]
    page = page_of(write_run(tmp_path / "one", records=records))
    said = re.findall("<li>(.*?)</li>", section(page, "warnings"))
    assert said == ["after 0 updates: capped &lt;at&gt; 32768", "after 15 updates: data"]
    assert data_of(tmp_path / "one")["warnings"] == {"capped <at> 32768": 0, "data": 15}
    assert 'id="warnings"' not in page_of(write_run(tmp_path / "two"))


def test_nothing_of_a_run_is_markup(tmp_path):
    bad = "</script><b>bold</b><script>alert(1)</script>\"'&\x07"
    config = make_config(config={bad: {bad: bad}}, argv=[bad], error=bad, status="failed", versions={bad: bad})
    plan = make_plan()
    plan["plans"][0]["rows"][bad] = bad
    plan["plans"][0]["values"]["ranks"][0]["holds"] = [bad]
    records = [{"step": 1, bad: 1.0, "loss": 2.0, "warnings": [[1, bad]]}, {"step": 2, bad: 1.5, "loss": 1.0}]
    precision = {"step": bad, "report": {"findings": [bad], "layers": [{"name": bad}], "compute_dtype": bad}}
    page = page_of(write_run(tmp_path / "<b>one", config, plan, records, precision), write_run(tmp_path / "two"))
    assert "<b>" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "\x07" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in section(page, "config")
    assert not re.search(r"https?:|@import|url\(|src=|<img|<iframe", page), "it loads nothing"


def test_a_huge_run_is_a_small_page(tmp_path):
    records = make_records(steps=100_000, every=1, skipped=list(range(1, 100_001, 2)))
    records[70_000]["loss"] = 987.5
    page = page_of(write_run(tmp_path / "one", records=records))
    assert len(page.encode()) < 3_000_000
    assert "99997, 99999" in section(page, "skips")
    assert "highest 987.5" in section(page, "loss"), "thinning keeps extremes"


# --- what is read --------------------------------------------------------------------------------------------------


def test_a_killed_run(tmp_path):
    folder = write_run(tmp_path / "one", precision=None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 410, "loss": 0.')
    (folder / "plan.json").unlink()
    (folder / "config.json").write_text('{"sessions": [')
    run = data_of(folder)
    assert (run["last_step"], run["skipped"]) == (400, [3, 4, 57, 200, 201, 202])
    assert run["notes"] == [
        "the last line of metrics.jsonl was cut off, as when a run is killed, and is left out",
        "config.json cannot be read (JSONDecodeError)",
        "plan.json is missing",
    ]
    page = page_of(folder)
    assert all(note in page for note in run["notes"])
    assert "3-4, 57, 200-202" in page


def test_lines_that_are_no_records(tmp_path):
    lines = ["[1, 2]", '{"loss": 3}', '{"step": "x"}', '{"step": -1}', "\x00\x00", '{"step": 1e999}']
    lines += ['{"step": 2, "loss": 1.5, "note": "text", "flag": true}', "", '{"step": 1, "loss": NaN}']
    folder = write_run(tmp_path / "one", records=[])
    assert "has no records" in data_of(folder)["notes"][0]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    run = data_of(folder)
    assert run["notes"] == ["6 line(s) of metrics.jsonl are no records, and are left out"]
    assert run["series"] == {"loss": {"step": [1, 2], "value": [None, 1.5]}}


def test_any_damage_makes_a_page(tmp_path):
    """Some values anywhere in the files are something else."""
    odd = [None, [], {}, "", "text", "</script>", -1, 0, 1.5, True, 10**400, 1e308, -1e308, math.inf, math.nan, [[]]]
    odd += [[None], {"a": {}}, "\ud800", "\x00", 5e-324, 10**18, ["1"], "2026-99-99"]

    def spoil(value):
        if chance.random() < 0.12:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        return [spoil(item) for item in value] if isinstance(value, list) else value

    for seed in range(40):
        chance = random.Random(seed)
        records = [spoil(record) for record in make_records(steps=60, every=3)]
        folder = write_run(tmp_path / str(seed), spoil(make_config()), spoil(make_plan()), records, spoil(PRECISION))
        assert page_of(folder).count("</script>") == 2
        data_of(folder)


def test_what_is_no_run(tmp_path):
    write_run(tmp_path / "first")
    write_run(tmp_path / "second")
    (tmp_path / "empty").mkdir()
    for name, message in {
        "frist": r"there is no folder .*frist; did you mean '.*first'\?",
        "empty": r"empty is no run's folder: it has none of config\.json, .*; runs beside it: .*first",
        "first/metrics.jsonl": r"is a file, but a run is a folder; give .*first",
        ".": "holds runs and is none itself: give first, second",
    }.items():
        with pytest.raises(InputError, match=message):
            page_of(tmp_path / name)


# --- the command ---------------------------------------------------------------------------------------------------


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "first")
    done = CliRunner().invoke(app, ["report", "first"])
    assert done.exit_code == 0, done.output
    assert re.fullmatch(r"report\.html \(\d+ KiB\)\n", done.stdout)
    done = CliRunner().invoke(app, ["report", "first", "frist", "--out", "other.html"])
    assert done.exit_code == 1
    assert "halfmesh report: there is no folder frist; did you mean 'first'?" in done.output
    assert not (tmp_path / "other.html").exists()


def test_only_reports_are_replaced(tmp_path):
    run, out = write_run(tmp_path / "first"), tmp_path / "deep" / "report.html"
    assert halfmesh.write_report(run, out=out) == out
    halfmesh.write_report(run, run, out=out)
    out.write_text("mine")
    with pytest.raises(InputError, match="is there, and is no report; give another name"):
        halfmesh.write_report(run, out=out)
    assert CliRunner().invoke(app, ["report", str(run), "--out", str(out)]).exit_code == 1
    assert out.read_text() == "mine"
    assert CliRunner().invoke(app, ["report", str(run), "--out", str(out), "--force"]).exit_code == 0
    assert "halfmesh report" in out.read_text()
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        halfmesh.write_report(run, out=tmp_path)


def test_what_the_page_is_made_of_is_packaged():
    root = Path(__file__).resolve().parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["halfmesh"]
    files = (root / "halfmesh").rglob("*")
    here = {str(path.relative_to(root / "halfmesh")) for path in files if path.suffix in (".css", ".js")}
    assert here
    assert here <= set(packaged)
