"""What is not trained, and what halfmesh says instead."""

from __future__ import annotations

from collections import defaultdict

from halfmesh.compat import Row, check, get_columns, get_rows
from halfmesh.config.composition import Finding
from halfmesh.config.load import load_config
from halfmesh.parallel.axis import PlanInputs
from halfmesh.parallel.context.axis import ContextOptions, ContextParallelism
from halfmesh.parallel.expert import ExpertOptions, ExpertParallelism
from halfmesh.parallel.tensor.plans import resolve

from .cells import Cell, every
from .workloads import find_workload


def findings_of_table(row: Row, column: str) -> list[Finding]:
    """What halfmesh has against the smallest config with this row and column of the composition table."""
    axes = {name: {name: 2} for name in ("tensor", "context", "expert")} | {
        "pipeline": {"pipeline": {"size": 2, "microbatches": 2}}
    }
    config = {"parallel": axes.get(column, {"data": column})} | ({row.key: {"mode": row.mode}} if row.key else {})
    return check(load_config(config), 2, "cpu")


def problems_with_sequence(cell: Cell) -> list[str]:
    """What it has against dividing the sequence of a cell's model."""
    workload = find_workload(cell.model)
    model, problems = workload.build(), list[str]()
    if cell.sequence_parallel:
        problems += resolve(model, cell.tensor, workload.plan, sequence_parallel=True)[1]
    if cell.expert > 1:
        problems += ExpertParallelism.plan(PlanInputs(model, None, None, None, ExpertOptions(size=cell.expert)))[1]
    if cell.context > 1:
        problems += ContextParallelism.plan(PlanInputs(model, None, None, None, ContextOptions(size=cell.context)))[1]
    return problems


def messages() -> dict[str, list[str]]:
    """Each message, and what it is an answer to."""
    found: dict[str, list[str]] = defaultdict(list)
    everything = [
        finding for row in get_rows() for column in get_columns() for finding in findings_of_table(row, column)
    ]
    everything += [finding for cell in every() for finding in cell.findings()]
    for finding in everything:
        if finding.where not in found[finding.message]:
            found[finding.message].append(finding.where)
    return dict(found)
