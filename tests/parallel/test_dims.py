"""Coordinates and rows of ranks: of axes, of several together, and of sub-axes."""

from __future__ import annotations

import re

import pytest
import torch

from halfmesh import ParallelContext
from halfmesh.distributed.env import coordinates_of
from halfmesh.errors import InputError
from halfmesh.parallel.dims import ParallelDims
from tests.support.ranks import here, rank_device, run_ranks

DIMS = ParallelDims(32, {"pp": 2, "dp": 4, "cp": 2, "tp": 2})
SPLIT = DIMS.split("dp", {"edp": 2, "ep": 2})


@pytest.mark.parametrize(
    ("axes", "row"),
    [
        (("dp",), [1 + 4, 1 + 0, 1 + 8, 1 + 12]),
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
    assert SPLIT.row(13, *axes) == sorted(row)
    rows = SPLIT.rows(*axes)
    assert sorted(rank for each in rows for rank in each) == list(range(32)), "each rank once"
    for each in rows:
        assert all(SPLIT.row(rank, *axes) == each for rank in each)
        assert each == sorted(each)


ODD = ParallelDims(12, {"dp": 12}).split("dp", {"a": 3, "b": 4}).split("dp", {"c": 4, "d": 3})
REJECTED = {
    "dp has 4 ranks, which cannot be split into edp 2 x ep 3": lambda: DIMS.split("dp", {"edp": 2, "ep": 3}),
    "dp and ep share coordinates": lambda: SPLIT.row(0, "dp", "ep"),
    "a and d share coordinates": lambda: ODD.row(0, "a", "d"),
    "axis='edpp' is not an axis of the mesh: tp, cp, dp, pp, ep, edp": lambda: SPLIT.row(0, "edpp"),
}


@pytest.mark.parametrize("message", REJECTED)
def test_what_cannot_be_split_or_combined_is_rejected(message):
    with pytest.raises(InputError, match=re.escape(message)):
        REJECTED[message]()


def groups(rank: int, world_size: int) -> None:
    context = ParallelContext(ParallelDims(4, {"pp": 1, "dp": 4, "cp": 1, "tp": 1}), rank_device())
    context.split("dp", {"edp": 2, "ep": 2})
    world = torch.distributed.group.WORLD
    assert context.group("dp") is context.group("cp", "dp") is context.group("ep", "edp") is context.dp_group is world
    assert context.group("pp") is context.group("tp", "cp") is not world
    assert context.group("ep") is context.group("ep", "cp") is not context.group("edp")
    assert (context.size_of("edp", "tp"), context.size_of("dp", "cp"), context.size_of("tp")) == (2, 4, 1)
    assert (context.coordinate("edp"), context.coordinate("ep")) == divmod(rank, 2)
    assert context.coordinate("ep", "edp") == context.dp_rank == rank
    assert sorted(context.groups.values()) == ["dp", "edp", "ep", "pp"]
    assert torch.distributed.get_process_group_ranks(context.group("edp")) == [rank % 2, rank % 2 + 2]
    assert context.all_reduce(here(torch.tensor(rank)), ("ep", "cp")).item() == (1 if rank < 2 else 5)
    assert context.gather(here(torch.tensor(rank)), "edp").tolist() == [rank % 2, rank % 2 + 2]
    context.close()


@pytest.mark.distributed
def test_combinations_of_the_same_ranks_share_one_group():
    run_ranks(groups, 4)
