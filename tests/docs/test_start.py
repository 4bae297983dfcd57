"""docs/index.md: what it says to type does what it shows, in one process and on two ranks."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

import halfmesh
from tests.docs.test_readme import check, find_blocks, find_python, find_text
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "index.md").read_text()
SHOWN = dict(block.split("\n", 1) for block in find_blocks(PAGE, "console"))
TOLD = find_text(PAGE)[1:]  # the first one installs


def run_the_loop(rank, world_size, folder):
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(find_python(PAGE, "train.py"), {})
    return printed.getvalue()


def without_digits(text):
    """Losses depend on how a machine rounds."""
    return re.sub(r"loss \d\.\d+", "loss", text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("config.py", "divided.py"):
        (tmp_path / name).write_text(find_python(PAGE, name))
    return tmp_path


def test_one_process(folder):
    printed = run_the_loop(0, 1, folder)
    assert without_digits(printed) == without_digits(SHOWN["$ python train.py"])
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", printed)]
    assert losses[-1] < losses[0] / 2


def test_two_processes(folder):
    first, second = run_ranks(run_the_loop, 2, folder)
    assert without_digits(first) == without_digits(SHOWN["$ torchrun --standalone --nproc-per-node 2 train.py"])
    assert second == ""


@pytest.mark.parametrize("command", [command for command in SHOWN if command.startswith("$ halfmesh")])
def test_checks(command, folder):
    assert check(command) == SHOWN[command]


@pytest.mark.parametrize(("snippet", "number"), [("habit.py", 0), ("twice.py", 1)])
def test_mistakes(snippet, number, folder):
    names = {}
    exec(find_python(PAGE, "train.py").replace("engine.close()", ""), names)
    if snippet == "twice.py":
        names["engine"].close()
    with pytest.raises(halfmesh.InputError) as told:
        exec(find_python(PAGE, snippet), names)
    assert str(told.value) == TOLD[number].strip()
