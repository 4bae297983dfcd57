"""The mesh and each rank's shards, in words and as an SVG: for `halfmesh check`, `halfmesh plan` and the report."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..distributed.env import coordinates_of
from ..parallel.dims import ParallelDims, in_words
from ..parallel.registries import AXES, DATA_STRATEGIES

if TYPE_CHECKING:
    from ..config.schema import ParallelConfig

_MOST = 8
"""Rows and columns that are drawn; if there are more, the first ones and the last."""
_LETTERS = 24
"""Characters in a line of a rank."""


def describe_shards(parallel: ParallelConfig, dims: ParallelDims, rank: int) -> str:
    """The shard of its modules that `rank` holds: "tensor 1/2, fsdp 3/4"; "" if they are not sharded."""
    axes = {name: AXES.get(name) for name, size in parallel.sizes.items() if size > 1}
    shards = [
        f"{name} {dims.row(rank, axis.dim).index(rank) + 1}/{parallel.sizes[name]}"
        for name, axis in axes.items()
        if not axis.splits_modules
    ]
    data, strategy = parallel.data, DATA_STRATEGIES.get(parallel.data.strategy)
    if dims.grad_ranks > 1 and (strategy.shards_state or strategy.shards_model):
        over = strategy.ranks_of_copy(data, dims.grad_ranks)
        shards.append(f"{data.strategy} {dims.row(rank, *dims.grad_axes).index(rank) % over + 1}/{over}")
    return ", ".join(shards)


def block_of(name: str) -> str:
    """The block that a parameter is in ("blocks.3"), or the first part of its name."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else parts[0]


def compress(names: Iterable[str]) -> list[str]:
    """blocks.0, blocks.1, blocks.2 as blocks.0-2."""

    def run(item: tuple[int, str]) -> tuple[str, int]:  # consecutive numbers have the same distance from their index
        row, _, last = item[1].rpartition(".")
        return (row, int(last) - item[0]) if last.isdigit() else (item[1], 0)

    groups = [[name for _, name in group] for _, group in itertools.groupby(enumerate(names), run)]
    return [group[0] if len(group) == 1 else f"{group[0]}-{group[-1].rpartition('.')[2]}" for group in groups]


def draw(sizes: Mapping[str, int], describe: Callable[[int], Sequence[str]], node: int | None = None) -> str:
    """The SVG of a mesh: a row for each coordinate on its outermost axis, a column for each on the others.

    Args:
        sizes: of the axes, outermost first; the last one is fastest.
        describe: lines about a rank that is drawn, below its number.
        node: devices of a node, to mark the nodes.
    """
    (outer, count), *others = sizes.items()
    inner = math.prod(size for _, size in others)
    columns = _pick(inner)
    rows = [[None if None in (row, n) else row * inner + n for n in columns] for row in _pick(count)]  # type: ignore[operator]
    lines = {rank: _fit(describe(rank)) for ranks in rows for rank in ranks if rank is not None}
    total = count * inner
    title = f"{total:,} rank{'s' if total > 1 else ''}: {in_words(sizes)}"
    title += f" ({total - len(lines):,} are not drawn)" if total > len(lines) else ""
    names = ["" if row is None else f"{outer} {row}" for row in _pick(count)]
    heads = ["" if n is None else _head(coordinates_of(n, dict(others)), dict(others)) for n in columns]
    return load_template("mesh.svg").render(
        title=title, names=names, heads=heads, rows=rows, lines=lines, node=node or total, shows_nodes=node is not None
    )


def load_template(name: str) -> Any:
    """The template `name` of this folder."""
    from jinja2 import ChainableUndefined, Environment, PackageLoader

    loader, undefined = PackageLoader("halfmesh", "report"), ChainableUndefined
    environment = Environment(loader=loader, autoescape=True, undefined=undefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template(name)


def _head(coordinates: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{axis} {coordinates[axis]}" for axis, size in sizes.items() if size > 1)


def _fit(lines: Sequence[str]) -> list[str]:
    """Each of `lines` broken into at most two lines of a rank."""
    return [part for line in lines for part in textwrap.wrap(line, _LETTERS, max_lines=2, placeholder=" ...")]


def _pick(count: int) -> list[int | None]:
    """The indices, of `count`, that are drawn; None for those that are left out."""
    return list(range(count)) if count <= _MOST else [*range(_MOST - 2), None, count - 1]
