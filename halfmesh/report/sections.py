"""The sections of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from .axes import readable
from .chart import SIZES, Chart, draw, legend, sample
from .charts import Wanted
from .compare import all_keys, changes, set_keys
from .markup import Html, join, tag
from .mesh import draw_mesh
from .run import Run
from .summary import in_words, status_of, summarise
from .thinning import in_words as ranges_in_words

_MOST_LAYERS = 200
_MOST_WARNINGS = 100
_MOST_COLUMNS = 3
"""Runs side by side on a narrow screen; more of them scroll."""


def section(key: str, title: str, *content: Any, wide: bool = True) -> Html:
    """A part of the page with a heading."""
    head = tag("h2", title, id=f"{key}-head")
    return tag("section", head, *content, id=key, class_="card wide" if wide else "card", aria_labelledby=f"{key}-head")


def header(runs: Sequence[Run]) -> Html:
    """Names and how the runs ended."""
    title = " and ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    badges = [
        tag("span", _named(runs, number, ": "), in_words(run), class_=f"badge {status_of(run)}")
        for number, run in enumerate(runs)
    ]
    return tag("header", tag("p", "halfmesh report", class_="over"), tag("h1", title), tag("p", badges))


def differences(runs: Sequence[Run]) -> Html | None:
    """What was set, and what that came down to, where runs differ."""
    if len(runs) < 2:
        return None
    rows = [(row.key, [_or_none(value) for value in row.values]) for row in set_keys(runs) if row.differs]
    rows += [(f"plan: {name}", texts) for name, texts in _plans(runs) if len(set(texts)) > 1]
    same = tag("p", "none in config and plan")
    return section("differences", "Differences", _table(runs, rows) if rows else same)


def warnings(runs: Sequence[Run]) -> Html | None:
    """What the log warned of."""
    said = [
        tag("li", f"{run.name}, " if len(runs) > 1 else "", f"after {made:,} updates: {text}")
        for run in runs
        for text, made in list(run.warnings.items())[:_MOST_WARNINGS]
    ]
    return section("warnings", "Warnings", tag("ul", said)) if said else None


def notes(runs: Sequence[Run]) -> Html | None:
    """What is missing."""
    said = [f"{run.name}: {note}" if len(runs) > 1 else note for run in runs for note in run.notes]
    return section("notes", "What is missing", tag("ul", [tag("li", note) for note in said])) if said else None


def summary(runs: Sequence[Run]) -> Html:
    """The table of how it went."""
    several = len(runs) > 1
    return section("summary", "Runs" if several else "Run", _table(runs, summarise(runs)), wide=several)


def plan(runs: Sequence[Run]) -> Html:
    """What the configs came down to."""
    rows = _plans(runs)
    if not rows:
        return section("plan", "Plan", _absent("There is no plan in plan.json"), wide=len(runs) > 1)
    table = _table(runs, rows)
    earlier = [
        (f"{run.name}, from update {old.get('from_step')}: {name}", [str(text)])
        for run in runs
        for old in run.plans[:-1]
        for name, text in _rows(old).items()
    ]
    before = tag("details", tag("summary", "Before it was gone on with"), _table([], earlier)) if earlier else None
    return section("plan", "Plan", table, before, wide=len(runs) > 1)


def chart(drawn: Chart) -> Html:
    """A chart, wide and narrow; the page shows one of the two."""
    pictures = [draw(drawn, size) for size in SIZES]
    figure = tag("figure", legend(drawn), pictures, tag("div", class_="tip", role="status", hidden=True), class_="plot")
    return section(drawn.key, drawn.title, figure, wide=False)


def absent(wanted: Wanted) -> Html:
    """In place of a chart."""
    return section(wanted.key, wanted.title, _absent(f"Not recorded: {wanted.how}"), wide=False)


def skips(runs: Sequence[Run]) -> Html:
    """The numbers of all updates that were skipped."""
    lines = []
    for run in runs:
        name = f"{run.name}: " if len(runs) > 1 else ""
        count = len(run.skipped)
        if not count:
            lines.append(tag("p", f"{name}none"))
            continue
        numbers = tag("p", ranges_in_words(run.skipped), class_="numbers")
        if count > 200:
            numbers = tag("details", tag("summary", "All numbers"), numbers)
        lines.append(join(tag("p", f"{name}{count:,} of {run.last_step:,} updates:"), numbers))
    return section("skips", "Skipped updates", lines)


def mesh(runs: Sequence[Run]) -> Html:
    """Which rank holds what."""
    pictures = []
    for number, run in enumerate(runs):
        picture = draw_mesh(run.plan)
        shown = _absent("There is none in plan.json") if picture is None else _scrolled(picture, "The mesh")
        pictures.append(join(_heading(runs, number), shown))
    return section("mesh", "Mesh", pictures)


def precision(runs: Sequence[Run]) -> Html:
    """What half precision did to each layer."""
    parts = [
        join(_heading(runs, number), _precision_of(run.precision), _layers(run.precision))
        for number, run in enumerate(runs)
    ]
    return section("precision", "Precision findings", parts)


def config(runs: Sequence[Run]) -> Html:
    """What was set, and everything with its default."""
    rows = set_keys(runs)
    parts: list[Any] = []
    if not any(run.session for run in runs):
        return section("config", "Config", _absent("There is none in config.json"))
    if len(runs) > 1:
        parts.append(tag("h3", "Set in some run, and the same in all"))
    same = [(row.key, [_or_none(value) for value in row.values[:1]]) for row in rows if not row.differs]
    parts.append(_table([], same) if same else tag("p", "none: all keys have their defaults"))
    changed = changes(runs)
    if changed:
        parts += [tag("h3", "Changed when a run was gone on with"), tag("ul", [tag("li", line) for line in changed])]
    for run in runs:
        everything = [(key, [value]) for key, value in all_keys(run.session).items()]
        name = f" of {run.name}" if len(runs) > 1 else ""
        parts.append(tag("details", tag("summary", f"All keys{name}, with defaults"), _table([], everything)))
    return section("config", "Config", parts)


def _precision_of(content: dict[str, Any]) -> Html:
    report = content.get("report")
    if not isinstance(report, dict):
        return _absent("Not asked for: RunHook(directory, precision_report=True), or run.save_precision_report(report)")
    findings = report.get("findings")
    findings = findings if isinstance(findings, list) else []
    said = [f"after update {content.get('step')}: {report.get('compute_dtype')}"]
    if report.get("loss_scale") is not None:
        said.append(f"loss scale {_short(report['loss_scale'])}")
    if report.get("updates"):
        said.append(f"{report.get('skipped')} of the last {report['updates']} updates skipped")
    listed = tag("ul", [tag("li", text) for text in findings]) if findings else tag("p", "Nothing is worth a change.")
    return join(tag("p", ", ".join(said)), listed)


_COLUMNS = {
    "name": "module",
    "kind": "class",
    "param_dtype": "parameters",
    "output_dtype": "output",
    "largest_output": "largest output",
    "output_share": "of max",
    "largest_gradient": "largest gradient",
    "gradient_share": "of max",
    "zero_gradients": "zero",
    "subnormal_gradients": "subnormal",
    "subnormal_weight_gradients": "weights subnormal",
}
_SHARES = (
    "output_share",
    "gradient_share",
    "zero_gradients",
    "subnormal_gradients",
    "subnormal_weight_gradients",
)


def _layers(content: dict[str, Any]) -> Html | None:
    report = content.get("report")
    layers = report.get("layers") if isinstance(report, dict) else None
    layers = [layer for layer in layers if isinstance(layer, dict)] if isinstance(layers, list) else []
    if not layers:
        return None
    head = tag("tr", [tag("th", text, scope="col") for text in _COLUMNS.values()])
    body = [
        tag("tr", [tag("td", _share(layer.get(key)) if key in _SHARES else _short(layer.get(key))) for key in _COLUMNS])
        for layer in layers[:_MOST_LAYERS]
    ]
    rest = tag("p", f"and {len(layers) - _MOST_LAYERS} more") if len(layers) > _MOST_LAYERS else None
    table = _scrolled(tag("table", tag("thead", head), tag("tbody", body), class_="layers"), "Layers")
    return tag("details", tag("summary", f"{len(layers)} layers"), table, rest)


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> Html:
    """Names on the left, a column for each run, with its name above if there are several."""
    head = None
    if len(runs) > 1:
        head = tag("thead", tag("tr", tag("td"), [tag("th", _named(runs, n), scope="col") for n in range(len(runs))]))
    body = [tag("tr", tag("th", name, scope="row"), [tag("td", text) for text in texts]) for name, texts in rows]
    count = max((len(texts) for _, texts in rows), default=1)
    if count <= _MOST_COLUMNS:
        return tag("table", head, tag("tbody", body), class_="pairs", style=f"--runs: {count}")
    table = tag("table", head, tag("tbody", body), class_="pairs many", style=f"min-width: {150 * (count + 1)}px")
    return _scrolled(table, "Runs side by side")


def _named(runs: Sequence[Run], number: int, end: str = "") -> Html | None:
    """A run's name with its colour; None where there is one run."""
    return join(sample(f"line s{number}"), runs[number].name, end) if len(runs) > 1 else None


