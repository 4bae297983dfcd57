"""One self-contained HTML file that shows runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from .. import __version__
from ..errors import InputError, cut, readable, show_name
from . import mesh_picture, tables
from .charts import make_charts
from .run import Run, read_runs

_MARK = '<meta name="generator" content="halfmesh report'
"""The beginning of a report; a file that begins with it may be replaced."""
_EMBEDDED = ("page.css", "page.js", "uplot/uPlot.min.css", "uplot/uPlot.iife.min.js", "uplot/LICENSE")


def write_report(*runs: str | Path, out: str | Path = "report.html", replace: bool = False) -> Path:
    """Write one page about `runs` (folders of RunFolder or the hook "run") to `out`.

    An existing report is replaced; any other file only with `replace`.

    Raises:
        InputError: one of `runs` is not the folder of a run, or `out` cannot be written.
    """
    target, shown = Path(out), show_name(str(out))
    try:
        if not replace and target.exists() and _MARK not in target.read_text("utf-8", "replace")[:1000]:
            raise InputError(f"{shown} exists and is not a report; give another name, or --force (replace=True)")
        page = make_page(read_runs([Path(run) for run in runs]))
        target.parent.mkdir(parents=True, exist_ok=True)
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
