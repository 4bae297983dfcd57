"""The mesh as SVG: which rank holds what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .axes import CHARACTER, in_bytes
from .markup import Html, join, tag

_MOST = 8
"""Rows and columns that are drawn; of more the first ones and the last."""
_WIDTH, _HEIGHT, _GAP, _DOTS = 150, 78, 10, 34
_LEFT, _TOP = 46, 26


@dataclass(frozen=True)
class Place:
    """A rank."""

    rank: int
    holds: str
    part: str
    size: str


def draw_mesh(plan: dict[str, Any]) -> Html | None:
    """The picture of a plan as RunFolder has written it; None if it does not say enough."""
    values = plan.get("values")
    values = values if isinstance(values, dict) else {}
    mesh, given = values.get("mesh"), values.get("ranks")
    if not isinstance(mesh, dict) or not isinstance(given, list):
        return None
    sizes = [mesh.get(axis) for axis in ("pp", "dp", "tp")]
    if not all(isinstance(size, int) and 0 < size < 10**7 for size in sizes):
        return None
    pp, dp, tp = (int(size) for size in sizes if size)
    places = [_place(rank, item) for rank, item in enumerate(given)]
    if len(places) != pp * dp * tp:
        return None
    return _draw(places, pp, dp, tp)


def _place(rank: int, item: Any) -> Place:
    item = item if isinstance(item, dict) else {}
    holds = item.get("holds")
    size = item.get("bytes")
    return Place(
        rank,
        ", ".join(map(str, holds)) if isinstance(holds, list) else "",
        str(item.get("part") or ""),
        in_bytes(size) if isinstance(size, (int, float)) else "",
    )


def _draw(places: Sequence[Place], pp: int, dp: int, tp: int) -> Html:
    columns = [(data, tensor) for data in range(dp) for tensor in range(tp)]
    rows, chosen = _pick(pp), _pick(len(columns))
    xs, right = _spans(chosen, _WIDTH, _LEFT)
    ys, bottom = _spans(rows, _HEIGHT, _TOP)
    parts = []
    for column, x in zip(chosen, xs, strict=True):
        if column is not None:
            data, tensor = columns[column]
            name = f"dp {data}, tp {tensor}" if tp > 1 else f"dp {data}"
            parts.append(tag("text", name, class_="head", x=x + _WIDTH / 2, y=_TOP - 9, text_anchor="middle"))
    for row, y in zip(rows, ys, strict=True):
        if row is not None:
            parts.append(tag("text", f"pp {row}", class_="head", x=4, y=y + _HEIGHT / 2 + 4))
        for column, x in zip(chosen, xs, strict=True):
            parts.append(_cell(places, row, column, len(columns), x, y))
    return tag(
        "svg",
        tag("title", f"The mesh: pp {pp} x dp {dp} x tp {tp}", id="mesh-title"),
        tag("desc", "A row for each stage of the pipeline, a column for each data and tensor rank", id="mesh-desc"),
        parts,
        class_="mesh",
        viewBox=f"0 0 {right} {bottom}",
        width=right,
        height=bottom,
        role="img",
        aria_labelledby="mesh-title mesh-desc",
    )


def _cell(places: Sequence[Place], row: int | None, column: int | None, width: int, x: float, y: float) -> Html:
    if row is None or column is None:
        w, h = (_DOTS if column is None else _WIDTH), (_DOTS if row is None else _HEIGHT)
        return tag("text", "...", class_="head", x=x + w / 2, y=y + h / 2, text_anchor="middle")
    place = places[row * width + column]
    lines = [(f"rank {place.rank}", "name")] + [(text, "") for text in (place.holds, place.part, place.size) if text]
    words = [
        tag("text", _fit(text), class_=kind or None, x=x + 9, y=y + 18 + 17 * number)
        for number, (text, kind) in enumerate(lines)
    ]
    whole = tag("title", " - ".join(text for text, _ in lines))
    return tag("g", whole, tag("rect", x=x, y=y, width=_WIDTH, height=_HEIGHT, rx=6), join(words))


def _fit(text: str) -> str:
    most = int((_WIDTH - 14) / CHARACTER)
    return text if len(text) <= most else f"{text[: most - 2]} …"


def _pick(count: int) -> list[int | None]:
    """Which of so many are drawn; None for those that are left out."""
    return list(range(count)) if count <= _MOST else [*range(_MOST - 2), None, count - 1]


def _spans(chosen: Sequence[int | None], size: int, begin: int) -> tuple[list[int], int]:
    """Where each begins, and where the last ends."""
    begins = []
    for item in chosen:
        begins.append(begin)
        begin += (_DOTS if item is None else size) + _GAP
    return begins, begin - _GAP + 2
