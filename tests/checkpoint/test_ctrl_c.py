"""Ctrl-C in a run with the config key checkpoint: the update is finished and saved, unless it is pressed again."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

import halfmesh
from halfmesh.checkpoint import preemption
from halfmesh.errors import Interrupted
from tests.checkpoint.loops import at, loop, made, steps_in


def session_in(folder):
    session = json.loads((folder / "config.json").read_text())["sessions"][-1]
    return session["status"], session["to_step"]


def test_ctrl_c_finishes_the_cycle_and_saves(tmp_path, caplog, capfd):
    engine, run = made(tmp_path / "saves", gradient_accumulation=2), tmp_path / "run"
    with (
        caplog.at_level("INFO", "halfmesh"),
        pytest.raises(KeyboardInterrupt) as ended,
        halfmesh.RunFolder(engine, run),
    ):
        loop(engine, at(3, 2, signal.SIGINT))
    assert isinstance(ended.value, SystemExit)  # so Python prints no traceback
    assert (ended.value.code, steps_in(tmp_path / "saves")) == (130, [4])
    place = tmp_path / "saves" / "step-00000004"
    said = f"interrupted by SIGINT: saved update 4 in {place}; to resume, run it again with resume='auto'"
    assert caplog.messages[-1] == said
    assert capfd.readouterr().err.count("press it again to end at once") == 1
    assert session_in(run) == ("interrupted", 4)
    engine.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("launched", [True, False])
def test_a_second_ctrl_c_ends_at_once_and_one_that_a_launcher_sends_too_is_none(launched, tmp_path, monkeypatch):
    monkeypatch.setattr(preemption, "AGAIN_S", 0.2)
    engine, reached = made(tmp_path), []
    if launched:
        monkeypatch.setenv("LOCAL_RANK", "0")

    def thrice(engine):
        for wait_s in (0, 0.3, 0):
            os.kill(os.getpid(), signal.SIGINT)
            reached.append(wait_s)
            time.sleep(wait_s)

    with pytest.raises(KeyboardInterrupt) as ended:
        loop(engine, thrice)
    assert not isinstance(ended.value, Interrupted)
    assert (len(reached), steps_in(tmp_path)) == (2 if launched else 1, [])


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
    assert session_in(tmp_path / "run") == ("interrupted", 2)


def test_ctrl_c_without_automatic_saves_and_where_one_types_is_pythons(tmp_path, monkeypatch):
    engine = made(None)
    with pytest.raises(KeyboardInterrupt), halfmesh.RunFolder(engine, tmp_path):
        loop(engine, at(2, signum=signal.SIGINT))
    assert session_in(tmp_path) == ("interrupted", 2)
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with made(tmp_path / "saves"):
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_is_told_to_all_engines_that_are_open(tmp_path):
    """Each ends at its next update; one that is closed gives way to the others."""
    folders = [tmp_path / name for name in ("generator", "discriminator", "closed")]
    engines = [made(folder) for folder in folders]
    engines.pop().close()
    os.kill(os.getpid(), signal.SIGINT)
    for engine in engines:
        with pytest.raises(Interrupted):
            loop(engine)
        engine.close()
    assert [steps_in(folder) for folder in folders] == [[1], [1], []]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
