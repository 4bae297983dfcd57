"""What is not trained, and what halfmesh says instead."""

from __future__ import annotations

from collections import defaultdict

from halfmesh.compat import Row, check, get_columns, get_rows
from halfmesh.config.load import load_config
from halfmesh.key_checks import Finding
from halfmesh.parallel.tensor.checks import resolve

from .cells import Cell, every
from .workloads import find_workload


def findings_of_table(row: Row, column: str) -> list[Finding]:
    """What halfmesh has against the smallest config with this row and column of the composition table."""
    axes = {"tensor": {"tensor": 2}, "pipeline": {"pipeline": {"size": 2, "microbatches": 2}}}
    config = {"parallel": axes.get(column, {"data": column})} | ({row.key: {"mode": row.mode}} if row.key else {})
    return check(load_config(config), 2, "cpu")


def problems_with_sequence(cell: Cell) -> list[str]:
    """What it has against dividing the sequence of a cell's model."""
    workload = find_workload(cell.model)
    _, problems = resolve(workload.build(), cell.tensor, workload.plan, sequence_parallel=True)
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
    unknown = next(cell for cell in every() if cell.divides_unknown_sequence and not cell.findings())
    for problem in problems_with_sequence(unknown):
        found[problem].append(f"model {unknown.model} x sequence_parallel")
    return dict(found)
