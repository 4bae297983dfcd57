"""The mesh: coordinates and rows of ranks, of axes and of sub-axes; their groups, and sums over them."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist

from halfmesh import ParallelContext
from halfmesh.config.schema import ParallelConfig, PipelineConfig, TensorConfig
from halfmesh.distributed.env import coordinates_of
from halfmesh.errors import InputError
from halfmesh.parallel.dims import ParallelDims
from tests.support.models import make_engine
from tests.support.ranks import here, rank_device, run_ranks

CPU = torch.device("cpu")
AXES = ("pp", "dp", "tp")
DIMS = ParallelDims(32, {"pp": 2, "dp": 4, "cp": 2, "tp": 2})
SPLIT = DIMS.split("dp", {"edp": 2, "ep": 2})
ODD = ParallelDims(12, {"dp": 12}).split("dp", {"a": 3, "b": 4}).split("dp", {"c": 4, "d": 3})


@pytest.mark.parametrize(
    ("axes", "row"),
    [
        (("dp",), [1 + 0, 1 + 4, 1 + 8, 1 + 12]),
        (("dp", "cp"), [1, 3, 5, 7, 9, 11, 13, 15]),
        (("pp", "dp", "cp", "tp"), list(range(32))),
        (("ep",), [9, 13]),
        (("cp", "edp"), [5, 7, 13, 15]),
        (("pp", "ep", "tp"), [8, 9, 12, 13, 24, 25, 28, 29]),
        ((), [13]),
    ],
)
def test_ranks_of_axes_and_sub_axes_in_the_order_of_the_mesh(axes, row):
    """Rank 13 has the coordinates pp 0, dp 3 (edp 1, ep 1), cp 0, tp 1."""
    assert coordinates_of(13, SPLIT.sizes) == {"pp": 0, "dp": 3, "cp": 0, "tp": 1}
    assert SPLIT.row(13, *axes) == row
    rows = SPLIT.rows(*axes)
    assert sorted(rank for each in rows for rank in each) == list(range(32)), "each rank once"
    for each in rows:
        assert all(SPLIT.row(rank, *axes) == each for rank in each)
        assert each == sorted(each)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: DIMS.split("dp", {"edp": 2, "ep": 3}), "dp has 4 ranks, which cannot be split into edp 2 x ep 3"),
        (lambda: SPLIT.row(0, "dp", "ep"), "dp and ep share coordinates"),
        (lambda: ODD.row(0, "a", "d"), "a and d share coordinates"),
        (lambda: SPLIT.row(0, "edpp"), "axis='edpp' is not an axis of the mesh: tp, cp, dp, pp, ep, edp"),
    ],
)
def test_what_cannot_be_split_or_combined_is_rejected(call, message):
    with pytest.raises(InputError, match=re.escape(message)):
        call()


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


def groups(rank: int, world_size: int) -> None:
    """The ranks of each axis and sums over them, on meshes of several shapes; and of sub-axes."""
    for pp, tp in [(2, 2), (1, 4), (1, 1)]:
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

    context = ParallelContext(ParallelDims(4, {"pp": 1, "dp": 4, "cp": 1, "tp": 1}), rank_device())
    context.split("dp", {"edp": 2, "ep": 2})
    world = dist.group.WORLD
    assert context.group("dp") is context.group("cp", "dp") is context.group("ep", "edp") is context.dp_group is world
    assert context.group("pp") is context.group("tp", "cp") is not world
    assert context.group("ep") is context.group("ep", "cp") is not context.group("edp")
    assert (context.size_of("edp", "tp"), context.size_of("dp", "cp"), context.size_of("tp")) == (2, 4, 1)
    assert (context.coordinate("edp"), context.coordinate("ep")) == divmod(rank, 2)
    assert context.coordinate("ep", "edp") == context.dp_rank == rank
    assert sorted(context.groups.values()) == ["dp", "edp", "ep", "pp"]
    assert dist.get_process_group_ranks(context.group("edp")) == [rank % 2, rank % 2 + 2]
    assert context.all_reduce(here(torch.tensor(rank)), ("ep", "cp")).item() == (1 if rank < 2 else 5)
    assert context.gather(here(torch.tensor(rank)), "edp").tolist() == [rank % 2, rank % 2 + 2]
    context.close()


@pytest.mark.distributed
def test_groups_of_axes_and_sub_axes_and_sums_over_them():
    run_ranks(groups, 4)
