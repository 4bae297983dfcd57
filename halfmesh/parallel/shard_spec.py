"""Describes the boxes of a full tensor that a rank holds after sharding over every axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """A tensor split evenly along `dim`; each of `blocks` blocks is split separately.

    A fused q, k, v weight of shape [3 * d, d] has three blocks: rank r holds its rows of q, then of k, then of v.
    """

    dim: int = 0
    blocks: int = 1

    def cut(self, whole: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """A copy of shard `rank` of `size`."""
        parts = whole.unflatten(self.dim, (self.blocks, -1)).chunk(size, self.dim + 1)
        return parts[rank].flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def whole_shape(self, part: torch.Size, size: int) -> torch.Size:
        """The shape of the full tensor, from that of one of `size` shards."""
        return torch.Size(n * size if dim == self.dim else n for dim, n in enumerate(part))

    def __str__(self) -> str:
        return f"dim {self.dim}" + (f" in {self.blocks} blocks" if self.blocks > 1 else "")


@dataclass(frozen=True)
class Box:
    """A box of the full tensor that a rank holds.

    Attributes:
        at: its first index in the full tensor, for each dim.
        sizes: the sizes of its dims.
        start: its first index in the rank's shard.
        strides: the strides of its dims in the rank's shard, if that has one dim. `start` is then one number.
    """

    at: Shape
    sizes: Shape
    start: Shape
    strides: Shape | None = None

    def view(self, held: torch.Tensor) -> torch.Tensor:
        """The box in `held`, which has the shape of the rank's shard. Shape: `sizes`."""
        if self.strides is not None:
            return held.as_strided(self.sizes, self.strides, held.storage_offset() + self.start[0])
        return narrow(held, self.start, self.sizes)


@dataclass(frozen=True)
class Placement:
    """The shard of one tensor that a rank holds.

    Attributes:
        shape: the shape of the full tensor.
        regions: the boxes that this rank holds, without overlaps. Empty if it holds nothing.
    """

    shape: Shape
    regions: tuple[Box, ...]

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the full tensor, in its shape."""
        return self.regions == whole(self.shape).regions

    def split(self, split: Split, rank: int, size: int) -> Placement:
        """Shard `rank` of `size` of a full tensor, as `Split.cut` makes it."""
        rows, zeros = self.shape[split.dim] // (split.blocks * size), (0,) * len(self.shape)
        sizes, found = _with(self.shape, split.dim, rows), list[Box]()
        for block in range(split.blocks if math.prod(sizes) else 0):
            at, start = ((block * size + rank) * rows, block * rows)
            found.append(Box(_with(zeros, split.dim, at), sizes, _with(zeros, split.dim, start)))
        return replace(self, regions=tuple(found))

    def rows(self, start: int, stop: int) -> Placement:
        """The rows `start` to `stop` (dim 0) of this shard."""
        regions = self._within((start, *(0 for _ in self.shape[1:])), (stop - start, *self.shape[1:]))
        return replace(self, regions=regions)

    def run(self, shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Placement:
        """The elements `start` to `stop` of this shard, in memory order, as a tensor of one dim.

        Args:
            shape: the shape of this shard, which must be dense.
            strides: the strides of this shard.
        """
        order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1))
        step, steps = 1, [0] * len(shape)  # as `strides`, which of dims of size 1 may be any numbers
        for dim in reversed(order):
            step, steps[dim] = step * shape[dim], step
        found: list[Box] = []
        for offsets, sizes in _boxes([shape[dim] for dim in order], start, stop):
            at, size = ([values[order.index(dim)] for dim in range(len(order))] for values in (offsets, sizes))
            for box in self._within(at, size):
                first = sum((a + b) * step for a, b, step in zip(at, box.start, steps, strict=True))
                found.append(replace(box, start=(first - start,), strides=tuple(steps)))
        return replace(self, regions=tuple(found))

    def _within(self, at: Sequence[int], sizes: Sequence[int]) -> tuple[Box, ...]:
        """The boxes that this rank holds of the box `at` of `sizes` of this shard, with indices in that box."""
        found = [_overlap(region, at, sizes) for region in self.regions]
        return tuple(box for box in found if box is not None)


def whole(shape: Sequence[int]) -> Placement:
    """The placement of a tensor that is not sharded."""
    sizes = tuple(shape)
    zeros = (0,) * len(sizes)
    return Placement(sizes, (Box(zeros, sizes, zeros),))


def narrow(tensor: torch.Tensor, at: Shape, sizes: Shape) -> torch.Tensor:
    """The box of these `sizes` that begins at the index `at`."""
    return tensor[tuple(slice(first, first + size) for first, size in zip(at, sizes, strict=True))]


def _overlap(region: Box, at: Sequence[int], sizes: Sequence[int]) -> Box | None:
    """The overlap of `region` with the box `at` of `sizes` of a shard."""
    first = [max(a, b) for a, b in zip(region.start, at, strict=True)]
    last = [min(a + n, b + m) for a, n, b, m in zip(region.start, region.sizes, at, sizes, strict=True)]
    if any(a >= b for a, b in zip(first, last, strict=True)):
        return None
    return Box(
        tuple(offset + f - s for offset, f, s in zip(region.at, first, region.start, strict=True)),
        tuple(b - a for a, b in zip(first, last, strict=True)),
        tuple(f - a for f, a in zip(first, at, strict=True)),
    )


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[list[int], list[int]]]:
    """Split the elements `start` to `stop` of a contiguous tensor of n dims into at most 2n - 1 boxes: for each its
    first index and its sizes."""
    if start >= stop:
        return
    if not shape:
        yield [], []
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # the whole rows; none, if all is within one row
    if first < last:
        yield [first, *(0 for _ in shape[1:])], [last - first, *shape[1:]]
    for index in sorted({start // row, (stop - 1) // row}):
        if not first <= index < last:
            for offsets, sizes in _boxes(shape[1:], max(start - index * row, 0), min(stop - index * row, row)):
                yield [index, *offsets], [1, *sizes]


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
