"""The config key checkpoint, in one process: when it is saved, and what ends a run.

Several ranks, and signals from outside, are in tests/faults/.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time

import pytest

from halfmesh.errors import InputError, Preempted
from tests.checkpoint.loops import at, loop, made, step, steps_in, twice
from tests.support.checkpoint_runs import Gate


def test_every_so_many_steps(tmp_path, monkeypatch):
    engine, there = made(tmp_path, every=5), {}
    gate = Gate(monkeypatch)  # saves in the background wait for it

    def look(engine):
        there[engine.global_step] = steps_in(tmp_path) if engine.global_step in (5, 7) else None
        if engine.global_step == 7:
            gate.open.set()

    loop(engine, look)
    assert (there[5], there[7]) == ([], [])
    engine.close()
    assert steps_in(tmp_path) == [25, 30, 35]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


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
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.2, gate.open.set).start()

    with pytest.raises(Preempted):
        loop(engine, send)
    assert steps_in(tmp_path) == ([5, 7] if error is None else [7])


def test_told_to_end_by_a_call(tmp_path):
    with pytest.raises(Preempted):
        loop(made(tmp_path), lambda engine: engine.preempt() if engine.global_step == 3 else None)
    assert steps_in(tmp_path) == [3]
    with pytest.raises(InputError, match=r"engine\.preempt\(\): the config has no folder to save"):
        made(None).preempt()


def test_told_to_end_after_the_last_boundary_it_is_saved_by_close(tmp_path, caplog):
    """In the evaluation after the last epoch, say."""
    engine = made(tmp_path)
    for x, y in engine.dataloader:
        step(engine, x, y)
    engine.wait_for_save()
    os.kill(os.getpid(), signal.SIGTERM)
    with caplog.at_level("INFO", "halfmesh"):
        engine.close()
    assert steps_in(tmp_path) == [12]
    said = f"stop signal (SIGTERM) after training: saved update 12 in {tmp_path / 'step-00000012'}"
    assert said in caplog.text
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_nothing_is_saved_after_an_error(tmp_path):
    """Other ranks may be elsewhere."""
    step(engine := made(tmp_path, every=1))
    with pytest.raises(ZeroDivisionError), engine:
        raise ZeroDivisionError
    step(engine := made(tmp_path, every=1))
    with pytest.raises(ZeroDivisionError), contextlib.closing(engine):
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
    assert signal.getsignal(signal.SIGTERM) is mine


def test_of_several_engines_the_newest_that_is_open_is_told(tmp_path):
    step(left := made(tmp_path / "left"))
    older = made(tmp_path / "older")
    made(tmp_path / "newest").close()
    left.close()
    with pytest.raises(Preempted):
        loop(older, at(3))
    assert [steps_in(tmp_path / name) for name in ("left", "older", "newest")] == [[], [3], []]


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
