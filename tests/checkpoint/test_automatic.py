"""The config key checkpoint, in one process: when it is saved, and what ends a run.

Several ranks, and signals from outside, are in tests/faults/.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch

import halfmesh
from halfmesh.checkpoint import preemption
from halfmesh.errors import CheckpointError, InputError, Interrupted, Preempted
from tests.checkpoint.loops import at, loop, made, step, steps_in, twice
from tests.support.checkpoint_runs import Gate
from tests.support.models import make_data


@pytest.mark.parametrize("in_background", [True, False])
def test_every_so_many_steps(in_background, tmp_path, monkeypatch):
    saves = {"directory": str(tmp_path), "every": 5, "signals": ["SIGTERM"], "in_background": in_background}
    engine, there = made(tmp_path, checkpoint=saves), {}
    gate = Gate(monkeypatch)  # only saves in the background wait for it

    def look(engine):
        there[engine.global_step] = steps_in(tmp_path) if engine.global_step in (5, 7) else None
        if engine.global_step == 7:
            gate.open.set()

    loop(engine, look)
    assert (there[5], there[7]) == ([], [] if in_background else [5])
    engine.close()
    assert steps_in(tmp_path) == [25, 30, 35]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_every_where_boundaries_do_not_meet_it(tmp_path):
    """Two steps with each batch: after step 6 for 5, after 10, after 16 for 15."""
    twice(engine := made(tmp_path, every=5))
    engine.close()
    assert steps_in(tmp_path) == [10, 16, 20]


def test_gradients_that_no_step_has_used_are_not_lost(tmp_path):
    engine = made(tmp_path, every=1)
    batches = iter(engine.dataloader)
    x, y = next(batches)
    for _ in range(2):
        step(engine, x, y)
    engine.backward(engine.criterion(engine(x), y))
    next(batches)  # no boundary: a save would be refused
    assert engine.step() is not None
    next(batches)
    engine.close()
    assert steps_in(tmp_path) == [3]


def test_a_pass_without_gradients_is_no_boundary(tmp_path):
    engine = made(tmp_path, every=1)
    for number, (x, y) in enumerate(engine.dataloader):
        step(engine, x, y)
        if number == 2:
            break
    engine.wait_for_save()
    with torch.no_grad():
        for x, _ in engine.dataloader:
            engine(x)
    engine.wait_for_save()
    assert steps_in(tmp_path) == [1, 2]
    engine.close()
    assert steps_in(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("error", [None, OSError("no room")])
def test_the_save_at_the_end_waits_for_the_one_before_and_is_made_if_that_failed(error, tmp_path, monkeypatch):
    engine, gate = made(tmp_path, every=5), Gate(monkeypatch, error)

    def send(engine):
        if engine.global_step == 7:
            assert not list(tmp_path.glob("step-*"))
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.2, gate.open.set).start()

    with pytest.raises(Preempted):
        loop(engine, send)
    assert steps_in(tmp_path) == ([5, 7] if error is None else [7])


def test_where_the_save_at_the_end_fails_the_last_checkpoint_stays(tmp_path, monkeypatch):
    engine, inner = made(tmp_path, every=5), os.fsync

    def fail(descriptor):
        if threading.current_thread() is threading.main_thread():
            raise OSError("no room")
        inner(descriptor)

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match=r"saving step 7 to .* failed; earlier .* unchanged: OSError: no room"):
        loop(engine, at(7))
    engine.close()
    assert steps_in(tmp_path) == [5]


def test_told_to_end_by_a_call(tmp_path):
    with pytest.raises(Preempted):
        loop(made(tmp_path), lambda engine: engine.preempt() if engine.global_step == 3 else None)
    assert steps_in(tmp_path) == [3]
    with pytest.raises(InputError, match=r"engine.preempt\(\): the config does not say where to save"):
        made(None).preempt()


@pytest.mark.parametrize("every", [None, 12])
def test_told_to_end_after_the_last_boundary_it_is_saved_by_close(every, tmp_path, caplog):
    """In the evaluation after the last epoch, say. What is saved is not saved again."""
    engine = made(tmp_path, every=every)
    for x, y in engine.dataloader:
        step(engine, x, y)
    engine.wait_for_save()
    os.kill(os.getpid(), signal.SIGTERM)
    with caplog.at_level("INFO", "halfmesh"):
        engine.close()
    assert steps_in(tmp_path) == [12]
    done = "there is nothing new to save" if every else f"saved update 12 in {tmp_path / 'step-00000012'}"
    assert f"stop signal (SIGTERM) after training: {done}" in caplog.text
    assert "interrupted" not in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_gradients_that_are_left_are_said(tmp_path, caplog):
    engine = made(tmp_path)
    step(engine)
    x, y = make_data(4)
    engine.backward(engine.criterion(engine(x), y))
    engine.preempt()
    engine.close()
    assert steps_in(tmp_path) == []
    assert "stop signal (engine.preempt()) in the middle of an accumulation cycle: no checkpoint written" in caplog.text


def ends_in_with(engine):
    with engine:
        raise ZeroDivisionError


def ends_in_finally(engine):
    try:
        raise ZeroDivisionError
    finally:
        engine.close()


@pytest.mark.parametrize("ends", [ends_in_with, ends_in_finally])
def test_nothing_is_saved_after_an_error(ends, tmp_path):
    """Other ranks may be elsewhere."""
    step(engine := made(tmp_path, every=1))
    with pytest.raises(ZeroDivisionError):
        ends(engine)
    assert steps_in(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_that_was_handled_before_is_none_of_the_runs(tmp_path):
    """The program is a handler's: of a missing file, or of a first try that had no room."""
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        step(engine := made(tmp_path, every=1))
        engine.close()
    assert steps_in(tmp_path) == [1]


