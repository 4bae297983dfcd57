"""Which charts a report has, and what is in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .axes import in_bytes
from .chart import ALARM, Chart, Level, Line, Marks
from .run import Run, Series
from .thinning import find_ranges, thin

_POINTS = 20_000
"""Of all lines together, at most about; so that a page stays small."""
_MOST_BUCKETS = 400
_MOST_OTHERS = 24
_GIB = 2**10


@dataclass(frozen=True)
class Wanted:
    """A chart that every report has, or says how to get.

    Attributes:
        names: of records, with the label of each.
        how: to have it recorded.
    """

    key: str
    title: str
    names: dict[str, str]
    how: str


WANTED = (
    Wanted(
        "loss",
        "Loss",
        {"loss": "train", "eval_loss": "eval"},
        "the Trainer records the loss; in a loop of your own, run.record(loss=loss)",
    ),
    Wanted("lr", "Learning rate", {"lr": "learning rate"}, "the Trainer records it; in your loop, call run.note"),
    Wanted(
        "loss_scale",
        "Loss scale",
        {"loss_scale": "loss scale"},
        "the loss is scaled in fp16 only",
    ),
    Wanted(
        "grad_norm",
        "Gradient norm",
        {"grad_norm": "gradient norm"},
        "it is measured with fp16, with clip_grad_norm, or with track_grad_norm=True in the config",
    ),
    Wanted(
        "throughput",
        "Throughput, samples/s",
        {"samples_per_s": "samples/s"},
        'give fit the hook "throughput"; in your loop, run.record(samples_per_s=...)',
    ),
    Wanted(
        "memory",
        "Memory",
        {"memory_mib": "measured"},
        'give fit the hook "memory"; in your loop, run.record(memory_mib=...)',
    ),
)


def make_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Wanted], list[str]]:
    """The charts, those that nothing was recorded for, and names that have no room."""
    known = {name for wanted in WANTED for name in wanted.names}
    others = list(dict.fromkeys(name for run in runs for name in run.series if name not in known))
    count = sum(len(run.series) for run in runs)
    buckets = max(20, min(_MOST_BUCKETS, _POINTS // max(1, 2 * count)))
    charts, absent = [], []
    for wanted in WANTED:
        chart = _chart(runs, wanted.key, wanted.title, wanted.names, buckets)
        if chart is None:
            absent.append(wanted)
        else:
            charts.append(_SPECIAL.get(wanted.key, _as_it_is)(chart, runs))
    for number, name in enumerate(others[:_MOST_OTHERS]):
        chart = _chart(runs, f"other-{number}", name, {name: name}, buckets)
        if chart is not None:
            charts.append(chart)
    _add_skips(charts, runs)
    return charts, absent, others[_MOST_OTHERS:]


def _chart(runs: Sequence[Run], key: str, title: str, names: dict[str, str], buckets: int) -> Chart | None:
    lines = []
    for number, run in enumerate(runs):
        for name, label in names.items():
            series = run.series.get(name)
            if series is None or series.last is None or (name == "loss_scale" and not _is_scaled(run)):
                continue
            is_eval = name.startswith("eval_")
            style = number if len(runs) > 1 else int(is_eval and len(names) > 1)
            words = [run.name] if len(runs) > 1 else []
            words += [label] if len(names) > 1 or not words else []
            lines.append(Line(" ".join(words), thin(series, buckets), style, is_eval))
    return Chart(key, title, lines, max(run.last_step for run in runs)) if lines else None


def _scale_chart(chart: Chart, runs: Sequence[Run]) -> Chart:
    chart.base = 2
    return chart


def _norm_chart(chart: Chart, runs: Sequence[Run]) -> Chart:
    values = chart.values()
    if min(values) > 0 and max(values) > 50 * min(values):
        chart.base = 10
    return chart


def _zero_chart(chart: Chart, runs: Sequence[Run]) -> Chart:
    chart.from_zero = True
    return chart


def _memory_chart(chart: Chart, runs: Sequence[Run]) -> Chart:
    planned = [planned_mib(run) for run in runs]
    highest = max([*chart.values(), *filter(None, planned)])
    unit, size = ("GiB", _GIB) if highest >= 4 * _GIB else ("MiB", 1)
    lines = [
        Line(line.label, Series(line.series.steps, [v and v / size for v in line.series.values]), line.style)
        for line in chart.lines
    ]
    levels = [
        Level(
            f"{f'{run.name} ' if len(runs) > 1 else ''}plan, without activations: {in_bytes(mib * 2**20)}",
            mib / size,
            number,
        )
        for number, (run, mib) in enumerate(zip(runs, planned, strict=True))
        if mib is not None
    ]
    return Chart(chart.key, f"Memory, {unit}", lines, chart.last_step, levels=levels, from_zero=True)


def _is_scaled(run: Run) -> bool:
    """Whether the loss is, as far as it is known; a Trainer records 1 where it is not."""
    return _plan_values(run).get("loss_scale", "unknown") is not None


def _plan_values(run: Run) -> dict[str, Any]:
    values = run.plan.get("values")
    return values if isinstance(values, dict) else {}


def planned_mib(run: Run) -> float | None:
    """What the plan says of the rank that holds most, besides activations."""
    ranks = _plan_values(run).get("ranks")
    sizes: list[Any] = (
        [rank.get("bytes") for rank in ranks if isinstance(rank, dict)] if isinstance(ranks, list) else []
    )
    sizes = [size for size in sizes if isinstance(size, int) and not isinstance(size, bool) and 0 < size < 2**60]
    return max(sizes) / 2**20 if sizes else None


def _as_it_is(chart: Chart, runs: Sequence[Run]) -> Chart:
    return chart


_SPECIAL: dict[str, Callable[[Chart, Sequence[Run]], Chart]] = {
    "lr": _zero_chart,
    "loss_scale": _scale_chart,
    "grad_norm": _norm_chart,
    "throughput": _zero_chart,
    "memory": _memory_chart,
}


def _add_skips(charts: Sequence[Chart], runs: Sequence[Run]) -> None:
    """Into the chart of the loss scale; where there is none, into that of the loss."""
    target = next((chart for key in ("loss_scale", "loss") for chart in charts if chart.key == key), None)
    if target is None:
        return
    for number, run in enumerate(runs):
        if run.skipped:
            label = f"{f'{run.name} ' if len(runs) > 1 else ''}skipped updates"
            target.marks.append(Marks(label, find_ranges(run.skipped), f"s{number}" if len(runs) > 1 else ALARM))
            target.last_step = max(target.last_step, run.skipped[-1])
