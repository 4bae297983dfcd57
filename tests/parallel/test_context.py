"""Places on the mesh, sums over each axis, equal starts, and random numbers that differ where data differs."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh import ParallelContext
from halfmesh.config.schema import ParallelConfig, PipelineConfig, TensorConfig
from halfmesh.errors import InputError
from tests.support.models import MLP, make_engine, said
from tests.support.ranks import here, rank_device, run_ranks

CPU = torch.device("cpu")
AXES = ("pp", "dp", "tp")
SIZES = [(1, 2), (2, 2), (1, 4), (2, 1), (4, 1), (1, 1)]


def test_one_process_needs_no_group():
    context, value = ParallelContext(ParallelConfig().dims(1), CPU), torch.tensor([2.0])
    for axis in (None, *AXES):
        assert context.all_reduce(value, axis) is value
        assert context.all_reduce(value, axis, op="mean") is value
        assert context.gather(value.squeeze(), axis).tolist() == [2.0]
    assert value.item() == 2.0
    assert make_engine().device == CPU
    assert not dist.is_initialized()
    with pytest.raises(InputError, match=r"one process has no DeviceMesh; .*torchrun"):
        _ = context.mesh


def _join(context: ParallelContext, rank: int) -> None:
    """Means, and tensors of unlike lengths, over each axis."""
    for axis in (None, *AXES):
        ranks = range(context.size) if axis is None else dist.get_process_group_ranks(context.group(axis))
        value = torch.tensor([10.0 * rank], device=rank_device(), requires_grad=True)
        mean = context.all_reduce(value, axis, op="mean")
        assert mean is value
        assert mean.item() == sum(10.0 * r for r in ranks) / len(ranks)
        counted = here(torch.tensor(rank))
        assert context.all_reduce(counted, axis) is counted, "integers"
        joined = context.gather(here(torch.full((rank, 2), rank, dtype=torch.int64)), axis)
        assert joined.tolist() == [[r, r] for r in ranks for _ in range(r)]
        assert context.gather(here(torch.tensor(float(rank))), axis).tolist() == list(ranks)
    if context.size > 1:
        with pytest.raises(
            InputError,
            match=r"context\.gather joins tensors along dim 0, but the ranks gave \(1, 1, 'torch\.float32'\), \(1, 2, ",
        ):
            context.gather(here(torch.ones(1, 1 + rank)))
        with pytest.raises(InputError, match="give all of them one dtype"):
            context.gather(here(torch.ones(1, dtype=torch.float64 if rank else torch.float32)))
    with pytest.raises(InputError, match="op='avg': all_reduce gives the 'sum' or the 'mean'"):
        context.all_reduce(value, op="avg")  # type: ignore[arg-type]


def axes(rank: int, world_size: int) -> list[dict[str, Any]]:
    """The ranks of each axis, and sums over them, on meshes of all shapes."""
    results = []
    for pp, tp in SIZES:
        sizes = ParallelConfig(pipeline=PipelineConfig(size=pp), tensor=TensorConfig(size=tp))
        context = ParallelContext(sizes.dims(world_size), rank_device())
        other = ParallelContext(sizes.dims(world_size), rank_device())  # a second engine has groups of its own
        found: dict[str, Any] = {
            "shape": (*context.sizes.values(),),
            "place": (context.pp_rank, context.dp_rank, context.tp_rank),
        }
        assert tuple(context.mesh.get_coordinate()) == found["place"]
        assert context.dp_group is context.group("dp")
        assert context.tp_group is context.group("tp")
        for axis in AXES:
            value = here(torch.tensor([10.0**rank]))
            context.all_reduce(value, axis)
            found[axis] = dist.get_process_group_ranks(context.group(axis)), value.item()
        with pytest.raises(InputError, match="axis='DP' is not an axis of the mesh; did you mean 'dp'"):
            context.all_reduce(value, "DP")
        _join(context, rank)
        value = here(torch.ones(1))
        other.all_reduce(value, "tp")
        context.close()
        other.all_reduce(value)
        assert value.item() == tp * world_size
        other.close()
        assert dist.is_initialized()
        results.append(found)
    return results


@pytest.mark.distributed
def test_ranks_and_sums_of_each_axis():
    results = run_ranks(axes, 4)
    for number, (pp, tp) in enumerate(SIZES):
        dp = 4 // (pp * tp)
        grid = torch.arange(4).view(pp, dp, tp)
        for rank, found in enumerate(each[number] for each in results):
            place = found["place"]
            assert found["shape"] == (pp, dp, tp)
            assert grid[place].item() == rank
            for dim, axis in enumerate(AXES):
                where: list[Any] = list(place)
                where[dim] = slice(None)
                members = grid[tuple(where)].tolist()
                assert found[axis] == (members, sum(10**r for r in members))


def make(rank: int, dims: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(dims, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(2, dims, 5, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state]]


def start(rank: int, world_size: int) -> list[torch.Tensor]:
    model, optimizer = make(rank)
    make_engine(model=model, optimizer=optimizer)
    return tensors(model, optimizer)


@pytest.mark.distributed
def test_ranks_start_equal():
    expected = tensors(*make(0))
    for found in run_ranks(start, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def different(rank: int, world_size: int) -> list[str]:
    fresh, shared = nn.Linear(2, 2), nn.Linear(2, 2)
    cases = [
        make(rank, dims=3 + rank),
        (shared, torch.optim.SGD(shared.parameters(), lr=0.1 * (rank + 1))),
        (fresh, torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)),
    ]
    if rank == 1:
        fresh(torch.ones(1, 2)).sum().backward()
        cases[2][1].step()
    return [said(make_engine, model=model, optimizer=optimizer) for model, optimizer in cases]


@pytest.mark.distributed
def test_different_models_are_refused_on_every_rank():
    for messages in run_ranks(different, 2):
        whats = ["the model's parameters", "the optimizer", "the optimizer's state"]
        assert [message.split(" must be the same on all ranks")[0] for message in messages] == whats
        assert all("on rank 1 differ from rank 0's" in message for message in messages)


def draws(rank: int, world_size: int, tp: int) -> list[float]:
    """Numbers of torch, python and numpy, after initialize; each rank has seeded them by its number."""
    model = MLP()
    seed_all(rank)
    tensor = {"size": tp, "plan": {"last": "colwise_gather"}}
    make_engine({"seed": 2**32 - 1, "parallel": {"tensor": tensor}}, model=model)
    return drawn()


def seed_all(seed: int) -> None:
    for each in (torch.manual_seed, random.seed, np.random.seed):
        each(seed)


def drawn() -> list[float]:
    return [torch.rand(1).item(), random.random(), np.random.rand()]


@pytest.mark.distributed
def test_no_layout_seeds_the_users_generators():
    expected = []
    for rank in range(4):
        seed_all(rank)
        expected.append(drawn())
    assert run_ranks(draws, 4, 2) == expected
    assert run_ranks(draws, 2, 1) == expected[:2]
    assert draws(0, 1, 1) == expected[0]
