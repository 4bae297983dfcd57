"""Where a rank's numbers lie in the whole tensor: the regions of all ranks are the whole, once."""

from __future__ import annotations

import random

import torch

from halfmesh.parallel.shard_spec import Split, whole
from halfmesh.utils.tensors import in_memory_order


def count(shape, order=None):
    """A tensor of different numbers, which lies in memory in the given order of its dims."""
    order = list(range(len(shape))) if order is None else order
    numbers = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float64)
    return numbers.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])


def put(target, placement, held):
    """Write what a rank holds to where it belongs; what was there must be zero."""
    for region in placement.regions:
        box = target
        for dim, (at, size) in enumerate(zip(region.at, region.sizes, strict=True)):
            box = box.narrow(dim, at, size)
        assert not box.any()
        box.copy_(region.view(held))


def chunks(length, ranks):
    size = -(-length // ranks)
    return [(min(rank * size, length), min((rank + 1) * size, length)) for rank in range(ranks)]


def test_runs_of_all_ranks_are_the_whole():
    """Parts that are cut from a tensor as it lies in memory."""
    draw = random.Random(0)
    for _ in range(100):
        shape = [draw.randint(1, 5) for _ in range(draw.randint(0, 4))]
        tensor = count(shape, draw.sample(range(len(shape)), len(shape)))
        flat, target = in_memory_order(tensor), torch.zeros_like(tensor)
        for start, stop in chunks(flat.numel(), draw.randint(1, 4)):
            put(target, whole(tensor.shape).run(tensor.shape, tensor.stride(), start, stop), flat[start:stop])
        assert torch.equal(target, tensor)


def test_divided_layers_and_their_parts_are_the_whole():
    """A fused layer in blocks, over a tensor group, and each part over the data ranks: by rows, or as it lies."""
    draw = random.Random(0)
    for case in range(100):
        tensor_ranks, blocks, dim, data_ranks = (draw.randint(1, 3) for _ in range(4))
        shape = [2, 3, 2]
        shape[dim - 1] = tensor_ranks * blocks * draw.randint(1, 3)
        tensor, split = count(shape), Split(dim - 1, blocks)
        target = torch.zeros_like(tensor)
        parts = [split.cut(tensor, rank, tensor_ranks) for rank in range(tensor_ranks)]
        blocks = [part.unflatten(split.dim, (split.blocks, -1)) for part in parts]
        assert torch.equal(torch.cat(blocks, split.dim + 1).flatten(split.dim, split.dim + 1), tensor)
        for rank, part in enumerate(parts):
            placement = whole(shape).split(split, rank, tensor_ranks)
            for start, stop in chunks(len(part) if case % 2 else part.numel(), data_ranks):
                if case % 2:
                    put(target, placement.rows(start, stop), part[start:stop])
                else:
                    put(target, placement.run(part.shape, part.stride(), start, stop), part.flatten()[start:stop])
        assert torch.equal(target, tensor)