def test_a_handler_of_the_users_stays(tmp_path, caplog):
    engines = []

    def mine(number, frame):
        engines[0].preempt()

    signal.signal(signal.SIGTERM, mine)
    engines.append(made(tmp_path))
    assert "checkpoint.signals: SIGTERM: handled already" in caplog.text
    with pytest.raises(Preempted):
        loop(engines[0], at(2))
    assert signal.getsignal(signal.SIGTERM) is mine


# --- engines that are left --------------------------------------------------------------------------------------------


def test_the_newest_engine_is_told_beside_one_that_was_left(tmp_path):
    """By an exception in a notebook, say. Closing the one that was left takes nothing from the newer one."""
    step(left := made(tmp_path / "left"))
    newest = made(tmp_path / "newest")
    left.close()
    with pytest.raises(Preempted):
        loop(newest, at(3))
    assert (steps_in(tmp_path / "left"), steps_in(tmp_path / "newest")) == ([], [3])


def test_an_older_engine_is_still_told(tmp_path):
    older = made(tmp_path / "older")
    made(tmp_path / "newest").close()
    with pytest.raises(Preempted):
        loop(older, at(3))
    third = made(tmp_path / "third")  # after the signal, which is ignored by then
    with pytest.raises(Preempted):
        loop(third, at(2))
    assert (steps_in(tmp_path / "older"), steps_in(tmp_path / "third")) == ([3], [2])


def test_what_saves_prints_in_a_line(tmp_path):
    """Without the model that it holds: pytest and debuggers print it."""
    engine = made(tmp_path)
    assert "\n" not in f"{engine._preemption!r} {engine._checkpointer!r}"


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
    engine, forked = made(tmp_path), multiprocessing.get_context("fork")
    child = forked.Process(target=linger, args=(started := forked.Event(),))
    child.start()
    assert started.wait(20)
    child.terminate()
    child.join(20)
    assert child.exitcode == -signal.SIGTERM
    engine.close()


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


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
    said = f"interrupted by SIGINT; saved update {number} in {place}; run again with resume='auto' to go on"
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


def test_ctrl_c_ends_fit(tmp_path):
    class CtrlC(halfmesh.Hook):
        def after_step(self, trainer, result):
            at(3, signum=signal.SIGINT)(trainer.engine)

    engine = made(tmp_path / "saves")
    with pytest.raises(Interrupted):
        halfmesh.Trainer(engine).fit(epochs=2, hooks=[CtrlC(), {"type": "run", "directory": tmp_path / "run"}])
    session = json.loads((tmp_path / "run" / "config.json").read_text())["sessions"][-1]
    assert (session["status"], steps_in(tmp_path / "saves")) == ("interrupted", [3])


def test_a_handler_of_the_users_for_ctrl_c_stays(tmp_path, caplog):
    came = []
    signal.signal(signal.SIGINT, lambda *_: came.append(1))
    loop(engine := made(tmp_path), at(2, signum=signal.SIGINT))
    engine.close()
    assert (came, steps_in(tmp_path)) == ([1], [])
    assert "handled already" not in caplog.text


def test_ctrl_c_is_pythons_where_one_types(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    engine = made(tmp_path)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    engine.close()
