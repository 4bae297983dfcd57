"""Ranks agree on the step at which they stop, whoever asks, and without a collective or a request in each step; and on
whether a save succeeds, through the store: one that is late ends it on all ranks, in one timeout."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from halfmesh.checkpoint import agreement as source
from halfmesh.checkpoint import checkpointer, dcp
from halfmesh.checkpoint.agreement import StopAgreement
from halfmesh.errors import CheckpointError
from tests.support.checkpoint_runs import make_engine as make_saving
from tests.support.checkpoint_runs import train
from tests.support.counting_store import CountingStore
from tests.support.models import make_data, make_engine, step_on
from tests.support.ranks import here, run_ranks

STEPS = 60


def run_loops(asking, size, seed=0):
    """The step at which each of `size` ranks stops (None: it does all steps), and the requests to the store. Steps end
    with a collective, for which ranks wait as long as others are at an earlier boundary.

    Args:
        asking: the step from which on a rank wants to stop, by rank.
    """
    store, barrier, waits = CountingStore(), threading.Barrier(size), random.Random(seed)
    agreements = [StopAgreement(store, store, rank, size, 60.0) for rank in range(size)]
    naps = [[waits.choice([0, 0, 0.002]) for _ in range(STEPS)] for _ in range(size)]

    def loop(rank):
        for step in range(1, STEPS + 1):
            threading.Event().wait(naps[rank][step - 1])
            barrier.wait(30)
            if agreements[rank].pass_boundary(asks=step >= asking.get(rank, STEPS + 1)):
                return step
        return None

    with ThreadPoolExecutor(size) as threads:
        stopped = list(threads.map(loop, range(size)))
    requests = store.requests.copy()
    for agreement in agreements:
        agreement.close()
    assert not any(agreement._thread.is_alive() for agreement in agreements)
    return stopped, requests


@pytest.mark.parametrize("asking", [{3: 20}, {0: 30, 5: 30}, {0: 10, 1: 11, 7: 12}, dict.fromkeys(range(8), 25)])
def test_all_stop_at_one_step_soon_after_one_asks(asking):
    for seed in range(2):
        stopped, requests = run_loops(asking, 8, seed)
        assert len(set(stopped)) == 1
        assert min(asking.values()) < stopped[0] <= min(asking.values()) + 2
        assert requests.total() <= 10 * 8  # however many steps there were


def test_without_a_wish_nothing_is_asked_of_the_store_in_a_step():
    stopped, requests = run_loops({}, 8)
    assert stopped == [None] * 8
    assert requests == {"get": 8}  # those of the threads, which block
    stopped, _ = run_loops({2: STEPS}, 8)  # too late for this: `PreemptionHook.close` sees it
    assert stopped == [None] * 8


def test_a_rank_that_does_not_answer_is_named():
    store = dist.HashStore()
    agreement = StopAgreement(store, store, 1, 3, 0.2)
    assert not agreement.pass_boundary(asks=True)
    with pytest.raises(TimeoutError, match=r"^ranks 0, 2 did not answer within 0.2 s \(config key timeout\)"):
        agreement.pass_boundary(asks=True)
    agreement.close()
    assert not agreement.pass_boundary(asks=True)  # closed by another rank, perhaps: nobody stops


def test_who_asks_between_boundaries_stops_at_the_next_one(monkeypatch):
    """Also after more time than a thread waits at once."""
    monkeypatch.setattr(source, "_LONG_S", 0.1)
    store = dist.HashStore()
    agreements = [StopAgreement(store, store, rank, 2, 20.0) for rank in range(2)]
    time.sleep(0.4)
    assert not any(agreement._decided.is_set() for agreement in agreements)
    agreements[0].ask()
    agreements[0].ask()  # says nothing new
    for agreement in agreements:
        assert agreement._decided.wait(20)
        assert agreement.pass_boundary(asks=True)
        agreement.close()


class _LostStore:
    def __init__(self):
        self.store, self.is_lost = dist.HashStore(), False

    def __getattr__(self, name):
        if self.is_lost or name == "get":
            raise dist.DistNetworkError("connection lost")
        return getattr(self.store, name)


def test_a_rank_that_loses_the_store_warns_once_and_says_why_it_cannot_stop(caplog):
    store = _LostStore()
    agreement = StopAgreement(store, store, 0, 2, 20.0)
    assert agreement._decided.wait(20)
    for _ in range(3):
        assert not agreement.pass_boundary(asks=False)
    assert (
        caplog.text.count("does not answer: connection lost; stop signals and engine.preempt() can no longer save") == 1
    )
    with pytest.raises(CheckpointError, match=r"told to stop, but cannot save: the store .* connection lost"):
        agreement.pass_boundary(asks=True)
    agreement.close()
    plain, lost = dist.HashStore(), _LostStore()
    agreement, lost.is_lost = StopAgreement(lost, plain, 0, 2, 20.0), True
    with pytest.raises(CheckpointError, match=r"told to stop, but cannot save: the store .* connection lost"):
        agreement.pass_boundary(asks=True)
    plain.set("stop_at", "0")
    plain.set("asked", "1")


def test_an_agreement_ends_where_no_thread_can_be_started(monkeypatch):
    """As in Python 3.12 while the interpreter shuts down, which is when multiprocessing calls it."""

    def reject(self):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = dist.HashStore()
    agreement = StopAgreement(store, store, 0, 2, 20.0)
    monkeypatch.setattr(threading.Thread, "start", reject)
    agreement.close()
    assert store.get("stop_at") == b"0"
    assert not agreement._thread.is_alive()


def groups_and_collectives(rank, world_size, folder, keys):
    """Counts of an engine that trains, saves in the background, and is closed."""
    counts, made, new_group = Counter(), [], dist.new_group
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", lambda *args, **kwargs: made.append(args) or new_group(*args, **kwargs))
        engine = make_engine({} if keys is None else {"checkpoint": {"directory": folder} | keys})
        batch = here(make_data(8))
        for _ in range(2):
            step_on(engine, *batch)
        for name in ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list"):
            call = getattr(dist, name)
            patch.setattr(dist, name, lambda *a, call=call, name=name, **k: counts.update([name]) or call(*a, **k))
        for _ in range(3):
            step_on(engine, *batch)
        found = dict(counts)
        if keys is not None:
            engine.save(folder, in_background=True)
        engine.close()
    return found, len(made)


@pytest.mark.distributed
def test_the_key_checkpoint_adds_no_group_and_no_collective_to_a_step(tmp_path):
    plain = run_ranks(groups_and_collectives, 2, str(tmp_path), None)
    assert plain == run_ranks(groups_and_collectives, 2, str(tmp_path), {})
    assert plain[0][0]  # something was counted


# -- the answer of rank 0 ----------------------------------------------------------------------------------------------


def test_all_ranks_are_told_of_those_that_are_late_and_the_next_answer_comes(monkeypatch):
    monkeypatch.setattr(source, "is_simulated", lambda: False)
    store = dist.HashStore()
    monkeypatch.setattr(source, "own_store", lambda context: [dist.PrefixStore("a", store)])
    ranks = [source.StoreMessages(SimpleNamespace(rank=rank, size=4), 0.8) for rank in range(4)]

    def answer(rank, late_s):
        time.sleep(late_s)
        try:
            return ranks[rank].answer("the save failed", rank, sum)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        words = list(threads.map(answer, range(4), [0, 1.2, 0, 1.2]))
        assert words == ["the save failed: no answer from ranks 1, 3 within 0.8 s (config key timeout)"] * 4
        for each in ranks:
            each._timeout_s = 30.0
        assert list(threads.map(answer, range(4), [0] * 4)) == [6] * 4
    ranks[1]._timeout_s = 0.1
    assert answer(1, 0) == "the save failed: no answer from rank 0 within 0.2 s (config key timeout)"


def late_in_background(rank, world_size, folder):
    """A background save in which rank 1 is late; then a signal. The folders in between, and those at the end."""
    engine = make_saving("dp2", "none", checkpoint={"directory": folder, "signals": ()})
    train(engine, 1)
    write, gone_on, before = dcp.write, Path(folder, "gone on"), set(threading.enumerate())

    def late(*args):
        while rank == 1 and not gone_on.exists():
            time.sleep(0.01)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "write", late)
        patch.setattr(checkpointer, "StoreMessages", lambda context, _: source.StoreMessages(context, 0.5))
        engine.save(folder, in_background=True)
        for thread in set(threading.enumerate()) - before:
            thread.join(60)
            gone_on.touch()
    engine.context.everyone(None)
    engine._checkpointer._messages._timeout_s = 60.0
    between = sorted(path.name for path in Path(folder).glob("*step-*"))
    train(engine, 1)
    engine.preempt()
    engine.close()
    return between, sorted(path.name for path in Path(folder).glob("*step-*"))


@pytest.mark.distributed
def test_a_save_that_a_late_rank_has_failed_keeps_no_last_save_from_happening(tmp_path):
    assert run_ranks(late_in_background, 2, str(tmp_path)) == [([], ["step-00000002"])] * 2
