"""Ranks agree on the step at which they stop, whoever asks, without a collective or a request in each step; and on
whether a save succeeds, through the store: one that is late ends it on all ranks."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from halfmesh.checkpoint import agreement as source
from halfmesh.checkpoint.agreement import StopAgreement
from halfmesh.errors import CheckpointError
from tests.support.counting_store import CountingStore

STEPS = 60


def run_loops(asking, size=8):
    """The step at which each rank stops (None: it does all steps), and the requests to the store. Steps end with a
    collective, for which ranks wait. `asking`: the step from which on a rank wants to stop, by rank."""
    store, barrier = CountingStore(), threading.Barrier(size)
    agreements = [StopAgreement(store, store, rank, size, 60.0) for rank in range(size)]

    def loop(rank):
        for step in range(1, STEPS + 1):
            time.sleep(0.002 if (rank + step) % 3 == 0 else 0)
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


@pytest.mark.parametrize("asking", [{3: 20}, {0: 10, 1: 11, 7: 12}, dict.fromkeys(range(8), 25)])
def test_all_stop_at_one_step_soon_after_one_asks(asking):
    stopped, requests = run_loops(asking)
    assert len(set(stopped)) == 1
    assert min(asking.values()) < stopped[0] <= min(asking.values()) + 2
    assert requests.total() <= 10 * 8  # however many steps there were


def test_without_a_wish_nothing_is_asked_of_the_store_in_a_step():
    stopped, requests = run_loops({})
    assert stopped == [None] * 8
    assert requests == {"get": 8}  # those of the threads, which block


def test_a_rank_that_does_not_answer_is_named_and_so_is_a_lost_store():
    store = dist.HashStore()
    agreement = StopAgreement(store, store, 1, 3, 0.2)
    assert not agreement.pass_boundary(asks=True)
    with pytest.raises(TimeoutError, match=r"^ranks 0, 2 did not answer within 0.2 s \(config key timeout\)"):
        agreement.pass_boundary(asks=True)
    agreement.close()
    assert not agreement.pass_boundary(asks=True)  # closed by another rank, perhaps: nobody stops

    def lost(*args):
        raise dist.DistNetworkError("connection lost")

    agreement = StopAgreement(dist.HashStore(), SimpleNamespace(get=lost, set_timeout=lambda _: None), 0, 2, 20.0)
    with pytest.raises(CheckpointError, match=r"told to stop, but cannot save: the store .* connection lost"):
        any(agreement.pass_boundary(asks=True) for _ in range(2))  # at the first, if its thread was faster
    agreement.close()


def test_all_ranks_are_told_of_those_that_are_late_and_the_next_answer_comes(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setattr(source, "is_simulated", lambda: False)
    monkeypatch.setattr(source, "own_store", lambda context: [dist.PrefixStore("a", store)])
    names = SimpleNamespace(names=lambda ranks: f"ranks {ranks}")
    ranks = [source.StoreMessages(SimpleNamespace(rank=n, size=4, rank_names=names), 0.8) for n in range(4)]

    def answer(rank, late_s):
        time.sleep(late_s)
        try:
            return ranks[rank].gather_results("the save failed", lambda: rank)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        words = list(threads.map(answer, range(4), [0, 1.2, 0, 1.2]))
        late = "no answer within 0.8 s (config key timeout)"
        assert words == [f"the save failed:\n  - ranks [1, 3]: {late}"] * 4
        for each in ranks:
            each._timeout_s = 30.0
        assert [0, 1, 2, 3] in threads.map(answer, range(4), [0] * 4)
    ranks[1]._timeout_s = 0.1
    assert answer(1, 0) == "the save failed:\n  - ranks [0]: no answer within 0.2 s (config key timeout)"
