"""Calls that all ranks make together: they agree on which one it is, or are told, before anything is sent."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from halfmesh.errors import InputError
from halfmesh.parallel import comm
from tests.support.counting_store import CountingStore
from tests.support.models import make_data, make_engine, said, step_on
from tests.support.ranks import here, run_ranks
from tests.support.whole import close_whole

BATCH = make_data(8)
UNLIKE = {
    "engine.save was called on rank 0, and engine.load was called on rank 1; call each on every": (
        lambda engine, folder: engine.save(folder),
        lambda engine, folder: engine.load(folder),
    ),
    "engine.precision_report was called on rank 0, and engine.save_weights was called on rank 1": (
        lambda engine, folder: engine.precision_report().__enter__(),
        lambda engine, folder: engine.save_weights(f"{folder}/w.pt", format="torch"),
    ),
}
"""What each of two ranks calls."""


def unlike_calls(rank, world_size, folder):
    """What ranks are told that call different things, or one alone; and the weights of a training with them, and of
    one without."""
    weights, words = [], []
    for calls in (UNLIKE.values(), ()):
        engine = make_engine({"parallel": {"data": "fsdp"}, "timeout": 60.0})
        step_on(engine, *here(BATCH))
        words += [said(call[rank], engine, folder) for call in calls]
        step_on(engine, *here(BATCH))
        weights.append(close_whole(engine))
    alone = make_engine({"timeout": 2.0})
    words.append(said(alone.save, folder) if rank == 0 else "")
    dist.barrier()
    step_on(alone, *here(BATCH))
    return words, weights


@pytest.mark.distributed
def test_ranks_that_do_not_call_the_same_are_told_and_nothing_is_sent(tmp_path):
    for (*words, alone), (weights, expected) in run_ranks(unlike_calls, 2, str(tmp_path)):
        assert all(told.startswith(wanted) for told, wanted in zip(words, UNLIKE, strict=True)), words
        assert "(rank 1 did not within 2 s (config key timeout))" in alone or not alone
        torch.testing.assert_close(weights, expected, rtol=0, atol=0)


def agree_in_threads(ranks, late_s=0.0):
    """What ranks are told of a call that the last one makes late."""

    def agree(rank):
        time.sleep(late_s if rank is ranks[-1] else 0)
        try:
            return said(rank.agree_on, "engine.save")
        except ConnectionResetError as error:
            return str(error)

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(agree, ranks))


@pytest.mark.parametrize(
    ("ended", "came", "words"),
    [
        ({}, [0, 2], "engine.save was called on ranks 0, 2 only; .*rank 1 did not within 1.5 s"),
        ({1: "lost", 2: "running"}, [0, 2], "on ranks 0, 2 only; .*rank 1 ended, or waited elsewhere"),
        ({2: "lost"}, [0], "engine.save: connection reset by peer: no answer from rank 1"),  # it was killed, it seems
    ],
)
def test_who_is_waited_for(ended, came, words, monkeypatch, caplog):
    monkeypatch.setattr(comm, "PATIENCE_S", 0.8)
    monkeypatch.setattr(comm, "ANSWER_S", 0.1 if ended else 2.0)
    store = dist.HashStore()
    for told in agree_in_threads([comm.NamedCalls(store, rank, 3, 1.5, lambda: ended) for rank in came]):
        assert re.search(words, told), told
    assert ("engine.save still waits for rank 1 to call it, after 0.8 s" in caplog.text) == (not ended)


def test_requests_to_the_store_are_a_few_for_each_rank():
    size, store = 64, CountingStore()
    ranks = [comm.NamedCalls(store, rank, size, 60.0, dict) for rank in range(size)]
    for late_s in (0.0, 0.0, 1.5):
        store.requests.clear()
        assert agree_in_threads(ranks, late_s) == ["nothing"] * size
        assert store.requests.total() <= 4 * size + 60  # one rank looks, about 10 times in a second
    assert store.num_keys() == 3  # of the last call only


def test_ranks_that_block_are_told_by_the_one_that_looks_or_that_it_is_gone(monkeypatch):
    store = dist.HashStore()
    told = agree_in_threads([comm.NamedCalls(store, rank, 8, 60.0, lambda: {3: "failed"}) for rank in range(8)], 1.0)
    assert set(told) == {"engine.save: connection reset by peer: rank 3 failed meanwhile"}  # the late one, too
    monkeypatch.setattr(comm, "ANSWER_S", 0.1)
    store = dist.HashStore()
    store.append("calls_1", "0 engine.save\n")
    store.add("came_1", 1)  # rank 0 is killed here
    with pytest.raises(InputError, match=r"^engine.save was called on ranks 0, 1 only;.*\(rank 2 did not within 0.2 s"):
        comm.NamedCalls(store, 1, 3, 0.2, dict).agree_on("engine.save")
    store = dist.HashStore()
    with monkeypatch.context() as patch:
        patch.setattr(comm.NamedCalls, "_look_out", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            comm.NamedCalls(store, 0, 3, 60.0, dict).agree_on("engine.save")
    with pytest.raises(ConnectionResetError, match="rank 0 failed meanwhile"):
        comm.NamedCalls(store, 1, 3, 60.0, dict).agree_on("engine.save")
