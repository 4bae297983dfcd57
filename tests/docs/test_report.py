"""docs/report.md: its snippets run, its table is right, and its picture is there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from halfmesh.report.names import FILES
from halfmesh.report.run import read_run
from tests.docs.test_readme import find_blocks, find_python, find_rows, stand_ins

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "report.md").read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder in which the snippets have run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder := tmp_path_factory.mktemp("docs"))
        for name in ("train.py", "loop.py", "page.py"):
            exec(find_python(PAGE, name), stand_ins())
    return folder


def test_the_snippets_keep_runs(runs):
    first, second = read_run(runs / "runs/first"), read_run(runs / "runs/second")
    assert first.notes == second.notes == []
    assert {"loss", "eval_loss", "samples_per_s", "memory_mib", "loss_scale"} <= set(first.series)
    assert {"loss", "lr", "loss_scale"} <= set(second.series)
    assert first.session["status"] == second.session["status"] == "finished"
    assert "findings" in first.precision["report"]
    assert "findings" in second.precision["report"]
    assert "runs" not in (runs / "both.html").read_text()[:200]
    assert sorted(path.name for path in (runs / "runs/first").iterdir()) == sorted(FILES)


def test_the_commands(runs, monkeypatch):
    monkeypatch.chdir(runs)
    (block,) = find_blocks(PAGE, "console")
    for line in block.splitlines():
        assert CliRunner().invoke(app, shlex.split(line.removeprefix("$ halfmesh "))).exit_code == 0, line
    assert (runs / "report.html").exists()


def test_the_table_of_files():
    assert [row[0] for row in find_rows(PAGE, "file")] == [f"`{name}`" for name in FILES]


def test_the_picture():
    (picture,) = re.findall(r"!\[[^\]]+\]\(([\w.]+)\)", PAGE)
    assert (DOCS / picture).read_bytes().startswith(b"\x89PNG")
    assert (DOCS / picture).stat().st_size < 150_000
