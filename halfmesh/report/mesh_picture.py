"""The mesh and each rank's shards, in words and as an SVG: for `halfmesh check`, `halfmesh plan` and the report."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from ..distributed.env import find_places
from ..parallel.dims import in_words
from ..parallel.registries import AXES, DATA_STRATEGIES

if TYPE_CHECKING:
    from ..config.schema import ParallelConfig

_MOST = 8
"""Rows and columns that are drawn; if there are more, the first ones and the last."""
_WIDTH, _LINE, _GAP, _DOTS = 178, 16, 8, 30
"""Sizes of a rank, a line of text, the gap between ranks, and the mark for left-out ranks; px."""
_LETTERS = 24
"""Characters in a line of a rank."""
_STYLE = """
.mesh { --back: #ffffff; --ink: #17202b; --soft: #556274; --line: #b9c3cf;
  --n0: #f1f4f8; --n1: #fdf0de; --n2: #e7f4ea; --n3: #f1e8f7; font: 11px system-ui, "DejaVu Sans", sans-serif; }
@media (prefers-color-scheme: dark) { .mesh { --back: #19202a; --ink: #e6ebf2; --soft: #a3b0c0; --line: #48566a;
  --n0: #222b37; --n1: #3a2f1d; --n2: #1d3527; --n3: #33273d; } }
.mesh .back { fill: var(--back); } .mesh .cell { stroke: var(--line); } .mesh text { fill: var(--ink); }
.mesh .soft { fill: var(--soft); } .mesh .bold { font-weight: 600; font-size: 12px; }
.mesh .middle { text-anchor: middle; } .mesh .end { text-anchor: end; }
.n0 { fill: var(--n0); } .n1 { fill: var(--n1); } .n2 { fill: var(--n2); } .n3 { fill: var(--n3); }
"""


def describe_shards(parallel: ParallelConfig, sizes: Mapping[str, int], rank: int) -> str:
    """The shard of its modules that `rank` holds: "tensor 1/2, fsdp 3/4"; "" if they are not sharded."""
    places = find_places(rank, sizes)
    axes = {name: AXES.get(name) for name in parallel.sizes}
    parts = [
        f"{name} {places[axis.dim] + 1}/{sizes[axis.dim]}"
        for name, axis in axes.items()
        if sizes[axis.dim] > 1 and not axis.splits_modules
    ]
    data, strategy = parallel.data, DATA_STRATEGIES.get(parallel.data.strategy)
    (axis,) = sizes.keys() - {axis.dim for axis in axes.values()}
    if sizes[axis] > 1 and (strategy.shards_state or strategy.shards_model):
        over = data.hybrid or sizes[axis]
        parts.append(f"{data.strategy} {places[axis] % over + 1}/{over}")
    return ", ".join(parts)


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
    rows, columns = _pick(count), _pick(inner)
    ranks = [row * inner + column for row in rows for column in columns if row >= 0 and column >= 0]
    lines = {rank: _fit(describe(rank)) for rank in ranks}
    total, height = count * inner, _LINE * (max(map(len, lines.values())) + 1) + 14
    title = f"{total:,} rank{'s' if total > 1 else ''}: {in_words(sizes)}"
    title += f" ({total - len(ranks):,} are not drawn)" if total > len(ranks) else ""
    left = 7 * len(f"{outer} {count - 1}") + 2 * _GAP if count > 1 else _GAP
    ys, bottom = _spans(rows, 64 if inner > 1 else 40, height)
    xs, right = _spans(columns, left, _WIDTH, math.prod(size for _, size in others[1:]))
    right = max(right, 8 * len(title))
    parts = [f'<rect class="back" width="{right}" height="{bottom}" rx="6"/>', _text(_GAP, 22, title, "bold")]
    for column, x in zip(columns, xs, strict=True):
        if column >= 0 and inner > 1:
            places = find_places(column, dict(others))
            head = ", ".join(f"{axis} {places[axis]}" for axis, size in others if size > 1)
            parts.append(_text(x + _WIDTH // 2, 52, head, "soft middle"))
    for row, y in zip(rows, ys, strict=True):
        if row >= 0 and count > 1:
            parts.append(_text(_GAP, y + height // 2 + 4, f"{outer} {row}", "soft"))
        for column, x in zip(columns, xs, strict=True):
            if row >= 0 and column >= 0:
                rank = row * inner + column
                parts.append(_cell(rank, lines[rank], x, y, height, node))
            else:
                dots_x, dots_y = x + (_WIDTH if column >= 0 else _DOTS) // 2, y + (height if row >= 0 else _DOTS) // 2
                parts.append(_text(dots_x, dots_y + 4, "...", "soft middle"))
    size = f'viewBox="0 0 {right} {bottom}" width="{right}" height="{bottom}"'
    head = f'<svg class="mesh" xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}">'
    return "\n".join([head, f"<title>{escape(title)}</title>", f"<style>{_STYLE}</style>", *parts, "</svg>\n"])


def _cell(rank: int, lines: Sequence[str], x: int, y: int, height: int, node: int | None) -> str:
    number = 0 if node is None else rank // node
    box = f'<rect class="cell n{number % 4}" x="{x}" y="{y}" width="{_WIDTH}" height="{height}" rx="5"/>'
    words = [_text(x + 9, y + 18, f"rank {rank}", "bold")]
    words += [] if node is None else [_text(x + _WIDTH - 9, y + 18, f"node {number}", "soft end")]
    words += [_text(x + 9, y + 18 + _LINE * row, line, "") for row, line in enumerate(lines, start=1)]
    return "\n".join([box, *words])


def _text(x: int, y: int, text: str, style: str) -> str:
    return f'<text class="{style}" x="{x}" y="{y}">{escape(text)}</text>'


def _fit(lines: Sequence[str]) -> list[str]:
    """Each of `lines` broken into at most two lines of a rank."""
    return [part for line in lines for part in textwrap.wrap(line, _LETTERS, max_lines=2, placeholder=" ...")]


def _pick(count: int) -> list[int]:
    """The indices, of `count`, that are drawn; -1 for those that are left out."""
    return list(range(count)) if count <= _MOST else [*range(_MOST - 2), -1, count - 1]


def _spans(chosen: Sequence[int], begin: int, size: int, group: int = 1) -> tuple[list[int], int]:
    """The start of each item and the end of the picture, in px. Items of one group have half the gap between them."""
    begins: list[int] = []
    for before, item in itertools.pairwise([-1, *chosen]):
        if begins:
            begin += _GAP if item >= 0 <= before and before // group == item // group else 2 * _GAP
        begins.append(begin)
        begin += _DOTS if item < 0 else size
    return begins, begin + _GAP
