"""The config key checkpoint, in one process: when it is saved, and what ends a run: a signal, a call, Ctrl-C. Several
ranks, and signals from outside, are in tests/faults/."""

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

import halfmesh
from halfmesh.checkpoint import preemption
from halfmesh.errors import InputError, Interrupted, Preempted
from tests.checkpoint.loops import at, loop, made, step, steps_in, twice
from tests.support.checkpoint_runs import Gate


def test_every_so_many_steps(tmp_path, monkeypatch):
    engine, gate = made(tmp_path, every=5), Gate(monkeypatch)  # saves in the background wait for it

    def look(engine):
        if engine.global_step == 7:
            assert steps_in(tmp_path) == []
            gate.open.set()

    loop(engine, look)
    engine.close()
    assert steps_in(tmp_path) == [25, 30, 35]


def test_every_where_boundaries_do_not_meet_it(tmp_path, caplog):
    """Two steps with each batch: after step 6 for 5, after 10, after 16 for 15."""
    twice(engine := made(tmp_path, every=5))
    engine.close()
    assert steps_in(tmp_path) == [10, 16, 20]
    assert "the run ended at update 24 without saving it; to keep it, call engine.save" in caplog.text


def test_there_is_no_boundary_while_gradients_wait_for_their_step(tmp_path, caplog):
    engine = made(tmp_path, every=1)
    batches = iter(engine.dataloader)
    x, y = next(batches)
    step(engine, x, y)
    engine.backward(engine.criterion(engine(x), y))
    next(batches)
    assert engine.step() is not None
    next(batches)
    engine.backward(engine.criterion(engine(x), y))
    engine.preempt()
    engine.close()
    assert steps_in(tmp_path) == [2]
    said = "the run ends (engine.preempt()): no checkpoint written: in the middle of an accumulation cycle"
    assert said in caplog.text


@pytest.mark.parametrize("error", [None, OSError("no room")])
def test_the_save_at_the_end_waits_for_the_one_before_and_is_made_if_that_failed(error, tmp_path, monkeypatch):
    engine, gate = made(tmp_path, every=5), Gate(monkeypatch, error)

    def send(engine):
        if engine.global_step == 7:
            engine.preempt()
            threading.Timer(0.2, gate.open.set).start()

    with pytest.raises(Preempted):
        loop(engine, send)
    assert steps_in(tmp_path) == ([5, 7] if error is None else [7])


def test_nothing_is_saved_after_an_error(tmp_path):
    """Other ranks may be elsewhere."""
    for scope in (lambda engine: engine, contextlib.closing):
        step(engine := made(tmp_path, every=1))
        with pytest.raises(ZeroDivisionError), scope(engine):
            raise ZeroDivisionError
    assert steps_in(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_stays(tmp_path, caplog):
    mine = lambda number, frame: engine.preempt()  # noqa: E731
    signal.signal(signal.SIGTERM, mine)
    engine = made(tmp_path)
    assert "checkpoint.signals: SIGTERM: it already has a handler" in caplog.text
    with pytest.raises(Preempted):
        loop(engine, at(2))
    assert steps_in(tmp_path) == [2]
    assert signal.getsignal(signal.SIGTERM) is mine
    with pytest.raises(InputError, match=r"engine\.preempt\(\): the config has no folder to save"):
        made(None).preempt()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_without_a_live_engine_signals_act_as_before(number, tmp_path, monkeypatch):
    before, raised = signal.getsignal(number), []
    engine = made(tmp_path)
    kept = engine.model, engine.optimizer, engine.dataloader  # they do not keep the engine
    assert signal.getsignal(number) is not before
    del engine, kept
    gc.collect()
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    os.kill(os.getpid(), number)
    assert raised == [number]
    assert signal.getsignal(number) is before


def linger(started):
    started.set()
    time.sleep(60)


def test_a_forked_process_ends_as_before(tmp_path):
    forked = multiprocessing.get_context("fork")
    with made(tmp_path):
        child = forked.Process(target=linger, args=(started := forked.Event(),))
        child.start()
        assert started.wait(20)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM


def session_in(folder):
    session = json.loads((folder / "config.json").read_text())["sessions"][-1]
    return session["status"], session["to_step"]


def test_ctrl_c_finishes_the_cycle_and_saves(tmp_path, caplog, capfd):
    engine, run = made(tmp_path / "saves", gradient_accumulation=2), tmp_path / "run"
    caplog.set_level("INFO", "halfmesh")
    with pytest.raises(KeyboardInterrupt) as ended, halfmesh.RunFolder(engine, run):
        loop(engine, at(3, 2, signal.SIGINT))
    assert isinstance(ended.value, SystemExit)  # so Python prints no traceback
    assert (ended.value.code, steps_in(tmp_path / "saves")) == (130, [4])
    place = tmp_path / "saves" / "step-00000004"
    said = f"interrupted by SIGINT: saved update 4 in {place}; to resume, run it again with resume='auto'"
    assert caplog.messages[-1] == said
    assert capfd.readouterr().err.count("press it again to end at once") == 1
    assert session_in(run) == ("interrupted", 4)


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
