"""A picture of the mesh: which rank holds what. It needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, did_you_mean, readable
from .dry_run import DryRun, needed
from .holdings import compress, find_holdings
from .writing import refuse_target

if TYPE_CHECKING:
    from ..config import Config

ENDINGS = (".png", ".svg")
_MOST = 8
"""Ranks of the pipeline, and columns, that are drawn; of more the first ones and the last."""
_WIDTH, _HEIGHT, _DOTS = 2.1, 1.15, 0.6
_GAP, _TOP, _LEFT = 0.3, 1.15, 0.9
"""In inches: of a rank, and of what is left out; between groups; above, and left of, all ranks."""
_LEFT_OUT = "..."
_NODES = ("#dbe9f6", "#fde7cf", "#dff0d8", "#eadcf0")
"""Colours of nodes, in turn."""
_LINE = "#5b6b7b"


@dataclass(frozen=True)
class Cell:
    """What is said of a rank."""

    rank: int
    lines: tuple[str, ...]
    node: int | None = None


@dataclass(frozen=True)
class Grid:
    """What is drawn: `cells[row][column]`, None where ranks are left out.

    Attributes:
        title: above all.
        rows, columns: their names.
        groups: of each column its data rank.
    """

    title: str
    rows: list[str]
    columns: list[str]
    groups: list[int]
    cells: list[list[Cell | None]]


def refuse_path(path: Path, may_replace: bool) -> None:
    """Before anything is drawn.

    Raises:
        InputError: the ending is another, matplotlib is missing, or see `writing.refuse_target`.
    """
    if path.suffix.lower() not in ENDINGS:
        near = did_you_mean(path.suffix, ENDINGS)
        raise InputError(f"--picture {path}: a name that ends in {' or '.join(ENDINGS)} says the format{near}")
    refuse_target(path, "--picture", may_replace)
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"--picture {path}: matplotlib draws it, and cannot be imported ({error}); pip install matplotlib"
        ) from error


def draw(
    path: Path, config: Config, run: DryRun, model: str, batch: tuple[str, ...] = (), node: int | None = None
) -> None:
    """Draw the mesh of `config` into `path`.

    Args:
        run: of this config; has the bytes of some ranks.
        node: devices of a node, if that is known.
    """
    refuse_path(path, may_replace=True)  # whoever asks for a picture has been asked before
    _draw(path, make_grid(config, run, find_holdings(config, model, batch), node))


def make_grid(config: Config, run: DryRun, holdings: list[list[str]], node: int | None = None) -> Grid:
    """What will be drawn."""
    layout = run.layout
    pipelines = _pick(layout.pipeline)
    places = [(dp, tp) for dp in range(layout.data) for tp in range(layout.tensor)]
    columns = _pick(len(places))
    sizes = {run.stage_of(rank): needed(figures) for rank, figures in run.ranks.items()}
    cells = [
        [
            None
            if stage is None or column is None
            else _cell(config, run, holdings, (stage, *places[column]), sizes, node)
            for column in columns
        ]
        for stage in pipelines
    ]
    world = layout.pipeline * layout.data * layout.tensor
    title = f"{world:,} rank{'s' if world > 1 else ''}: pp {layout.pipeline} x dp {layout.data} x tp {layout.tensor}"
    left_out = world - sum(cell is not None for row in cells for cell in row)
    title += f" (... stands for {left_out:,} ranks that are not drawn)" if left_out else ""
    return Grid(
        title,
        [_LEFT_OUT if stage is None else f"pp {stage}" for stage in pipelines],
        [_LEFT_OUT if column is None else _column(places[column], layout.tensor) for column in columns],
        [-1 if column is None else places[column][0] for column in columns],
        cells,
    )


def _pick(count: int) -> list[int | None]:
    """Which of so many are drawn; None for those that are left out."""
    if count <= _MOST:
        return list(range(count))
    return [*range(_MOST - 2), None, count - 1]


def _column(place: tuple[int, int], tensor: int) -> str:
    return f"dp {place[0]}, tp {place[1]}" if tensor > 1 else f"dp {place[0]}"


def _cell(
    config: Config,
    run: DryRun,
    holdings: list[list[str]],
    place: tuple[int, int, int],
    sizes: dict[int, int],
    node: int | None,
) -> Cell:
    layout, (stage, dp, tp) = run.layout, place
    rank = (stage * layout.data + dp) * layout.tensor + tp
    parts = [f"tensor {tp + 1}/{layout.tensor}"] if layout.tensor > 1 else []
    data = config.parallel.data
    if layout.data > 1 and data.strategy != "replicate":
        ranks = data.hybrid or layout.data
        parts.append(f"{data.strategy} {dp % ranks + 1}/{ranks}")
    names = textwrap.wrap(", ".join(compress(holdings[stage])), 30)
    names = names if len(names) <= 2 else [names[0], names[1][:26] + " ..."]
    lines = [*names, ", ".join(parts), readable(sizes[stage]) if stage in sizes else ""]
    return Cell(rank, tuple(filter(None, lines)), None if node is None else rank // node)


def _draw(path: Path, grid: Grid) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    # As text in an SVG, with the same names of its parts each time.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "halfmesh", "font.family": "sans-serif"}):
        heights = [_DOTS if name == _LEFT_OUT else _HEIGHT for name in grid.rows]
        widths = [_DOTS if name == _LEFT_OUT else _WIDTH for name in grid.columns]
        rows, columns = _spans(heights, range(len(heights)), _TOP), _spans(widths, grid.groups, _LEFT)
        width, height = max(columns[-1][1] + _GAP, 0.115 * len(grid.title) + 2 * _GAP), rows[-1][1] + _GAP
        figure = Figure(figsize=(width, height))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        axes.text(_GAP, 0.4, grid.title, fontsize=13, weight="bold", va="center")
        for (left, right), name in zip(columns, grid.columns, strict=True):
            axes.text((left + right) / 2, _TOP - 0.2, name, fontsize=9, color=_LINE, ha="center", va="center")
        for (top, bottom), name, cells in zip(rows, grid.rows, grid.cells, strict=True):
            axes.text(_GAP, (top + bottom) / 2, name, fontsize=10, color=_LINE, va="center")
            for (left, right), cell in zip(columns, cells, strict=True):
                _draw_cell(axes, (left, top, right - left, bottom - top), cell)
        metadata: dict[str, Any] = {"Date": None} if path.suffix.lower() == ".svg" else {}
        figure.savefig(path, dpi=110, metadata=metadata)


def _spans(sizes: Sequence[float], groups: Sequence[int], begin: float) -> list[tuple[float, float]]:
    """Where each of some rows or columns begins and ends; those of a group touch."""
    spans: list[tuple[float, float]] = []
    for index, (size, group) in enumerate(zip(sizes, groups, strict=True)):
        if index:
            begin = spans[-1][1] + (_GAP if group != groups[index - 1] else 0.0)
        spans.append((begin, begin + size))
    return spans


def _draw_cell(axes: Any, box: tuple[float, float, float, float], cell: Cell | None) -> None:
    from matplotlib.patches import Rectangle

    left, top, width, height = box
    if cell is None:
        axes.text(left + width / 2, top + height / 2, _LEFT_OUT, fontsize=14, color=_LINE, ha="center", va="center")
        return
    colour = "#f4f6f8" if cell.node is None else _NODES[cell.node % len(_NODES)]
    axes.add_patch(Rectangle((left, top), width, height, facecolor=colour, edgecolor=_LINE, linewidth=0.9))
    axes.text(left + 0.1, top + 0.18, f"rank {cell.rank}", fontsize=9.5, weight="bold", va="center")
    if cell.node is not None:
        right = left + width - 0.1
        axes.text(right, top + 0.18, f"node {cell.node}", fontsize=8, color=_LINE, ha="right", va="center")
    for index, line in enumerate(cell.lines):
        axes.text(left + 0.1, top + 0.43 + index * 0.2, line, fontsize=8, va="center")
