"""The harness reports the right rank, in time, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import RankFailure, here, run_ranks

pytestmark = pytest.mark.distributed


def summed(rank, world_size, start, factor=1):
    """In a group of this call, with its own environment, and one thread."""
    assert (dist.get_rank(), dist.get_world_size(), torch.get_num_threads()) == (rank, world_size, 1)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "LEFT"} & set(os.environ)
    os.environ["LEFT"] = "by an earlier call"
    value = here((start + rank) * factor)
    dist.all_reduce(value)
    return os.getpid(), value


def fail_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        time.sleep(0.2)
        raise ValueError(f"boom on rank {rank}")
    dist.all_reduce(here(torch.ones(1)))


def close_then_fail(rank, world_size):
    if rank == 1:
        dist.all_reduce(here(torch.ones(1)))
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the reason")
    dist.all_reduce(here(torch.ones(1)))
    dist.all_reduce(here(torch.ones(1)))


def die_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(here(torch.ones(1)))


def hang_on(rank, world_size, bad_rank):
    if rank == bad_rank:
        time.sleep(600)


def unpicklable(rank, world_size):
    return lambda: rank


def test_results_come_in_order_of_rank_from_processes_that_are_used_again(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    first, second = (run_ranks(summed, 2, torch.tensor([1.0, 10.0]), factor=factor) for factor in (2, 3))
    assert [value.tolist() for _, value in first] == [[6.0, 42.0]] * 2
    assert [value.tolist() for _, value in second] == [[9.0, 63.0]] * 2
    processes = [process for process, _ in first]
    assert [process for process, _ in second] == processes
    (fresh, _), _ = run_ranks(summed, 2, torch.ones(1), fresh=True)
    assert fresh not in processes


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_rank_that_failed_first_is_reported_and_the_team_is_ended(bad_rank):
    start, before = time.monotonic(), set(multiprocessing.active_children())
    with pytest.raises(RankFailure, match=f"rank {bad_rank} of 2 failed[\\s\\S]*ValueError: boom") as caught:
        run_ranks(fail_on, 2, bad_rank)
    assert caught.value.rank == bad_rank
    assert time.monotonic() - start < 50
    assert not set(multiprocessing.active_children()) - before


def test_an_echo_that_comes_before_the_reason_does_not_hide_it():
    with pytest.raises(RankFailure, match=r"ValueError: the reason[\s\S]*afterwards: rank 0: ") as caught:
        run_ranks(close_then_fail, 2)
    assert caught.value.rank == 1


def test_a_killed_rank_is_reported_before_the_echo():
    with pytest.raises(RankFailure, match="died without an exception, exit code -9") as caught:
        run_ranks(die_on, 2, 1)
    assert caught.value.rank == 1


def test_the_time_limit_names_the_hung_rank_and_shows_its_stack():
    before = set(multiprocessing.active_children())
    with pytest.raises(RankFailure, match=r"ranks \[1\] are still running[\s\S]*in hang_on") as caught:
        run_ranks(hang_on, 2, 1, timeout=8)
    assert caught.value.rank == 1
    assert not set(multiprocessing.active_children()) - before


def test_a_result_that_cannot_be_pickled_is_an_error():
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(unpicklable, 1)


def count_ranks(rank, world_size):
    return dist.get_world_size()


def test_a_group_that_could_not_be_made_is_tried_again(monkeypatch):
    """gloo's sockets miss each other now and then."""
    missed = ranks._Report(0, error=f"RuntimeError: {ranks.NOT_CONNECTED} with [...] Connection closed by peer")
    calls = iter([[missed], [ranks._Report(0, result=pickle.dumps(5))], *[[missed]] * ranks.ATTEMPTS])
    monkeypatch.setattr(ranks, "_reports", lambda *call: next(calls))
    assert run_ranks(count_ranks, 1) == [5]
    with pytest.raises(RankFailure):
        run_ranks(count_ranks, 1)


@pytest.mark.parametrize(
    ("place", "gpus", "world_size", "expected"),
    [
        ("gloo-cpu", 0, 8, ""),
        ("gloo-cuda", 0, 2, "gloo-cuda: no CUDA device"),
        ("gloo-cuda", 1, 8, ""),
        ("nccl-one", 2, 1, ""),
        ("nccl-one", 2, 2, "nccl-one: 2 ranks, and 1 may run here"),
        ("nccl", 2, 2, ""),
        ("nccl", 2, 4, "nccl: 4 ranks, and 2 may run here"),
    ],
)
def test_where_ranks_can_run(place, gpus, world_size, expected, monkeypatch):
    monkeypatch.setenv("RANKS_ON", place)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert ranks.find_obstacle(world_size) == expected
    assert ranks.rank_device() == torch.device("cpu"), "this process is no rank"
    monkeypatch.setattr(ranks, "_rank", 1)
    assert ranks.rank_device() == torch.device({"gloo-cpu": "cpu", "nccl": "cuda:1"}.get(place, "cuda:0"))
    if expected:
        with pytest.raises(pytest.skip.Exception, match=expected):
            run_ranks(count_ranks, world_size)


def test_gloo_sends_between_stages_from_the_cpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for place, expected in (("gloo-cpu", ""), ("gloo-cuda", "gloo sends no CUDA tensors"), ("nccl-one", "")):
        monkeypatch.setenv("RANKS_ON", place)
        assert expected in ranks.find_obstacle(1, sends=True)
    monkeypatch.setenv("RANKS_ON", "ncl")
    with pytest.raises(ValueError, match="RANKS_ON='ncl' is none of gloo-cpu, gloo-cuda, nccl-one, nccl"):
        ranks.ranks_on()
