"""What ranks tell rank 0 of a save, through the store: one that is late ends the save on all ranks, in one timeout."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from halfmesh.checkpoint import dcp, messages
from halfmesh.errors import CheckpointError
from tests.support.checkpoint_runs import make_engine, train
from tests.support.ranks import run_ranks


def test_all_ranks_are_told_of_those_that_are_late_and_the_next_answer_comes(monkeypatch):
    monkeypatch.setattr(messages, "is_simulated", lambda: False)
    store = dist.HashStore()
    monkeypatch.setattr(messages, "own_store", lambda context: [dist.PrefixStore("a", store)])
    ranks = [messages.StoreMessages(SimpleNamespace(rank=rank, size=4), 1.0) for rank in range(4)]

    def answer(rank, late_s):
        time.sleep(late_s)
        try:
            return ranks[rank].answer("the save failed", rank, sum)
        except CheckpointError as error:
            return str(error)

    with ThreadPoolExecutor(4) as threads:
        words = list(threads.map(answer, range(4), [0, 1.6, 0, 1.6]))
        assert words == ["the save failed: no answer from ranks 1, 3 within 1 s (config key timeout)"] * 4
        assert list(threads.map(answer, range(4), [0] * 4)) == [6] * 4


def test_a_rank_without_an_answer_of_rank_zero_says_so(monkeypatch):
    monkeypatch.setattr(messages, "is_simulated", lambda: False)
    monkeypatch.setattr(messages, "own_store", lambda context: [dist.HashStore()])
    alone = messages.StoreMessages(SimpleNamespace(rank=1, size=2), 0.1)
    with pytest.raises(CheckpointError, match=r"^x: no answer from rank 0 within 0.2 s \(config key timeout\)$"):
        alone.answer("x", 1, sum)


def late_in_background(rank, world_size, folder):
    """A background save in which rank 1 is late; then a signal. The folders in between, and those at the end."""
    saves = {"directory": folder, "signals": ()}
    engine = make_engine("dp2", "none", checkpoint=saves, timeout=4.0)
    train(engine, 1)
    write = dcp.write

    def late(*args):
        dcp.write = write
        time.sleep(6 if rank == 1 else 0)
        return write(*args)

    dcp.write = late
    engine.save(folder, in_background=True)
    time.sleep(7)
    engine.context.everyone(None)
    between = sorted(path.name for path in engine._preemption._directory.glob("*step-*"))
    train(engine, 1)
    engine.preempt()
    engine.close()
    return between, sorted(path.name for path in engine._preemption._directory.glob("*step-*"))


@pytest.mark.distributed
def test_a_save_that_a_late_rank_has_failed_keeps_no_last_save_from_happening(tmp_path):
    assert run_ranks(late_in_background, 2, str(tmp_path), fresh=True) == [([], ["step-00000002"])] * 2
