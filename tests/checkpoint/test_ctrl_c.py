"""Ctrl-C in a run with the config key checkpoint: the update is finished and saved, unless it is pressed again."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

import halfmesh
from halfmesh.checkpoint import preemption
from halfmesh.errors import Interrupted, Preempted
from tests.checkpoint.loops import at, loop, made, steps_in


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ctrl_c_finishes_the_update_and_saves(accumulation, tmp_path, caplog, capfd):
    engine = made(tmp_path / "saves", gradient_accumulation=accumulation)
    with (
        caplog.at_level("INFO", "halfmesh"),
        pytest.raises(KeyboardInterrupt) as ended,
        halfmesh.RunFolder(engine, tmp_path / "run"),
    ):
        loop(engine, at(3, accumulation, signal.SIGINT))
    number = 3 if accumulation == 1 else 4  # it comes within the fourth
    assert isinstance(ended.value, (Preempted, SystemExit))
    assert (ended.value.code, steps_in(tmp_path / "saves")) == (130, [number])
    place = tmp_path / "saves" / f"step-{number:08d}"
    said = f"interrupted by SIGINT: saved update {number} in {place}; to resume, run it again with resume='auto'"
    assert caplog.messages[-1] == said
    assert capfd.readouterr().err.count("press it again to end at once") == 1
    session = json.loads((tmp_path / "run" / "config.json").read_text())["sessions"][-1]
    assert (session["status"], session["to_step"], session.get("error")) == ("interrupted", number, None)
    engine.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert made(tmp_path / "saves").global_step == number


@pytest.mark.parametrize("launched", [True, False])
def test_a_second_ctrl_c_ends_at_once(launched, tmp_path, monkeypatch):
    """One that a launcher sends too is none."""
    monkeypatch.setattr(preemption, "AGAIN_S", 0.2)
    engine, reached = made(tmp_path), []
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")

    def twice(engine):
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("first")
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("second")
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("third")

    with pytest.raises(KeyboardInterrupt) as ended:
        loop(engine, twice)
    assert not isinstance(ended.value, Interrupted)
    assert (reached, steps_in(tmp_path)) == (["first", "second"] if launched else ["first"], [])


def test_ctrl_c_without_automatic_saves_ends_at_once(tmp_path):
    engine = made(None)
    with pytest.raises(KeyboardInterrupt), halfmesh.RunFolder(engine, tmp_path):
        loop(engine, at(2, signum=signal.SIGINT))
    session = json.loads((tmp_path / "config.json").read_text())["sessions"][-1]
    assert (session["status"], session["to_step"], engine.global_step) == ("interrupted", 2, 2)


class Press(halfmesh.Hook):
    def after_step(self, trainer, result):
        if trainer.engine.global_step == 2:
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("saves", [True, False])
def test_ctrl_c_ends_fit_with_a_line_and_a_status(saves, tmp_path, caplog):
    engine = made(tmp_path / "saves" if saves else None)
    hooks = [Press(), {"type": "run", "directory": tmp_path / "run"}]
    with caplog.at_level("INFO", "halfmesh"), pytest.raises(KeyboardInterrupt) as ended:
        halfmesh.Trainer(engine).fit(epochs=2, hooks=hooks)
    assert isinstance(ended.value, SystemExit)  # so Python prints no traceback
    assert (ended.value.code, ended.value.folder is not None) == (130, saves)
    said = "interrupted by SIGINT: saved update 2 in" if saves else "interrupted after update 2; set the config key ch"
    assert caplog.messages[-1].startswith(said)
    session = json.loads((tmp_path / "run" / "config.json").read_text())["sessions"][-1]
    assert (session["status"], session["to_step"]) == ("interrupted", 2)


def test_ctrl_c_is_pythons_where_one_types(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(KeyboardInterrupt) as ended:
        halfmesh.Trainer(made(None)).fit(epochs=2, hooks=[Press()])
    assert type(ended.value) is KeyboardInterrupt
    engine = made(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.close()
