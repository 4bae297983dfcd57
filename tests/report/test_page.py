"""The page: what stands in it, that it is text which runs cannot change, and how large it is; the command."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app
from halfmesh.report.chart import SIZES, Chart, Line, draw
from halfmesh.report.markup import escape, tag
from halfmesh.report.mesh import draw_mesh
from halfmesh.report.page import make_page
from halfmesh.report.run import Series, read_runs
from tests.support.report_runs import make_config, make_plan, make_records, write_run


def page_of(*folders):
    return make_page(read_runs(list(folders)))


def find_svgs(page):
    return [ET.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def section(page, key):
    return re.search(rf'<section id="{key}".*?</section>', page, re.DOTALL).group()


def test_all_sections(tmp_path):
    page = page_of(write_run(tmp_path / "one"))
    keys = re.findall(r'<section id="([\w-]+)"', page)
    charts = ["loss", "lr", "loss_scale", "grad_norm", "throughput", "memory"]
    assert keys == ["summary", "plan", *charts, "skips", "mesh", "precision", "config"]
    assert "1 h 1 min" in section(page, "summary")
    assert "8 x NVIDIA H200" in section(page, "summary")
    assert "mode naive, compute float16" in section(page, "plan")
    assert "3-4, 57, 200-202" in section(page, "skips")
    assert "plan, without activations: 3.0 GiB" in section(page, "memory")
    assert ">Memory, GiB<" in section(page, "memory")
    assert "blocks.0-5" in section(page, "mesh")
    assert "more than 5% of the gradients of blocks.1" in section(page, "precision")
    assert "NUM_EPOCHS" in section(page, "config")


def test_other_records_are_drawn_too(tmp_path):
    page = page_of(write_run(tmp_path / "one", records=[{"step": 1, "eval_acc<u>racy": 0.5}, {"step": 2, "mfu": 0.4}]))
    assert "eval_acc&lt;u&gt;racy" in section(page, "other-0")
    assert ">mfu<" in section(page, "other-1")
    assert "Not recorded: give fit the hook &quot;memory&quot;" in section(page, "memory")


def test_gaps_are_gaps():
    values = [1.0, 2.0, None, 3.0, None, 4.0, 5.0]
    chart = Chart("loss", "Loss", [Line("train", Series(list(range(7)), values))], 6)
    for size in SIZES:
        picture = ET.fromstring(draw(chart, size))
        (path,) = [p.get("d") for p in picture.iter("path")]
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


def test_where_there_is_no_loss_scale_skips_are_marked_at_the_loss(tmp_path):
    page = page_of(write_run(tmp_path / "one", records=[{"step": 5, "loss": 1.0, "skipped": [3]}]))
    assert "skipped updates" in section(page, "loss")
    assert "skipped updates" not in section(page, "loss_scale")


def test_a_loss_that_is_not_scaled(tmp_path):
    """The Trainer records a scale of 1 then."""
    plan = make_plan()
    plan["plans"][0]["values"]["loss_scale"] = None
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", plan=plan)
    assert "Not recorded: the loss is scaled in fp16 only" in section(page_of(two), "loss_scale")
    paths = [p.get("class") for p in find_svgs(section(page_of(one, two), "loss_scale"))[-1].iter("path")]
    assert paths == ["skip k0", "skip k1", "line s0"]


def test_nothing_of_a_run_is_markup(tmp_path):
    bad = "</script><b>bold</b><script>alert(1)</script>\"'&\x07"
    config = make_config(config={bad: {bad: bad}}, argv=[bad], error=bad, status="failed", versions={bad: bad})
    plan = make_plan()
    plan["plans"][0]["rows"][bad] = bad
    plan["plans"][0]["values"]["ranks"][0]["holds"] = [bad]
    records = [{"step": 1, bad: 1.0, "loss": 2.0}, {"step": 2, bad: 1.5, "loss": 1.0}]
    precision = {"step": bad, "report": {"findings": [bad], "layers": [{"name": bad}], "compute_dtype": bad}}
    page = page_of(write_run(tmp_path / "<b>one", config, plan, records, precision), write_run(tmp_path / "two"))
    assert "<b>" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert "\x07" not in page
    assert "&lt;b&gt;bold&lt;/b&gt;" in section(page, "config")
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page).group(1))
    assert any("<b>one" in line["label"] for chart in data.values() for line in chart["lines"])


def test_escaping():
    assert escape("a<b>&\"'\ud800\x00\n") == "a&lt;b&gt;&amp;&quot;&#x27;?\N{REPLACEMENT CHARACTER}\n"
    assert tag("p", "<", tag("b", "x"), [None, ">"], class_='a"b') == '<p class="a&quot;b">&lt;<b>x</b>&gt;</p>'


def test_nothing_is_loaded(tmp_path):
    page = page_of(write_run(tmp_path / "one"))
    assert not re.search(r"https?:|@import|url\(|src=|<img|<iframe", page)
    assert "default-src 'none'".replace("'", "&#x27;") in page


def test_what_the_page_is_made_of_is_packaged():
    root = Path(__file__).resolve().parents[2]
    packaged = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["halfmesh"]
    here = {
        f"report/{path.name}" for path in (root / "halfmesh" / "report").iterdir() if path.suffix in (".css", ".js")
    }
    assert here
    assert here <= set(packaged)


def test_a_huge_run_is_a_small_page(tmp_path):
    skipped = list(range(1, 100_001, 2))
    records = make_records(steps=100_000, every=1, skipped=skipped)
    for number, record in enumerate(records):
        record |= {f"layer_{n}": (number * n) % 17 for n in range(4)}
    records[70_000]["loss"] = 987.5
    page = page_of(write_run(tmp_path / "one", records=records))
    assert len(page.encode()) < 3_000_000
    assert "99997, 99999" in section(page, "skips")
    assert "highest 987.5" in section(page, "loss")


def test_several_runs_side_by_side(tmp_path):
    folders = [write_run(tmp_path / name, make_config(config={"LR": n})) for n, name in enumerate(["one", "two", "x"])]
    page = page_of(*folders)
    assert '<th scope="row">LR</th><td>0</td><td>1</td><td>2</td>' in section(page, "config")
    loss = find_svgs(section(page, "loss"))[-1]
    styles = {p.get("class") for p in loss.iter("path")}
    assert styles == {"line s0", "line s0 eval", "line s1", "line s1 eval", "line s2", "line s2 eval"}
    assert page.count("3-4, 57, 200-202") == 3
    assert "one train" in section(page, "loss")


def test_the_mesh():
    assert draw_mesh({}) is None
    assert draw_mesh({"values": {"mesh": {"pp": 2, "dp": 1, "tp": 1}, "ranks": [{}]}}) is None
    plan = make_plan(pp=2, dp=16, tp=2)["plans"][0]
    words = [text.text for text in ET.fromstring(draw_mesh(plan)).iter("text")]
    assert [word for word in words if word.startswith("rank ")] == [
        f"rank {stage * 32 + column}" for stage in range(2) for column in (0, 1, 2, 3, 4, 5, 31)
    ]
    assert {"dp 0, tp 1", "dp 15, tp 1", "pp 1", "...", "tensor 2/2", "3.0 GiB", "blocks.6-11, a_mod …"} <= set(words)


# -- the command -------------------------------------------------------------------------------------------------


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
    assert (
        "halfmesh report runs/first runs/second --out report.html"
        in CliRunner().invoke(app, ["report", "--help"]).output
    )


def test_json(tmp_path):
    folder = write_run(tmp_path / "first", records=[{"step": 1, "loss": float("inf")}, {"step": 2, "loss": 0.5}])
    done = CliRunner().invoke(app, ["report", str(folder), "--json"])
    (run,) = json.loads(done.stdout)["runs"]
    assert run["series"]["loss"] == {"step": [1, 2], "value": [None, 0.5]}
    assert (run["skipped"], run["last_step"]) == ([], 2)
    assert not (tmp_path / "report.html").exists()


def test_only_reports_are_written_anew(tmp_path):
    run, out = write_run(tmp_path / "first"), tmp_path / "deep" / "report.html"
    assert halfmesh.write_report(run, out=out) == out
    halfmesh.write_report(run, run, out=out)
    assert "2 runs" in out.read_text() or "first (1)" in out.read_text()
    out.write_text("mine")
    with pytest.raises(halfmesh.InputError, match="is there, and is no report; give another name"):
        halfmesh.write_report(run, out=out)
    assert out.read_text() == "mine"
    assert CliRunner().invoke(app, ["report", str(run), "--out", str(out)]).exit_code == 1
    assert CliRunner().invoke(app, ["report", str(run), "--out", str(out), "--force"]).exit_code == 0
    assert "halfmesh report" in out.read_text()
    with pytest.raises(halfmesh.InputError, match="is a folder; name a file in it"):
        halfmesh.write_report(run, out=tmp_path)
    with pytest.raises(halfmesh.InputError, match="cannot be written"):
        halfmesh.write_report(run, out=out / "below.html")


def test_reports_need_no_torch(tmp_path):
    folder = write_run(tmp_path / "first")
    code = (
        "import sys; from halfmesh.cli import app; app(['report', sys.argv[1], '--json'], standalone_mode=False); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], stdout=subprocess.DEVNULL).returncode == 0


def test_json_is_json_whatever_the_files_hold(tmp_path):
    folder = write_run(tmp_path / "run", make_config(config={"LIMIT": math.inf, "MANY": 10**400}))
    (folder / "precision.json").write_text('{"report": {"skipped": NaN}}')
    result = CliRunner().invoke(app, ["report", str(folder), "--json"])
    assert result.exit_code == 0

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    data = json.loads(result.stdout, parse_constant=refuse)
    assert data["runs"][0]["sessions"][0]["config"]["LIMIT"] == "inf"
