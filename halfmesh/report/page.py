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
    files = resources.files(__package__)
    return str(
        mesh_picture.load_template("page.html").render(
            runs=runs,
            several=len(runs) > 1,
            version=__version__,
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            files={name: files.joinpath(name).read_text("utf-8") for name in _EMBEDDED},
            charts=make_charts(runs),
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
CHARTS = {
    "loss": ("Loss", {"loss": "train", "eval_loss": "eval"}),
    "lr": ("Learning rate", {"lr": "learning rate"}),
    "loss_scale": ("Loss scale", {"loss_scale": "loss scale"}),
    "grad_norm": ("Gradient norm", {"grad_norm": "gradient norm"}),
    "throughput": ("Throughput (samples/s)", {"samples_per_s": "samples/s"}),
    "memory": ("Memory (MiB)", {"memory_mib": "memory"}),
}
"""The first charts: title, and names in the records with their labels."""


@dataclass
class Line:
    """A line of a chart. `colour` is an index into the page's colours; `kind` is line, dots or skips."""

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


def make_charts(runs: Sequence[Run]) -> dict[str, dict[str, Any]]:
    """The data of the charts, with one for each other name in the records, for the script that draws them."""
    known = {name for _, names in CHARTS.values() for name in names}
    others = dict.fromkeys(name for run in runs for name in run.series if name not in known)
    charts = CHARTS | {f"other-{n}": (in_words(name), {name: name}) for n, name in enumerate(others)}
    last_step = max(1, *(max([run.last_step, *run.skipped[-1:]]) for run in runs))
    found = {}
    for key, (title, names) in charts.items():
        if lines := [line for n, run in enumerate(runs) for line in _lines(run, n, names, len(runs) > 1)]:
            rows, log = [line.row() for line in lines], _logarithm(key, lines)
            lines += _skips(runs, lines) if key == "loss_scale" and log else []
            found[key] = {"title": title, "log": log, "zero": key in ("lr", "throughput", "memory"), "last": last_step}
            found[key] |= {"rows": rows, "lines": [line.data() for line in lines]}
    return found


def in_words(name: str) -> str:
    """The title of a recorded value: "Eval accuracy" for "eval_accuracy"."""
    words = name.replace("_", " ").replace(" per s", "/s")
    return words[:1].upper() + words[1:]


def thinned(series: Series) -> Series:
    """At most `_BUCKETS` buckets, each reduced to its smallest and largest value (or a gap), plus both ends."""
    count, values = len(series.step), series.value
    if count <= 2 * _BUCKETS:
        return series
    kept = {0, count - 1}
    for begin in range(0, count, count // _BUCKETS):
        bucket = range(begin, min(begin + count // _BUCKETS, count))
        found = [(value, index) for index in bucket if (value := values[index]) is not None]
        kept |= {min(found)[1], max(found)[1]} if found else {begin}
    return Series([series.step[index] for index in sorted(kept)], [values[index] for index in sorted(kept)])


def _lines(run: Run, index: int, names: dict[str, str], several: bool) -> list[Line]:
    lines = []
    for name, label in names.items():
        series = run.series.get(name)
        if series is None or not series.numbers:
            continue
        words = [run.name] if several else []
        words += [label] if len(names) > 1 or not words else []
        is_eval = name.startswith("eval_")
        colour = index if several else int(is_eval and len(names) > 1)
        lines.append(Line(" ".join(words), series, colour, "dots" if is_eval else "line"))
    return lines


def _logarithm(key: str, lines: list[Line]) -> int:
    """The base of the logarithmic y axis, 0 for a linear one."""
    values = [value for line in lines for value in line.series.numbers]
    if key == "grad_norm" and min(values) > 0 and max(values) > 50 * min(values):
        return 10
    return 2 if key == "loss_scale" and min(values) > 0 else 0


def _skips(runs: Sequence[Run], lines: list[Line]) -> list[Line]:
    """Marks of the skipped updates, below the lines."""
    floor = 2.0 ** math.floor(math.log2(min(value for line in lines for value in line.series.numbers)))
    found = []
    for index, run in enumerate(runs):
        if run.skipped:
            floor /= 2
            name, colour = (f"{run.name} ", index) if len(runs) > 1 else ("", -1)
            marks = Series(run.skipped, [floor] * len(run.skipped))
            found.append(Line(f"{name}skipped updates", marks, colour, "skips"))
    return found
