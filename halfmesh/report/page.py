"""One HTML file that shows runs, and needs nothing else."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from ..errors import InputError, cut, show_name
from ..version import __version__
from . import sections
from .chart import colours
from .charts import WANTED, make_charts
from .compare import set_keys
from .facts import make_plain
from .markup import Html, join, tag
from .run import Run, read_runs

MARK = "halfmesh report"
"""Of the page's generator: a file that has it may be written anew."""


def write_report(*runs: str | Path, out: str | Path = "report.html", replace: bool = False) -> Path:
    """Write one page about `runs`, folders of RunFolder or the hook "run", into `out`.

    A report that is there is written anew; another file only with `replace`.

    Raises:
        InputError: one of `runs` is no run's folder, or `out` cannot be written.
    """
    target = Path(out)
    refuse_target(target, replace)
    page = make_page(read_runs([Path(run) for run in runs]))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{show_name(str(target))} cannot be written ({cut(str(error))}); give another file"
        ) from error
    return target


def refuse_target(path: Path, replace: bool) -> None:
    """Raise InputError if `path` holds something else than a report."""
    shown = show_name(str(path))
    if path.is_dir():
        raise InputError(f"{shown} is a folder; name a file in it, {path / 'report.html'}")
    if not path.exists() or replace:
        return
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            begin = file.read(2000)
    except OSError as error:
        raise InputError(f"{shown} cannot be read ({cut(str(error))}); give another file") from error
    if begin and f'name="generator" content="{MARK}' not in begin:
        raise InputError(f"{shown} is there, and is no report; give another name, or ask for it to be replaced")


def make_page(runs: Sequence[Run]) -> str:
    """The page, as text."""
    charts, absent, left_out = make_charts(runs)
    drawn = {chart.key: sections.chart(chart) for chart in charts}
    drawn |= {wanted.key: sections.absent(wanted) for wanted in absent}
    order = [wanted.key for wanted in WANTED] + [chart.key for chart in charts if chart.key.startswith("other-")]
    rest = f"Not drawn, for want of room: {', '.join(left_out)}" if left_out else None
    body = tag(
        "main",
        sections.header(runs),
        sections.differences(runs),
        sections.warnings(runs),
        sections.notes(runs),
        sections.summary(runs),
        sections.plan(runs),
        [drawn[key] for key in order],
        tag("p", rest, class_="wide absent") if rest else None,
        sections.skips(runs),
        sections.mesh(runs),
        sections.precision(runs),
        sections.config(runs),
        tag("footer", f"Written by halfmesh {__version__}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    )
    return _whole(runs, body, {chart.key: chart.data() for chart in charts})


def as_data(runs: Sequence[Run]) -> dict[str, Any]:
    """The same as plain values, for JSON; nothing is thinned."""
    return {
        "runs": [
            {
                "name": run.name,
                "path": str(run.path),
                "sessions": make_plain(run.sessions),
                "plans": make_plain(run.plans),
                "last_step": run.last_step,
                "skipped": run.skipped,
                "skipped_steps": run.skipped_count,
                "series": {name: {"step": s.steps, "value": s.values} for name, s in run.series.items()},
                "warnings": run.warnings,
                "precision": make_plain(run.precision) or None,
                "notes": run.notes,
            }
            for run in runs
        ],
        "differences": {row.key: list(row.values) for row in set_keys(runs) if row.differs},
    }


def _whole(runs: Sequence[Run], body: Html, data: dict[str, Any]) -> str:
    style, script = (resources.files(__package__).joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        # Nothing is loaded, and no other script runs, whatever stands in a run's folder.
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:",
        ),
        tag("meta", name="generator", content=f"{MARK} {__version__}"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("link", rel="icon", href="data:,"),
        tag("title", f"{', '.join(run.name for run in runs)} - halfmesh report"),
        tag("style", Html(style + colours(len(runs)))),
    )
    # "<" would end the element; in JSON it only stands in strings.
    values = Html(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
    scripts = join(tag("script", values, type="application/json", id="data"), tag("script", Html(script)))
    return f"<!doctype html>\n{tag('html', head, tag('body', body, scripts), lang='en')}\n"
