"""Calls that all ranks make together: they agree on which one it is, or are told, before anything is sent."""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from halfmesh.distributed.process_group import OwnedGroup
from halfmesh.errors import InputError
from halfmesh.parallel import comm
from tests.support.counting_store import CountingStore
from tests.support.models import make_data, make_engine, said, step_on
from tests.support.ranks import here, run_ranks
from tests.support.whole import close_whole

LAYOUTS = {
    "dp": {},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["again"]}},
    "fsdp": {"data": "fsdp"},
}
BATCH = make_data(8)
UNLIKE = {
    "engine.save was called on rank 0, and engine.load on rank 1; call each on every": (
        lambda engine, folder: engine.save(folder),
        lambda engine, folder: engine.load(folder),
    ),
    "engine.precision_report was called on rank 0, and engine.save_weights on rank 1": (
        lambda engine, folder: engine.precision_report().__enter__(),
        lambda engine, folder: engine.save_weights(f"{folder}/w.pt", format="torch"),
    ),
    "engine.load_weights was called on rank 0, and engine.full_state_dict(optimizer=": (
        lambda engine, folder: engine.load_weights(f"{folder}/w.pt"),
        lambda engine, folder: engine.full_state_dict(),
    ),
}
"""What each of two ranks calls."""


def unlike_calls(rank, world_size, folder):
    """What ranks are told that call different things, or one alone; and the weights of a training with them, and of
    one without."""
    found = {}
    for layout, parallel in LAYOUTS.items():
        weights, words = [], []
        for calls in (UNLIKE.values(), ()):
            engine = make_engine({"parallel": parallel, "timeout": 60.0})
            step_on(engine, *here(BATCH))
            words += [said(call[rank], engine, folder) for call in calls]
            step_on(engine, *here(BATCH))
            weights.append(close_whole(engine))
        found[layout] = words, weights
    alone = make_engine({"timeout": 3.0})
    begun, words = time.monotonic(), said(alone.save, folder) if rank == 0 else "nothing"
    waited = time.monotonic() - begun
    dist.barrier()
    step_on(alone, *here(BATCH))
    return found, words, waited


@pytest.mark.distributed
@pytest.mark.sends
def test_ranks_that_do_not_call_the_same_are_told_and_nothing_is_sent(tmp_path):
    results = run_ranks(unlike_calls, 2, str(tmp_path))
    for found, _, _ in results:
        for words, (weights, expected) in found.values():
            assert all(told.startswith(wanted) for told, wanted in zip(words, UNLIKE, strict=True)), words
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    _, words, waited = results[0]
    assert words.startswith("engine.save was called on rank 0 only; call it on every rank, without an `if` around it: ")
    assert words.endswith("(rank 1 did not within 3 s (config key timeout))")
    assert waited >= 3


class _Ended(OwnedGroup):
    """Knows how the other ranks have ended."""

    def __init__(self, ended):
        self.failures = SimpleNamespace(told=lambda: ended)


def waits(rank, world_size):
    """Rank 0 waits in vain: for one that is slow, has ended, is silent or has failed. Returns what it is told."""
    comm.PATIENCE_S, heard, found = 0.8, [], []
    logging.getLogger("halfmesh.parallel.comm").addFilter(lambda record: heard.append(record.getMessage()) or True)
    for ended in ({}, {1: "lost", 2: "running"}, {2: "lost"}, {1: "ended", 2: "failed"}):
        engine = make_engine({"timeout": 2.5 if not ended else 30.0})
        engine.context.begin_calls(_Ended(ended))
        dist.barrier()
        if rank == 0 or (rank == 2 and ended != {2: "lost"}):  # a silent rank 1 is killed, it seems
            try:
                engine.context.agree_on_call("engine.save")
            except (InputError, ConnectionResetError) as error:
                found.append(f"{type(error).__name__} {error}")
        dist.barrier()
        engine.close()
    return heard, found


@pytest.mark.distributed
def test_who_is_waited_for():
    (heard, found), _, (heard_too, twice) = run_ranks(waits, 3, fresh=True)
    heard = [text.partition("] ")[2] for text in (*heard, *heard_too)]  # of the rank that came first
    warned = sorted(text.partition(" to call it, after")[0] for text in heard)
    assert warned == ["engine.save still waits for rank 1"] * 2 + ["engine.save still waits for ranks 1, 2"]
    assert found[0].startswith("InputError engine.save was called on ranks 0, 2 only;")
    assert "(rank 1 ended, or waited elsewhere)" in found[1]
    assert found[2] == "ConnectionResetError engine.save: connection reset by peer: no answer from rank 1"
    assert found[3] == "ConnectionResetError engine.save: connection reset by peer: rank 2 failed meanwhile"
    assert twice == [*found[:2], found[3]]


def agree_in_threads(size, late_s, calls=("engine.save",), told=dict):
    """The requests for each of `calls`, and what `size` ranks are told of them, the last of which comes late."""
    store, counts, found = CountingStore(), [], []
    ranks = [comm.NamedCalls(store, rank, size, 60.0, told) for rank in range(size)]

    def agree(rank, call):
        time.sleep(late_s if rank == size - 1 else 0)
        try:
            return said(ranks[rank].agree_on, call)
        except ConnectionResetError as error:
            return str(error)

    with ThreadPoolExecutor(size) as threads:
        for call in calls:
            store.requests.clear()
            found.append(list(threads.map(agree, range(size), [call] * size)))
            counts.append(store.requests.total())
    return counts, found, store


def test_requests_to_the_store_are_a_few_for_each_rank():
    counts, found, store = agree_in_threads(64, 0.0, ["engine.save"] * 3)
    assert found == [["nothing"] * 64] * 3
    assert all(count <= 4 * 64 + 30 for count in counts)
    assert store.num_keys() == 3  # of the last call only
    (late,), found, _ = agree_in_threads(64, 1.5)
    assert found == [["nothing"] * 64]
    assert late <= 4 * 64 + 60  # those of one rank that looks: about 10 in a second


def test_a_rank_that_looks_and_is_killed_leaves_the_others_an_error_with_names(monkeypatch):
    monkeypatch.setattr(comm, "PATIENCE_S", 0.1)
    store = dist.HashStore()
    store.append("calls_1", "0 engine.save\n")
    store.add("came_1", 1)  # rank 0 is killed here
    with pytest.raises(InputError, match=r"^engine.save was called on ranks 0, 1 only;.*\(rank 2 did not within 0.2 s"):
        comm.NamedCalls(store, 1, 3, 0.2, dict).agree_on("engine.save")


@pytest.mark.parametrize("request_name", ["append", "add"])
def test_a_rank_that_is_interrupted_before_it_looks_tells_the_others(request_name):
    store = dist.HashStore()

    class Interrupting:
        def __getattr__(self, name):
            if name != request_name:
                return getattr(store, name)

            def then_interrupt(*args):
                getattr(store, name)(*args)
                raise KeyboardInterrupt

            return then_interrupt

    with pytest.raises(KeyboardInterrupt):
        comm.NamedCalls(Interrupting(), 0, 3, 60.0, dict).agree_on("engine.save")
    with pytest.raises(ConnectionResetError, match="rank 0 failed meanwhile"):
        comm.NamedCalls(store, 1, 3, 60.0, dict).agree_on("engine.save")


def test_ranks_that_block_are_told_by_the_one_that_looks():
    _, ((*early, late),), _ = agree_in_threads(8, 1.0, told=lambda: {3: "failed"})
    assert set(early) == {"engine.save: connection reset by peer: rank 3 failed meanwhile"}
    assert late == early[0]  # not that it goes on alone
