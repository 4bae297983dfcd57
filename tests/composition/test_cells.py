"""The composition table, its cells, and what is rejected: a combination is trained to parity or raises its message."""

from __future__ import annotations

import re

import pytest
import torch.distributed as dist

import halfmesh
from halfmesh.amp.plugin import PRECISIONS
from halfmesh.compat import composition_table, get_columns, get_rows, raise_for
from halfmesh.errors import IncompatibleConfigError

from .cells import (
    AXES,
    EXPERTS,
    MODES,
    Cell,
    Pipe,
    covering,
    every,
    few,
    groups,
    product,
)
from .rejections import findings_of_table, problems_with_sequence
from .training import digest, make_optimizer
from .workloads import WORKLOADS

TRAINED = [mode for mode in MODES if "apex" not in mode and mode != "naive_fp8"]
"""Modes that work with every kind of parallelism."""


@pytest.mark.promise("pipelines take the naive mode only")
def test_every_pair_of_values_is_in_a_covering_cell_and_every_mode_with_every_model():
    possible = {pair for cell in product() for pair in groups(cell, 2)}
    plain = [cell for cell in covering() if cell not in EXPERTS]
    assert {pair for cell in plain for pair in groups(cell, 2)} == possible
    values = {(axis, value) for axis in AXES for value in AXES[axis]}
    rejected = {("mode", mode) for mode in ("apex_bf16", "naive_fp8", "apex_fp8")}
    assert {value for pair in possible for value in pair} == values - rejected
    for kind in ("tensor", "pipeline"):  # divided, and cut
        found = {(cell.mode, cell.model) for cell in plain if kind in cell.kinds}
        assert found == {(mode, model) for mode in TRAINED for model in WORKLOADS}
    assert {cell.mode for cell in plain if cell.data > 1 and {"tensor", "pipeline"} <= {*cell.kinds}} == {*TRAINED}


@pytest.mark.parametrize("column", get_columns())
@pytest.mark.parametrize("row", get_rows(), ids=str)
def test_a_cell_of_the_table_is_trained_or_rejected(row, column):
    verdict = composition_table()[str(row)][column]
    if verdict == "yes":
        few_or_more = EXPERTS if column == "expert" else few()  # of experts' cells most are slow
        assert any(MODES[cell.mode].row == row and column in cell.kinds for cell in few_or_more)
        return
    why_not = row.plugin.composes.why_not
    words = why_not.get(PRECISIONS[row.key]) or why_not.get(column) or f"has no {row.key}"
    with pytest.raises(IncompatibleConfigError, match=re.escape(words)):
        raise_for(findings_of_table(row, column))


def test_whatever_is_not_trained_is_rejected():
    rejected = [cell for cell in set(every()) - set(product()) if not cell.divides_unknown_sequence]
    assert {cell.mode for cell in rejected} == set(MODES)
    for cell in rejected:
        with pytest.raises(IncompatibleConfigError):
            raise_for(cell.findings())
    unknown = [cell for cell in every() if cell.divides_unknown_sequence and not cell.findings()]
    for cell in [cell for cell in unknown if cell.sequence_parallel and not WORKLOADS[cell.model].sequence]:
        assert "no plan says where the sequence is sharded" in problems_with_sequence(cell)[0]


REJECTIONS = {
    Cell("apex_o1", "gpt", tensor=2): "apex fp16 x tensor: each rank of apex decides alone",
    Cell("apex_bf16", "gpt", data=2): "apex bf16: apex has no bf16",
    Cell(
        "none", "gpt", data=2, reduce_dtype="float16"
    ): "without a loss scale, sums of gradients leave the range of float16",
    Cell("naive_bf16", "mlp", data=2, reduce_dtype="float16"): "without a loss scale",
    Cell("apex_o2", "gpt", pipeline=Pipe(2, "gpipe", 2)): "apex fp16 x pipeline: each rank of apex decides alone",
    Cell("none", "mlp", tensor=2, sequence_parallel=True): "no plan says where the sequence is sharded",
    Cell("apex_o2", "gpt", context=2): "apex fp16 x context: each rank of apex decides alone",
}


@pytest.mark.parametrize("cell", REJECTIONS, ids=str)
def test_a_rejection_leaves_everything_as_it_was(cell, monkeypatch):
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 1}
    for name, value in (variables | {"MASTER_ADDR": "localhost"}).items():
        monkeypatch.setenv(name, str(value))
    model = WORKLOADS[cell.model].build()
    optimizer = make_optimizer(model.parameters(), lr=0.1)
    before, classes = digest(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(IncompatibleConfigError, match=re.escape(REJECTIONS[cell])):
        halfmesh.initialize(model, optimizer, config=cell.config(), device="cpu")
    assert not dist.is_initialized()
    assert (digest(model.state_dict()), [type(module) for module in model.modules()]) == (before, classes)
    held = optimizer.param_groups[0]["params"]
    assert [id(param) for param in held] == [id(param) for param in model.parameters()]
