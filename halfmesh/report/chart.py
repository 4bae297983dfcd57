"""A chart as SVG: lines by the number of updates, with gaps, marks of skipped updates, and a plan's value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .axes import CHARACTER, Axis, make_axis, readable
from .markup import Html, join, tag
from .run import Series

_DASHES = ("", "8 4", "3 4", "12 4 2 4", "5 5", "16 5")
"""Of lines; the first colours are in page.css, those of more runs are made here."""
ALARM = "alarm"
"""The style of what belongs to no line."""
_STRIP, _ABOVE = 14, 10
"""The height of a run's skipped updates, and of what is left free above them, px."""
_MOST_SHAPES = 120
"""Marks and dots that are drawn as such; of more there are strokes only."""


@dataclass(frozen=True)
class Size:
    """Of a drawing, px. Text has the same size in all of them."""

    name: str
    width: int
    height: int
    ticks: int
    """Of the y axis, at most about."""


SIZES = (Size("wide", 600, 250, 5), Size("narrow", 320, 230, 4))


@dataclass(frozen=True)
class Line:
    """A line: `style` is its colour; `dotted` ones have a dot at each value."""

    label: str
    series: Series
    style: int = 0
    dotted: bool = False


@dataclass(frozen=True)
class Marks:
    """Skipped updates of a run, in ranges with both ends."""

    label: str
    ranges: list[tuple[int, int]]
    style: str = ALARM


@dataclass(frozen=True)
class Level:
    """A horizontal line: what was planned."""

    label: str
    value: float
    style: int = 0


@dataclass
class Chart:
    """What is drawn together.

    Attributes:
        key: its name in the page.
        title: above it, with the unit.
        base: of a logarithmic axis.
        from_zero: the axis begins at 0.
        last_step: where the x axis ends.
    """

    key: str
    title: str
    lines: list[Line]
    last_step: int
    marks: list[Marks] = field(default_factory=list)
    levels: list[Level] = field(default_factory=list)
    base: int | None = None
    from_zero: bool = False

    def values(self) -> list[float]:
        """All that the y axis has to hold."""
        found = [value for line in self.lines for value in line.series.values if value is not None]
        found += [level.value for level in self.levels]
        return [*found, 0.0] if self.from_zero else found

    def describe(self) -> str:
        """In words, for who cannot see it."""
        said = []
        for line in self.lines:
            values = [value for value in line.series.values if value is not None]
            if values:
                said.append(
                    f"{line.label}: from {readable(values[0])} to {readable(values[-1])}, lowest "
                    f"{readable(min(values))}, highest {readable(max(values))}"
                )
        said += [level.label for level in self.levels]
        for marks in self.marks:
            count = sum(last - first + 1 for first, last in marks.ranges)
            said.append(f"{marks.label}: {count} skipped updates")
        return "; ".join(said)

    def data(self) -> dict[str, Any]:
        """What is shown where the pointer is."""
        return {
            "lines": [
                {"label": line.label, "style": line.style, "x": line.series.steps, "y": _rounded(line.series.values)}
                for line in self.lines
            ],
            "skips": [{"label": m.label, "ranges": m.ranges} for m in self.marks if len(m.ranges) <= 5000],
        }


def draw(chart: Chart, size: Size) -> Html:
    """The chart's SVG, of one size."""
    y_axis = make_axis(chart.values(), size.ticks, chart.base)
    left = max(y_axis.label_width, len("skipped") * CHARACTER if chart.marks else 0.0) + 12
    right, top = size.width - 16, 10
    strip = _STRIP * len(chart.marks) + _ABOVE if chart.marks else 0
    bottom = size.height - 42 - strip
    wanted = max(2, int((right - left) / (9 * CHARACTER)))
    x_axis = make_axis([0, max(1, chart.last_step)], wanted, whole=True)
    frame = _Frame(left, right, top, bottom, x_axis, y_axis)
    base = f"{chart.key}-{size.name}"
    return tag(
        "svg",
        tag("title", f"{chart.title} by update", id=f"{base}-title"),
        tag("desc", chart.describe(), id=f"{base}-desc"),
        _grid(frame, strip),
        [_strip(frame, marks, row) for row, marks in enumerate(chart.marks)],
        [_level(frame, level) for level in chart.levels],
        [_line(frame, line) for line in chart.lines],
        tag("line", class_="cross", x1=0, x2=0, y1=top, y2=bottom + strip, visibility="hidden"),
        class_=f"chart {size.name}",
        viewBox=f"0 0 {size.width} {size.height}",
        role="img",
        aria_labelledby=f"{base}-title {base}-desc",
        tabindex="0",
        data_chart=chart.key,
        data_left=f"{left:.1f}",
        data_right=f"{right:.1f}",
        data_low=x_axis.low,
        data_high=x_axis.high,
    )


@dataclass(frozen=True)
class _Frame:
    """The plot area, px, and the axes along it."""

    left: float
    right: float
    top: float
    bottom: float
    x_axis: Axis
    y_axis: Axis

    def x(self, step: float) -> float:
        return self.left + self.x_axis.place(step) * (self.right - self.left)

    def y(self, value: float) -> float:
        """Values that a logarithmic axis cannot hold are at its end."""
        if self.y_axis.base is not None and value <= 0:
            return self.bottom
        share = min(1.0, max(0.0, self.y_axis.place(value)))
        return self.bottom - share * (self.bottom - self.top)


