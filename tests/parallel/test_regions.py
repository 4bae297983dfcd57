"""Where a rank's numbers lie in the whole tensor: the regions of all ranks are the whole, once."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmesh.parallel.regions import Region, whole
from halfmesh.parallel.split import Split
from halfmesh.strides import in_memory_order

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def count(shape, order=None):
    """A tensor of different numbers, which lies in memory in the given order of its dims."""
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    order = range(len(shape)) if order is None else order
    laid_out = numbers.view([shape[dim] for dim in order])
    return laid_out.permute([list(order).index(dim) for dim in range(len(shape))])


def put(target, placement, held):
    """Write what a rank holds to where it belongs; what was there must be zero."""
    for region in placement.regions:
        box = target
        for dim, (at, size) in enumerate(zip(region.at, region.sizes, strict=True)):
            box = box.narrow(dim, at, size)
        assert not box.any()
        box.copy_(region.view(held))


@settings(deadline=None)
@given(SHAPES.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))), st.integers(1, 4))
def test_runs_of_all_ranks_are_the_whole(shape_and_order, ranks):
    tensor = count(*shape_and_order)
    flat, target = in_memory_order(tensor), torch.zeros_like(tensor)
    chunk = -(-flat.numel() // ranks)
    for rank in range(ranks):
        start, stop = min(rank * chunk, flat.numel()), min((rank + 1) * chunk, flat.numel())
        placement = whole(tensor.shape).run(tensor.shape, tensor.stride(), start, stop)
        assert len(placement.regions) <= max(1, 2 * tensor.dim() - 1)
        put(target, placement, flat[start:stop])
    assert torch.equal(target, tensor)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_divided_layers_and_their_parts_are_the_whole(tensor_ranks, blocks, rows, dim, data_ranks, cuts_rows):
    """A fused layer in blocks, over a tensor group, and each part over the data ranks: by rows, or as it lies."""
    shape = [2, 3, 2]
    shape[dim] = tensor_ranks * blocks * rows
    tensor, split = count(shape), Split(dim, blocks)
    target = torch.zeros_like(tensor)
    for tp in range(tensor_ranks):
        part = split.cut(tensor, tp, tensor_ranks)
        placement = whole(shape).split(split, tp, tensor_ranks)
        for rank in range(data_ranks):
            length = len(part) if cuts_rows else part.numel()
            chunk = -(-length // data_ranks)
            start, stop = min(rank * chunk, length), min((rank + 1) * chunk, length)
            if cuts_rows:
                put(target, placement.rows(start, stop), part[start:stop])
            else:
                own = placement.run(part.shape, part.stride(), start, stop)
                put(target, own, part.flatten()[start:stop])
    assert torch.equal(target, tensor)


def test_views_write_to_what_is_held():
    held = torch.zeros(6)
    placement = whole((3, 4)).run((3, 4), (4, 1), 3, 9)
    assert [(region.at, region.sizes) for region in placement.regions] == [
        ((0, 3), (1, 1)),
        ((1, 0), (1, 4)),
        ((2, 0), (1, 1)),
    ]
    for region in placement.regions:
        region.view(held).fill_(region.at[0])
    assert held.tolist() == [0, 1, 1, 1, 1, 2]


def test_what_is_whole():
    assert whole(()).regions == (Region((), (), ()),)
    assert whole((2, 3)).is_whole
    assert whole((2, 3)).rows(0, 2).is_whole
    assert not whole((2, 3)).rows(0, 1).is_whole
    assert not whole((2, 3)).run((2, 3), (3, 1), 0, 6).is_whole
    assert whole((2, 3)).rows(2, 2).regions == ()
    assert whole((0, 3)).is_whole
