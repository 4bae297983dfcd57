"""The boxes of the full tensor that a rank holds, after sharding over every axis."""

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
class Run:
    """A box that is contiguous in a tensor of one dim, perhaps with its dims in another order.

    Attributes:
        start: the offset in that tensor at which it begins.
        sizes: of the dims, in memory order.
        order: for each of these, the dim of the box.
    """

    start: int
    sizes: Shape
    order: Shape

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The box, in `flat`."""
        box = flat[self.start : self.start + math.prod(self.sizes)].view(self.sizes)
        return box.permute([self.order.index(dim) for dim in range(len(self.order))])


@dataclass(frozen=True)
class Box:
    """A box of the full tensor that a rank holds.

    Attributes:
        at: its first index in the full tensor, for each dim.
        sizes: of its dims.
        start: its first index in the rank's shard, or in `run`.
        run: its range in the rank's shard, if that is a tensor of one dim.
    """

    at: Shape
    sizes: Shape
    start: Shape
    run: Run | None = None

    def view(self, held: torch.Tensor) -> torch.Tensor:
        """The box in `held`, which has the shape of the rank's shard. Shape: `sizes`."""
        box = held if self.run is None else self.run.view(held)
        for dim, (start, size) in enumerate(zip(self.start, self.sizes, strict=True)):
            box = box.narrow(dim, start, size)
        return box


@dataclass(frozen=True)
class Placement:
    """The shard of one tensor that a rank holds.

    Attributes:
        shape: of the full tensor.
        regions: the boxes that this rank holds, without overlaps; none where it holds nothing.
    """

    shape: Shape
    regions: tuple[Box, ...]

    @property
    def is_whole(self) -> bool:
        """True if this rank holds the full tensor, in its shape."""
        return self.regions == whole(self.shape).regions

    def split(self, split: Split, rank: int, size: int) -> Placement:
        """Shard `rank` of `size` of a full tensor, as `Split.cut` makes it."""
        rows = self.shape[split.dim] // (split.blocks * size)
        sizes = _with(self.shape, split.dim, rows)
        zeros = (0,) * len(sizes)
        found = [
            Box(_with(zeros, split.dim, (block * size + rank) * rows), sizes, _with(zeros, split.dim, block * rows))
            for block in range(split.blocks)
        ]
        return replace(self, regions=tuple(found) if math.prod(sizes) else ())

    def rows(self, start: int, stop: int) -> Placement:
        """The rows `start` to `stop` (dim 0) of this shard."""
        at, sizes = (start, *(0 for _ in self.shape[1:])), (stop - start, *self.shape[1:])
        return self._within(at, sizes, None)

    def run(self, shape: Sequence[int], strides: Sequence[int], start: int, stop: int) -> Placement:
        """The elements `start` to `stop` of this shard, in memory order, as a tensor of one dim.

        Args:
            shape, strides: of this shard; dense.
        """
        order = tuple(sorted(range(len(shape)), key=lambda dim: (-strides[dim], shape[dim] == 1)))
        found: list[Box] = []
        for begin, offsets, sizes in _boxes([shape[dim] for dim in order], start, stop):
            at, size = ([0] * len(order) for _ in range(2))
            for index, dim in enumerate(order):
                at[dim], size[dim] = offsets[index], sizes[index]
            found += self._within(at, size, Run(begin - start, tuple(sizes), order)).regions
        return replace(self, regions=tuple(found))

    def _within(self, at: Sequence[int], sizes: Sequence[int], run: Run | None) -> Placement:
        """The box `at` of `sizes` of this shard; `run`: its range in a tensor of one dim."""
        found = [_overlap(region, at, sizes, run) for region in self.regions]
        return replace(self, regions=tuple(box for box in found if box is not None))


def whole(shape: Sequence[int]) -> Placement:
    """The placement of a tensor that is not sharded."""
    sizes = tuple(shape)
    zeros = (0,) * len(sizes)
    return Placement(sizes, (Box(zeros, sizes, zeros),))


def _overlap(region: Box, at: Sequence[int], sizes: Sequence[int], run: Run | None) -> Box | None:
    """The overlap of `region` with the box `at` of `sizes` of a shard; `run` is that of this box."""
    first = [max(a, b) for a, b in zip(region.start, at, strict=True)]
    last = [min(a + n, b + m) for a, n, b, m in zip(region.start, region.sizes, at, sizes, strict=True)]
    if any(a >= b for a, b in zip(first, last, strict=True)):
        return None
    return Box(
        tuple(offset + f - s for offset, f, s in zip(region.at, first, region.start, strict=True)),
        tuple(b - a for a, b in zip(first, last, strict=True)),
        tuple(f - a for f, a in zip(first, at, strict=True)),
        run,
    )


def _boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """Split the elements `start` to `stop` of a contiguous tensor of n dims into at most 2n - 1 boxes. For each: the
    number of its first element, that element's index, and the box's sizes."""
    if start >= stop:
        return
    if not shape:
        yield start, [], []
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row
    if first > last:  # within one row
        yield from _in_row(last, shape, start, stop)
        return
    if start < first * row:
        yield from _in_row(first - 1, shape, start, first * row)
    if first < last:
        yield first * row, [first, *(0 for _ in shape[1:])], [last - first, *shape[1:]]
    if last * row < stop:
        yield from _in_row(last, shape, last * row, stop)


def _in_row(index: int, shape: Sequence[int], start: int, stop: int) -> Iterator[tuple[int, list[int], list[int]]]:
    """`_boxes` within row `index`."""
    skipped = index * math.prod(shape[1:])
    for begin, offsets, sizes in _boxes(shape[1:], start - skipped, stop - skipped):
        yield begin + skipped, [index, *offsets], [1, *sizes]


def _with(values: Shape, dim: int, value: int) -> Shape:
    return (*values[:dim], value, *values[dim + 1 :])
