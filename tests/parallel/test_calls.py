"""Calls that all ranks make together: they agree on which one it is, or are told, before anything is sent."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from halfmesh.parallel import comm
from tests.support.counting_store import CountingStore
from tests.support.models import make_data, make_engine, said, step_on
from tests.support.ranks import here, run_ranks
from tests.support.whole import close_whole

LAYOUTS = {"pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["again"]}}, "fsdp": {"data": "fsdp"}}
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
    alone = make_engine({"timeout": 2.0})
    words = said(alone.save, folder) if rank == 0 else ""
    dist.barrier()
    step_on(alone, *here(BATCH))
    return found, words


@pytest.mark.distributed
@pytest.mark.sends
def test_ranks_that_do_not_call_the_same_are_told_and_nothing_is_sent(tmp_path):
    results = run_ranks(unlike_calls, 2, str(tmp_path))
    for found, _ in results:
        for words, (weights, expected) in found.values():
            assert all(told.startswith(wanted) for told, wanted in zip(words, UNLIKE, strict=True)), words
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)
    words = results[0][1]
    assert words.startswith("engine.save was called on rank 0 only; call it on every rank, without an `if` around it: ")
    assert words.endswith("(rank 1 did not within 2 s (config key timeout))")


def test_requests_to_the_store_are_a_few_for_each_rank():
    size, store = 64, CountingStore()
    ranks = [comm.NamedCalls(store, rank, size, 60.0) for rank in range(size)]
    with ThreadPoolExecutor(size) as threads:
        for _ in range(3):
            store.requests.clear()
            assert (
                list(threads.map(said, [rank.agree_on for rank in ranks], ["engine.save"] * size)) == ["nothing"] * 64
            )
            assert store.requests.total() <= 4 * size + 10
    assert store.num_keys() == 3  # of the last call only
