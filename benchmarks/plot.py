"""The ratios of all works in one picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .harness import AGAIN, FUSED, HALFMESH, LOOP, Result, load

COLORS = {HALFMESH: "#d1495b", LOOP: "#8d99ae", AGAIN: "#c9d1dc", FUSED: "#5c6b82"}
OTHER = "#e3b505"
LABEL = {"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8}
COLUMNS = 3
GROUPS = ["steps", "layouts", "tail"]


def draw(raw: Path, path: Path) -> Path:
    """A panel for every result with steps, saved as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    results = [result for result in load(raw) if result.group in GROUPS]
    precisions = ["fp32", "bf16", "fp16"]
    results.sort(key=lambda each: (GROUPS.index(each.group), each.work, precisions.index(each.precision), each.clip))
    height = math.ceil(len(results) / COLUMNS) or 1
    figure, axes = plt.subplots(height, COLUMNS, figsize=(5.2 * COLUMNS, 2.35 * height), squeeze=False)
    flat = [axis for line in axes for axis in line]
    for axis, result in zip(flat, results, strict=False):
        _panel(axis, result)
    for axis in flat[len(results) :]:
        axis.axis("off")
    figure.suptitle(
        "Time of a step over that of the hand-written loop in the same round (median, quartiles); shorter is faster",
        fontsize=13,
    )
    figure.tight_layout(rect=(0, 0, 1, 0.985))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _panel(axis: Any, result: Result) -> None:
    rows = [(row.name, ratio) for row in result.rows if (ratio := result.ratios(row.name)) is not None]
    places = range(len(rows))
    medians = [ratio.median for _, ratio in rows]
    whiskers: Sequence[list[float]] = [
        [ratio.median - ratio.q25 for _, ratio in rows],
        [ratio.q75 - ratio.median for _, ratio in rows],
    ]
    colors = [COLORS.get(name, OTHER) for name, _ in rows]
    axis.barh(places, medians, xerr=whiskers, color=colors, error_kw={"elinewidth": 1, "capsize": 2})
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle="--")
    axis.set_yticks(places, [name.replace("hand-written ", "") for name, _ in rows], fontsize=8)
    axis.invert_yaxis()
    right = max([1.15, *(ratio.q75 for _, ratio in rows)])
    axis.set_xlim(0, right * 1.18)
    for place, (_, ratio) in zip(places, rows, strict=True):
        axis.text(ratio.q75 + 0.015 * right, place, f"{ratio.median:.2f}", va="center", fontsize=8, bbox=LABEL)
    clip = ", clipped" if result.clip else ""
    axis.set_title(f"{result.work.replace('_', ' ')}, {result.precision}{clip}", fontsize=10)
    axis.tick_params(axis="x", labelsize=8)