def _heading(runs: Sequence[Run], number: int) -> Html | None:
    return tag("h3", _named(runs, number)) if len(runs) > 1 else None


def _scrolled(content: Html, label: str) -> Html:
    """What may be wider than the page scrolls by itself, also by keys."""
    return tag("div", content, class_="scroll", tabindex="0", role="region", aria_label=label)


def _absent(why: str) -> Html:
    return tag("p", why, class_="absent")


def _plans(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """The rows of the plans, with the batch as it came: a loader need not tell its size."""
    rows = [_rows(run.plan) | _batch(run) for run in runs]
    names = dict.fromkeys(name for found in rows for name in found)
    return [(name, [str(found.get(name, "-")) for found in rows]) for name in names]


def _batch(run: Run) -> dict[str, str]:
    values, size = run.plan.get("values"), run.session.get("batch_rows")
    planned = values.get("batch") if isinstance(values, dict) else None
    if not isinstance(planned, dict) or not _is_size(size) or size == planned.get("per_rank"):
        return {}
    data, cycle = planned.get("data_ranks"), planned.get("accumulated")
    if not _is_size(data) or not _is_size(cycle):
        return {}
    return {
        "batch": f"{size} per rank (the first batch) x {data} data rank(s) x {cycle} accumulated = "
        f"{size * data * cycle} samples per update"
    }


def _is_size(value: Any) -> TypeGuard[int]:
    return type(value) is int and 0 < value < 2**40


def _rows(plan: dict[str, Any]) -> dict[str, Any]:
    rows = plan.get("rows")
    return rows if isinstance(rows, dict) else {}


def _or_none(value: str | None) -> str:
    return "(not set)" if value is None else value


def _short(value: Any) -> str:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return readable(value)
    return "-" if value is None else str(value)


def _share(value: Any) -> str:
    if not isinstance(value, (int, float)):
        return "-"
    return f"{value:.2%}" if value >= 1e-4 or value == 0 else "<0.01%"
