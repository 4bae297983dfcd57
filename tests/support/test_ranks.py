"""Where ranks of tests run, and what they find there."""

from __future__ import annotations

import os
import random

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed


def summed(rank, world_size, start, factor=1):
    """In a group, with seeds, and without a launcher."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(os.environ)
    value = here((start + rank) * factor)
    dist.all_reduce(value)
    return os.getpid(), value, torch.rand(1).item(), random.random()


def without_group(rank, world_size):
    return rank, world_size, dist.is_initialized()


def test_results_come_in_order_of_rank_from_processes_that_are_used_again(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    first, second = (run_ranks(summed, 2, torch.tensor([1.0, 10.0]), factor=factor) for factor in (2, 3))
    assert [value.tolist() for _, value, *_ in first] == [[6.0, 42.0]] * 2
    assert [value.tolist() for _, value, *_ in second] == [[9.0, 63.0]] * 2
    assert len({found[2:] for found in first + second}) == 1
    assert [found[0] for found in first] == [found[0] for found in second]
    assert run_ranks(without_group, 2, init=False) == [(0, 2, False), (1, 2, False)]
    assert run_ranks(without_group, 1) == [(0, 1, True)]


def test_fresh_processes_have_no_past():
    pids = {
        found[0] for fresh in (False, True, True, False) for found in run_ranks(summed, 1, torch.ones(1), fresh=fresh)
    }
    assert len(pids) == 3


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
            run_ranks(without_group, world_size)


def test_gloo_sends_between_stages_from_the_cpu_only(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for place, expected in (("gloo-cpu", ""), ("gloo-cuda", "gloo sends no CUDA tensors"), ("nccl-one", "")):
        monkeypatch.setenv("RANKS_ON", place)
        assert expected in ranks.find_obstacle(1, sends=True)
    monkeypatch.setenv("RANKS_ON", "ncl")
    with pytest.raises(ValueError, match="RANKS_ON='ncl' is none of gloo-cpu, gloo-cuda, nccl-one, nccl"):
        ranks.ranks_on()