def _grid(frame: _Frame, strip: int) -> Html:
    lines, words = [], []
    for value, text in frame.y_axis.ticks:
        y = f"{frame.y(value):.1f}"
        lines.append(tag("line", class_="grid", x1=f"{frame.left:.1f}", x2=f"{frame.right:.1f}", y1=y, y2=y))
        words.append(tag("text", text, class_="y", x=f"{frame.left - 8:.1f}", y=f"{frame.y(value) + 4:.1f}"))
    floor = frame.bottom + strip
    for value, text in frame.x_axis.ticks:
        x = f"{frame.x(value):.1f}"
        lines.append(tag("line", class_="tick", x1=x, x2=x, y1=f"{floor:.1f}", y2=f"{floor + 4:.1f}"))
        words.append(tag("text", text, class_="x", x=x, y=f"{floor + 17:.1f}"))
    middle = (frame.left + frame.right) / 2
    words.append(tag("text", "update", class_="x name", x=f"{middle:.1f}", y=f"{floor + 34:.1f}"))
    ends = {"x1": f"{frame.left:.1f}", "x2": f"{frame.right:.1f}", "y1": f"{floor:.1f}", "y2": f"{floor:.1f}"}
    return join(lines, tag("line", class_="axis", **ends), words)


def _strip(frame: _Frame, marks: Marks, row: int) -> Html:
    top = frame.bottom + _ABOVE + row * _STRIP + 3
    parts = []
    shown = len(marks.ranges) <= _MOST_SHAPES
    seen: set[tuple[str, str]] = set()
    for first, last in marks.ranges:
        begin, end = f"{frame.x(first):.1f}", f"{frame.x(last):.1f}"
        if (begin, end) in seen:
            continue
        seen.add((begin, end))
        if shown and float(end) - float(begin) < 8:
            parts += [f"M{at} {top}l4 8h-8z" for at in dict.fromkeys([begin, end])]
        elif begin != end:
            parts.append(f"M{begin} {top}H{end}v8H{begin}z")
        else:
            parts.append(f"M{begin} {top}v8")
    path = tag("path", tag("title", f"{marks.label}: skipped updates"), class_=f"skip {marks.style}", d="".join(parts))
    word = tag("text", "skipped", class_="y", x=f"{frame.left - 8:.1f}", y=top + 8) if row == 0 else None
    return join(word, path)


def _level(frame: _Frame, level: Level) -> Html:
    y = f"{frame.y(level.value):.1f}"
    return tag("line", class_=f"level s{level.style}", x1=f"{frame.left:.1f}", x2=f"{frame.right:.1f}", y1=y, y2=y)


def _line(frame: _Frame, line: Line) -> Html:
    pieces: list[list[str]] = [[]]
    for step, value in zip(line.series.steps, line.series.values, strict=True):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{frame.x(step):.1f} {frame.y(value):.1f}")
    path = "".join(f"M{' '.join(piece)}" for piece in pieces if len(piece) > 1)
    alone = [piece[0] for piece in pieces if len(piece) == 1]
    points = [point for piece in pieces for point in piece]
    dots = points if line.dotted and len(points) <= _MOST_SHAPES else alone
    kind = f"s{line.style}{' eval' if line.dotted else ''}"
    return join(
        tag("path", class_=f"line {kind}", d=path) if path else None,
        [tag("circle", class_=f"dot {kind}", cx=x, cy=y, r=3) for x, y in (dot.split() for dot in dots)],
    )


def legend(chart: Chart) -> Html | None:
    """What its lines are; None where the title says it."""
    entries = [(line.label, f"line s{line.style}{' eval' if line.dotted else ''}") for line in chart.lines]
    entries += [(level.label, f"level s{level.style}") for level in chart.levels]
    if len(entries) < 2 and not chart.marks:
        return None
    items = [tag("li", sample(kind), text) for text, kind in entries]
    items += [tag("li", _triangle(marks.style), marks.label) for marks in chart.marks]
    return tag("ul", items, class_="legend")


def colours(count: int) -> str:
    """The style sheet's rules for so many runs; each has a colour of its own."""
    rules = []
    for style in range(max(2, count)):
        own = f"var(--c{style})" if style < len(_DASHES) else f"hsl({style * 137.5 % 360:.0f} 65% var(--light))"
        rules.append(f".s{style} {{ --c: {own}; }}")
        if dashes := _DASHES[style % len(_DASHES)]:
            rules.append(f".line.s{style} {{ stroke-dasharray: {dashes}; }}")
    return "\n".join(rules) + "\n"


def sample(kind: str) -> Html:
    """A piece of a line, as in a legend."""
    dot = tag("circle", class_=kind.replace("line", "dot"), cx=14, cy=6, r=3) if "eval" in kind else None
    stroke = tag("line", class_=kind, x1=1, x2=27, y1=6, y2=6)
    return tag("svg", stroke, dot, class_="sample", viewBox="0 0 28 12", aria_hidden="true")


def _triangle(style: str) -> Html:
    mark = tag("path", class_=f"skip {style}", d="M14 2l4 8h-8z")
    return tag("svg", mark, class_="sample", viewBox="0 0 28 12", aria_hidden="true")


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if value is None else float(f"{value:.5g}") for value in values]
