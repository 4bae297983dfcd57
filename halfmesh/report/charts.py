"""The charts of a report, and their lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .run import Run, Series
from .tables import number

_BUCKETS = 600
_GIB = 2**10  # of memory_mib


@dataclass(frozen=True)
class ChartSpec:
    """A chart that every report has, or explains how to get: names in the records with their labels."""

    key: str
    title: str
    names: dict[str, str]
    how: str


WANTED = (
    ChartSpec("loss", "Loss", {"loss": "train", "eval_loss": "eval"}, "run.record(loss=loss)"),
    ChartSpec("lr", "Learning rate", {"lr": "learning rate"}, "run.note(engine.step())"),
    ChartSpec("loss_scale", "Loss scale", {"loss_scale": "loss scale"}, "only fp16 scales the loss"),
    ChartSpec(
        "grad_norm",
        "Gradient norm",
        {"grad_norm": "gradient norm"},
        "measured with fp16, clip_grad_norm, or track_grad_norm=True in the config",
    ),
    ChartSpec(
        "throughput",
        "Throughput (samples/s)",
        {"samples_per_s": "samples/s"},
        'the hook "throughput", or run.record(samples_per_s=...)',
    ),
    ChartSpec("memory", "Memory ({})", {"memory_mib": "measured"}, 'the hook "memory", or run.record(memory_mib=...)'),
)


@dataclass
class Line:
    """A line of a chart. `colour` is an index into the page's colours; `kind` is line, dots, plan or skips."""

    label: str
    series: Series
    colour: int
    kind: str = "line"

    def row(self) -> list[str]:
        """For the table: label, first and last value, lowest and highest."""
        values = self.series.numbers
        return [self.label, *map(number, (values[0], values[-1], min(values), max(values)))]


@dataclass
class Chart:
    """Lines in one chart. `log` is the base of a logarithmic y axis, 0 for a linear one."""

    key: str
    title: str
    lines: list[Line]
    log: int = 0
    from_zero: bool = False
    last_step: int = 1

    def data(self) -> dict[str, Any]:
        """The data for the script that draws it."""
        lines = []
        for line in self.lines:
            thin = thinned(line.series)
            line_data = {"label": line.label, "colour": line.colour, "kind": line.kind}
            lines.append(line_data | {"x": thin.steps, "y": thin.values})
        return {"title": self.title, "log": self.log, "zero": self.from_zero, "last": self.last_step, "lines": lines}


def make_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[ChartSpec]]:
    """The charts (with one for each other name in the records), and the wanted ones without data."""
    known = {name for wanted in WANTED for name in wanted.names}
    others = dict.fromkeys(name for run in runs for name in run.series if name not in known)
    charts, absent = [], []
    for wanted in (*WANTED, *(ChartSpec(f"other-{n}", name, {name: name}, "") for n, name in enumerate(others))):
        lines = [line for n, run in enumerate(runs) for line in _lines(run, n, wanted.names, len(runs) > 1)]
        if lines:
            charts.append(_finish(Chart(wanted.key, wanted.title, lines), runs))
        elif wanted.how:
            absent.append(wanted)
    return charts, absent


def thinned(series: Series) -> Series:
    """At most `_BUCKETS` buckets, each reduced to its smallest and largest value (or a gap), plus both ends."""
    count, values = len(series.steps), series.values
    if count <= 2 * _BUCKETS:
        return series
    kept = {0, count - 1}
    for begin in range(0, count, count // _BUCKETS):
        part = range(begin, min(begin + count // _BUCKETS, count))
        found = [(value, place) for place in part if (value := values[place]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return Series([series.steps[place] for place in sorted(kept)], [values[place] for place in sorted(kept)])


def planned_mib(run: Run) -> float | None:
    """The most memory that a rank needs besides activations, in MiB."""
    sizes = [rank["bytes"] for rank in run.plan.get("values", {}).get("ranks", ())]
    return max(sizes) / 2**20 if sizes else None


def _lines(run: Run, place: int, names: dict[str, str], several: bool) -> list[Line]:
    # A Trainer records a loss scale of 1 if there is none.
    unscaled = run.plan.get("values", {}).get("loss_scale", "unknown") is None
    lines = []
    for name, label in names.items():
        series = run.series.get(name)
        if series is None or not series.numbers or (name == "loss_scale" and unscaled):
            continue
        words = [run.name] if several else []
        words += [label] if len(names) > 1 or not words else []
        is_eval = name.startswith("eval_")
        colour = place if several else int(is_eval and len(names) > 1)
        lines.append(Line(" ".join(words), series, colour, "dots" if is_eval else "line"))
    return lines


def _finish(chart: Chart, runs: Sequence[Run]) -> Chart:
    """Set the axes, and add the lines that are not in the records."""
    chart.last_step = max(1, *(max([run.last_step, *run.skipped[-1:]]) for run in runs))
    values = [value for line in chart.lines for value in line.series.numbers]
    chart.from_zero = chart.key in ("lr", "throughput", "memory")
    names = [f"{run.name} " if len(runs) > 1 else "" for run in runs]
    if chart.key == "grad_norm" and min(values) > 0 and max(values) > 50 * min(values):
        chart.log = 10
    elif chart.key == "loss_scale" and min(values) > 0:
        chart.log = 2
        floor = 2.0 ** math.floor(math.log2(min(values)))
        for place, run in enumerate(runs):
            if run.skipped:
                floor /= 2
                marks = Series(run.skipped, [floor] * len(run.skipped))
                colour = place if len(runs) > 1 else -1
                chart.lines.append(Line(f"{names[place]}skipped updates", marks, colour, "skips"))
    elif chart.key == "memory":
        planned = [planned_mib(run) for run in runs]
        unit, size = ("GiB", _GIB) if max([*values, *filter(None, planned)]) >= 4 * _GIB else ("MiB", 1)
        chart.title = chart.title.format(unit)
        for line in chart.lines:
            line.series = Series(line.series.steps, [value and value / size for value in line.series.values])
        for place, mib in enumerate(planned):
            if mib is not None:
                level = Series([0, chart.last_step], [mib / size] * 2)
                chart.lines.append(Line(f"{names[place]}plan, without activations", level, place, "plan"))
    return chart
