"""docs/checkpoints.md: its loop runs, goes on from where it was, and its picture of a folder is right."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

import halfmesh
from tests.docs.test_readme import find_python, stand_ins

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "checkpoints.md").read_text()


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


def test_a_program_that_is_told_to_end_and_started_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program, whole, first, second = find_python(PAGE, "again.py"), *(stand_ins() for _ in range(3))
    exec(program.replace('"checkpoints"', '"others"'), whole)
    counted, criterion = [], first["criterion"]

    def criterion_of_step_7(*args):
        counted.append(1)
        if len(counted) == 7:
            os.kill(os.getpid(), signal.SIGTERM)
        return criterion(*args)

    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(halfmesh.Preempted):
            exec(program, first | {"criterion": criterion_of_step_7})
        assert {path.name for path in Path("checkpoints").iterdir()} == {"step-00000004", "step-00000007"}
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    exec(program, second)
    assert second["engine"].global_step == whole["engine"].global_step == 45
    expected, found = whole["model"].state_dict(), second["model"].state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert len(counted) == 7
