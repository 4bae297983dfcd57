"""Places on the mesh, equal starts, and what is freed."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.context import AXES, AxisRanks, ParallelContext
from halfmesh.parallel.random import separate_dp_ranks
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_one_process_needs_no_group():
    context = ParallelContext(1, 1, CPU)
    assert (context.size, context.rank, context.pp_size, context.dp_size, context.tp_size) == (1, 0, 1, 1, 1)
    value = torch.tensor([2.0])
    context.all_reduce(value)
    assert value.item() == 2.0
    assert not dist.is_initialized()
    with pytest.raises(InputError, match=r"one process has no DeviceMesh; .*torchrun"):
        _ = context.mesh
    with pytest.raises(InputError, match="pipeline=2 x tensor=1 does not divide the 1 ranks"):
        ParallelContext(2, 1, CPU)
    context.close()


def places(rank: int, world_size: int) -> dict:
    context = ParallelContext(2, 1, CPU)
    mine = (context.pp_rank, context.dp_rank, context.tp_rank)
    mesh = tuple(context.mesh.get_local_rank(axis) for axis in ("pp", "dp", "tp"))
    members = dist.get_process_group_ranks(context.dp_group)
    value = torch.tensor([float(rank)])
    context.all_reduce(value)
    context.close()
    return {"mine": mine, "mesh": mesh, "dp": members, "sum": value.item(), "alive": dist.is_initialized()}


@pytest.mark.distributed
def test_places_agree_with_the_mesh():
    results = run_ranks(places, 4)
    for result in results:
        assert result["mine"] == result["mesh"]
        assert result["sum"] == 6.0
        assert result["alive"]
    assert [r["mine"] for r in results] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [r["dp"] for r in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def axes(rank: int, world_size: int, pp: int, tp: int) -> dict:
    """Groups of all axes, sums over each, and what `close` leaves."""
    context = ParallelContext(pp, tp, CPU, timeout=77.0)
    found: dict = {
        "shape": context.shape,
        "place": (context.pp_rank, context.dp_rank, context.tp_rank),
        "members": {},
        "sums": {},
        "limits": {},
    }
    for axis in AXES:
        group = context.group(axis)
        assert context.group(axis) is group, "made once"
        found["members"][axis] = dist.get_process_group_ranks(group)
        found["limits"][axis] = group is dist.group.WORLD or _limit(group) == 77.0
        value = torch.tensor([10.0**rank])
        context.all_reduce(value, axis)
        found["sums"][axis] = value.item()
        ranks = AxisRanks(context, axis)
        value = torch.tensor([10.0**rank])
        ranks.all_reduce(value)
        assert value.item() == found["sums"][axis]
        assert (ranks.rank, ranks.size) == (group.rank(), group.size())
    assert context.dp_group is context.group("dp")
    assert context.tp_group is context.group("tp")
    mesh = context.mesh
    assert [mesh.get_group(axis) for axis in AXES] == [context.group(axis) for axis in AXES]
    assert tuple(mesh.get_coordinate()) == found["place"]
    value = torch.tensor([10.0**rank])
    context.all_reduce(value)
    found["sums"]["all"] = value.item()
    with pytest.raises(InputError) as error:
        context.all_reduce(value, "DP")
    found["message"] = str(error.value)
    other = ParallelContext(pp, tp, CPU)  # a second engine has groups of its own
    apart = [other.group(axis) is not context.group(axis) or context.group(axis) is dist.group.WORLD for axis in AXES]
    groups = [context.group(axis) for axis in AXES]
    context.close()
    found["freed"] = apart == [True] * 3 and all(g is dist.group.WORLD or _is_freed(g) for g in groups)
    value = torch.ones(1)
    other.all_reduce(value, "tp")
    found["other works"] = value.item() == tp
    other.close()
    found["alive"] = dist.is_initialized()
    return found


def _limit(group: dist.ProcessGroup) -> float:
    return group._get_backend(CPU).options._timeout.total_seconds()


def _is_freed(group: dist.ProcessGroup) -> bool:
    try:
        dist.get_process_group_ranks(group)
    except (ValueError, RuntimeError, KeyError):
        return True
    return False


@pytest.mark.distributed
@pytest.mark.parametrize(("pp", "tp"), [(1, 2), (2, 2), (1, 4), (2, 1), (4, 1), (1, 1)])
def test_groups_of_each_axis(pp, tp):
    dp = 4 // (pp * tp)
    grid = torch.arange(4).view(pp, dp, tp)
    for rank, found in enumerate(run_ranks(axes, 4, pp, tp)):
        place = found["place"]
        assert found["shape"] == (pp, dp, tp)
        assert grid[place].item() == rank
        for dim, axis in enumerate(AXES):
            where = list(place)
            where[dim] = slice(None)
            members = grid[tuple(where)].tolist()
            assert found["members"][axis] == members
            assert found["sums"][axis] == sum(10**r for r in members)
            assert found["limits"][axis]
        assert found["sums"]["all"] == 1111
        assert found["message"] == "axis='DP' is not an axis of the mesh; did you mean 'dp'?: ('pp', 'dp', 'tp')"
        assert found["freed"]
        assert found["other works"]
        assert found["alive"]


def test_axes_of_one_process():
    context, value = ParallelContext(1, 1, CPU), torch.ones(1)
    for axis in (None, *AXES):
        context.all_reduce(value, axis)
    assert value.item() == 1


def make(rank: int, dims: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(rank)
    model = nn.Sequential(nn.Conv2d(dims, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    model.register_buffer("mask", torch.rand(5) > 0.5, persistent=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(2, dims, 5, 5)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def start_equal(rank: int, world_size: int) -> list:
    context = ParallelContext(1, 1, CPU)
    model, optimizer = make(rank)
    context.start_equal(model, optimizer)
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    return [t.detach().clone() for t in [*model.parameters(), *model.buffers(), *state]]


@pytest.mark.distributed
def test_ranks_start_equal():
    first, second = run_ranks(start_equal, 2)
    model, optimizer = make(0)
    state = [value for p in model.parameters() for value in optimizer.state[p].values()]
    expected = [t.detach() for t in [*model.parameters(), *model.buffers(), *state]]
    torch.testing.assert_close(first, expected, rtol=0, atol=0)
    torch.testing.assert_close(second, expected, rtol=0, atol=0)


def different(rank: int, world_size: int) -> list[str]:
    context = ParallelContext(1, 1, CPU)
    messages = []
    fresh = nn.Linear(2, 2)
    cases = [
        make(rank, dims=3 + rank),
        (nn.Linear(2, 2), torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1 * (rank + 1))),
        (fresh, torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)),
    ]
    if rank == 1:
        fresh(torch.ones(1, 2)).sum().backward()
        cases[2][1].step()
    for model, optimizer in cases:
        try:
            context.start_equal(model, optimizer)
        except InputError as error:
            messages.append(str(error))
    return messages


@pytest.mark.distributed
def test_different_models_are_refused_on_every_rank():
    for messages in run_ranks(different, 2):
        assert [m.split(" on rank(s) [1] differ(s)")[0] for m in messages] == [
            "the model's parameters",
            "the optimizer",
            "the optimizer's state",
        ]
        assert "load the same checkpoint, on every rank" in messages[0]


def randoms(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(7)
    separate_dp_ranks(1024, ParallelContext(1, 1, CPU))
    return torch.rand(3)


@pytest.mark.distributed
def test_dropout_differs_between_data_ranks():
    first, second = run_ranks(randoms, 2)
    assert not torch.equal(first, second)


def randoms_of_all(rank: int, world_size: int, tp: int) -> list:
    """Numbers of torch, python and numpy, which the ranks had seeded otherwise."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    separate_dp_ranks(2**32 - 1, ParallelContext(1, tp, CPU))
    return [torch.rand(1).item(), random.random(), np.random.rand()]


@pytest.mark.distributed
def test_a_tensor_group_draws_alike():
    first, second, third, fourth = run_ranks(randoms_of_all, 4, 2)
    assert first == second
    assert third == fourth
    assert all(a != b for a, b in zip(first, third, strict=True))
    whole = run_ranks(randoms_of_all, 2, 2)
    assert whole[0] == whole[1]
    data = run_ranks(randoms_of_all, 2, 1)
    random.seed(1)
    np.random.seed(1)
    assert data[1][1:] == [random.random(), np.random.rand()], "data ranks keep what the user seeded"


def test_one_process_keeps_the_users_seed():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    separate_dp_ranks(1024, ParallelContext(1, 1, CPU))
    assert torch.equal(torch.rand(3), expected)


def owned(rank: int, world_size: int) -> bool:
    class Group:
        def close(self, user: object) -> None:
            dist.destroy_process_group()

    context = ParallelContext(1, 1, CPU, Group())
    context.close()
    context.close()
    return dist.is_initialized()


@pytest.mark.distributed
def test_close_destroys_the_group_it_owns():
    assert run_ranks(owned, 2) == [False, False]
