"""Places on the mesh, sums over each axis, equal starts, and random numbers that differ where data differs."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh import ParallelContext
from halfmesh.config.schema import ParallelConfig, PipelineConfig, TensorConfig
from halfmesh.errors import InputError
from tests.support.models import make_engine, said
from tests.support.ranks import here, rank_device, run_ranks

CPU = torch.device("cpu")
AXES = ("pp", "dp", "tp")
SIZES = [(2, 2), (1, 4), (1, 1)]


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


def joined(context: ParallelContext, rank: int) -> None:
    """Means, and tensors of unlike lengths, over each axis."""
    for axis in (None, *AXES):
        ranks = range(context.size) if axis is None else dist.get_process_group_ranks(context.group(axis))
        value = torch.tensor([10.0 * rank], device=rank_device(), requires_grad=True)
        assert context.all_reduce(value, axis, op="mean") is value
        assert value.item() == sum(10.0 * r for r in ranks) / len(ranks)
        counted = here(torch.tensor(rank))
        assert context.all_reduce(counted, axis) is counted, "integers"
        parts = context.gather(here(torch.full((rank, 2), rank, dtype=torch.int64)), axis)
        assert parts.tolist() == [[r, r] for r in ranks for _ in range(r)]
        assert context.gather(here(torch.tensor(float(rank))), axis).tolist() == list(ranks)
    shapes = r"joins rows of one dtype and shape, but the ranks gave \(1, 1, 'torch\.float32'\), \(1, 2, "
    with pytest.raises(InputError, match=shapes):
        context.gather(here(torch.ones(1, 1 + rank)))
    with pytest.raises(InputError, match="rows of one dtype and shape"):
        context.gather(here(torch.ones(1, dtype=torch.float64 if rank else torch.float32)))
    with pytest.raises(InputError, match="op='avg': all_reduce gives the 'sum' or the 'mean'"):
        context.all_reduce(value, op="avg")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="axis='DP' is not an axis of the mesh: "):
        context.all_reduce(value, "DP")


def axes(rank: int, world_size: int) -> None:
    """The ranks of each axis and sums over them, on meshes of several shapes."""
    for pp, tp in SIZES:
        dims = ParallelConfig(pipeline=PipelineConfig(size=pp), tensor=TensorConfig(size=tp)).dims(world_size)
        context, other = (ParallelContext(dims, rank_device()) for _ in range(2))  # a second engine has its own groups
        place, grid = (context.pp_rank, context.dp_rank, context.tp_rank), torch.arange(4).view(pp, -1, tp)
        assert grid[place].item() == rank
        assert tuple(context.mesh.get_coordinate()) == place
        assert (*context.sizes.values(),) == (pp, 4 // (pp * tp), tp)
        assert (context.dp_group, context.tp_group) == (context.group("dp"), context.group("tp"))
        for dim, axis in enumerate(AXES):
            members = grid[tuple(slice(None) if d == dim else place[d] for d in range(3))].tolist()
            assert dist.get_process_group_ranks(context.group(axis)) == members
            assert context.all_reduce(here(torch.tensor([10.0**rank])), axis).item() == sum(10**r for r in members)
        joined(context, rank)
        context.close()
        assert other.all_reduce(here(torch.ones(1))).item() == world_size
        other.close()
        assert dist.is_initialized()


@pytest.mark.distributed
def test_ranks_and_sums_of_each_axis():
    run_ranks(axes, 4)


def different(rank: int, world_size: int) -> list[str]:
    shared = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(shared.parameters(), lr=0.1 * (rank + 1))
    return [said(make_engine, model=nn.Linear(2, 2 + rank)), said(make_engine, model=shared, optimizer=optimizer)]


@pytest.mark.distributed
def test_different_models_are_rejected_on_every_rank():
    for messages in run_ranks(different, 2):
        for message, what in zip(messages, ("the model's parameters", "the optimizer"), strict=True):
            assert message.startswith(f"{what} must be the same on all ranks")
            assert "on rank 1 differ from rank 0;" in message
