"""docs/checkpoints.md: its loop runs, goes on from where it was, and its picture of a folder is right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from test_readme import find_python, stand_ins

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "checkpoints.md").read_text()


def test_the_loop(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    loop = find_python(PAGE, "train.py")
    names = stand_ins() | {"torch": torch}
    exec(loop, names)
    steps = names["engine"].global_step
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == [f"step-{step:08d}" for step in (steps // 4 * 4 - 4, steps // 4 * 4)]
    again = stand_ins()
    exec(loop, again | {"torch": torch})
    first, second = names["model"].state_dict(), again["model"].state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first), "it did not go on as before"
    picture = PAGE[PAGE.index("    step-00001200/") :].partition("```")[0]
    pictured = set(re.findall(r"^        (\S+) ", picture, re.MULTILINE))
    assert pictured == {path.name for path in (tmp_path / "checkpoints" / kept[0]).iterdir()}
