"""One self-contained HTML file that shows runs, with charts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError, cut, readable, show_name
from . import mesh_picture, tables
from .run import Run, Series, read_runs
from .tables import number

_MARK = '<meta name="generator" content="halfmesh report'
"""The beginning of a report; a file that begins with it may be replaced."""
_EMBEDDED = ("page.css", "page.js", "uplot/uPlot.min.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE")


def write_report(*runs: str | Path, out: str | Path = "report.html", replace: bool = False) -> Path:
    """Write one page about `runs` (folders of RunFolder or the hook "run") to `out`.

    An existing report is replaced; any other file only with `replace`.

    Raises:
        InputError: one of `runs` is not the folder of a run, or `out` cannot be written: its folder must exist.
    """
    target, shown = Path(out), show_name(str(out))
    if not target.absolute().parent.is_dir():
        raise InputError(f"{shown} cannot be written: there is no folder {show_name(str(target.absolute().parent))}")
    try:
        if not replace and target.exists() and _MARK not in target.read_text("utf-8", "replace")[:1000]:
            raise InputError(f"{shown} exists and is not a report; give another name, or --force (replace=True)")
        page = make_page(read_runs([Path(run) for run in runs]))
        target.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise InputError(f"{shown} cannot be written ({cut(str(error))}); give another file") from error
    return target


def make_page(runs: Sequence[Run]) -> str:
    """The page, as text."""
    charts, absent = make_charts(runs)
    files = resources.files(__package__)
    return str(
        mesh_picture.load_template("page.html").render(
            runs=runs,
            several=len(runs) > 1,
            version=__version__,
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            files={name: files.joinpath(name).read_text("utf-8") for name in _EMBEDDED},
            charts=charts,
            data={chart.key: chart.data() for chart in charts},
            absent=absent,
            meshes=[draw_mesh(run) for run in runs],
            tables=tables,
            compress=mesh_picture.compress,
        )
    )


def draw_mesh(run: Run) -> str | None:
    """The picture of the mesh, if plan.json has the ranks."""
    values = run.plan.get("values", {})
    ranks = values.get("ranks")
    if not ranks:
        return None

    def describe(rank: int) -> list[str]:
        return [", ".join(ranks[rank]["holds"]), ranks[rank]["part"], readable(ranks[rank]["bytes"])]

    return mesh_picture.draw(values["mesh"], describe)


def as_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The contents of the page as plain values, for JSON, with all points of the charts."""
    everything = [asdict(run) | {"path": str(run.path), "written": run.written and str(run.written)} for run in runs]
    return {"runs": everything, "differences": dict(tables.differences(runs))}


# -- charts ---------------------------------------------------------------------------------------------------------

_BUCKETS = 600


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
    ChartSpec("loss_scale", "Loss scale", {"loss_scale": "loss scale"}, "only runs in fp16 scale the loss"),
    ChartSpec(
        "grad_norm",
        "Gradient norm",
        {"grad_norm": "gradient norm"},
        "measured in fp16, or with clip_grad_norm or track_grad_norm",
    ),
    ChartSpec("throughput", "Throughput (samples/s)", {"samples_per_s": "samples/s"}, 'the hook "throughput"'),
    ChartSpec("memory", "Memory (MiB)", {"memory_mib": "measured"}, 'the hook "memory"'),
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

    def data(self) -> dict[str, Any]:
        """The data for the script that draws it."""
        thin = thinned(self.series)
        return {"label": self.label, "colour": self.colour, "kind": self.kind, "x": thin.step, "y": thin.value}


@dataclass
class Chart:
    """Lines in one chart. `log` is the base of a logarithmic y axis, 0 for a linear one."""

    key: str
    title: str
    lines: list[Line]
    log: int
    last_step: int

    def data(self) -> dict[str, Any]:
        """The data for the script that draws it."""
        lines, from_zero = [line.data() for line in self.lines], self.key in ("lr", "throughput", "memory")
        return {"title": self.title, "log": self.log, "zero": from_zero, "last": self.last_step, "lines": lines}


def make_charts(runs: Sequence[Run]) -> tuple[list[Chart], list[ChartSpec]]:
    """The charts (with one for each other name in the records), and the wanted ones without data."""
    known = {name for wanted in WANTED for name in wanted.names}
    others = dict.fromkeys(name for run in runs for name in run.series if name not in known)
    charts, absent = [], []
    for wanted in (
        *WANTED,
        *(ChartSpec(f"other-{n}", in_words(name), {name: name}, "") for n, name in enumerate(others)),
    ):
        if lines := [line for n, run in enumerate(runs) for line in _lines(run, n, wanted.names, len(runs) > 1)]:
            charts.append(_chart(wanted, lines, runs))
        elif wanted.how:
            absent.append(wanted)
    return charts, absent


_WORDS = {
    "model_flops_per_s": "Model FLOP/s",
    "mfu": "Model FLOPs utilization",
    "tokens_per_s": "Throughput (tokens/s)",
}


def in_words(name: str) -> str:
    """The title of a recorded value: "Eval accuracy" for "eval_accuracy"."""
    words = name.replace("_", " ").replace(" per s", "/s")
    return _WORDS.get(name, words[:1].upper() + words[1:])


def thinned(series: Series) -> Series:
    """At most `_BUCKETS` buckets, each reduced to its smallest and largest value (or a gap), plus both ends."""
    count, values = len(series.step), series.value
    if count <= 2 * _BUCKETS:
        return series
    kept = {0, count - 1}
    size = -(-count // _BUCKETS)
    for begin in range(0, count, size):
        bucket = range(begin, min(begin + size, count))
        found = [(value, index) for index in bucket if (value := values[index]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return Series([series.step[index] for index in sorted(kept)], [values[index] for index in sorted(kept)])


def _lines(run: Run, index: int, names: dict[str, str], several: bool) -> list[Line]:
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
        colour = index if several else int(is_eval and len(names) > 1)
        lines.append(Line(" ".join(words), series, colour, "dots" if is_eval else "line"))
    return lines


def _chart(spec: ChartSpec, lines: list[Line], runs: Sequence[Run]) -> Chart:
    """A chart with its axes, and the lines that are not in the records: skipped updates, and the planned memory."""
    last_step = max(1, *(max([run.last_step, *run.skipped[-1:]]) for run in runs))
    values = [value for line in lines for value in line.series.numbers]
    least, names = min(values), [f"{run.name} " if len(runs) > 1 else "" for run in runs]
    log = 0
    if spec.key == "grad_norm" and least > 0 and max(values) > 50 * least:
        log = 10
    elif spec.key == "loss_scale" and least > 0:
        log, floor = 2, 2.0 ** math.floor(math.log2(least))
        for index, run in enumerate(runs):
            if run.skipped:
                floor /= 2
                marks = Series(run.skipped, [floor] * len(run.skipped))
                lines.append(Line(f"{names[index]}skipped updates", marks, index if len(runs) > 1 else -1, "skips"))
    elif spec.key == "memory":
        for index, run in enumerate(runs):
            if sizes := [rank["bytes"] / 2**20 for rank in run.plan.get("values", {}).get("ranks", ())]:
                level = Series([0, last_step], [max(sizes)] * 2)
                lines.append(Line(f"{names[index]}planned, without activations", level, index, "plan"))
    return Chart(spec.key, spec.title, lines, log, last_step)
