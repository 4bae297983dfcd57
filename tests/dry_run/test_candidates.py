"""Which changes of a config are tried, and in which order."""

from __future__ import annotations

import pytest

from halfmesh import load_config
from halfmesh.dry_run.candidates import (
    PlanRequest,
    Update,
    describe_update,
    make_candidate,
    make_layouts,
    recomputations,
)


def ask(world_size=8, node=8, **config):
    return PlanRequest(load_config(config), world_size, 1000, "a:model", node=node)


def layouts(asked, rejected=()):
    return [" ".join(changes) for changes in make_layouts(asked, (), lambda change: change not in rejected)]


@pytest.mark.promise("help in choosing a layout")
def test_layouts_from_the_simplest_to_the_most_invasive():
    found = layouts(ask(4, node=2), [f"parallel.expert.size={size}" for size in (2, 4)])
    assert found[:3] == ["", "parallel.data.strategy=zero1", "parallel.data.strategy=fsdp"]
    axes = [line.replace("parallel.", "").replace(".size", "") for line in found if "strategy" not in line]
    both = ["tensor=2 context=2", "tensor=2 pipeline=2", "context=2 pipeline=2"]
    assert axes == ["", "tensor=2", "context=2", "pipeline=2", "pipeline=4", *both]
    alone = [line for line, after in zip(found, [*found[1:], ""], strict=True) if "strategy" not in line + after]
    assert alone == ["parallel.pipeline.size=4", "parallel.tensor.size=2 parallel.pipeline.size=2"], "one data rank"


def test_what_a_config_has_stays():
    pipeline = {"size": 2, "microbatches": 4}
    config = {"tensor": 2, "data": "zero1", "pipeline": pipeline}
    assert layouts(ask(parallel=config), ["parallel.expert.size=2"]) == [
        "",
        "parallel.data.strategy=fsdp",
        "parallel.tensor.size=4",
        "parallel.context.size=2",
        "parallel.context.size=2 parallel.data.strategy=fsdp",
        "parallel.pipeline.size=4",
    ]
    assert layouts(ask(4, parallel={"data": {"size": 4}}))[3] == "parallel.tensor.size=2 parallel.data.size=null"
    kinds = ({}, {"activation_checkpoint": "selective"}, {"activation_checkpoint": {"every": 2}})
    assert [list(recomputations(load_config(config))) for config in kinds] == [["selective", "full"], ["full"], []]


@pytest.mark.parametrize(
    ("config", "changes", "at_once", "rows", "passes", "more"),
    [
        ({}, (), 4, 4, 1, ()),
        ({}, (), 1, 1, 4, ("gradient_accumulation=4",)),
        ({}, ("parallel.tensor.size=2",), 4, 4, 2, ("gradient_accumulation=2",)),
        ({}, ("parallel.pipeline.size=2",), 2, 8, 4, ("parallel.pipeline.microbatches=4",)),
        ({"global_batch_size": 32}, ("parallel.tensor.size=2",), 2, 2, 4, ()),
        ({"gradient_accumulation": 2}, ("parallel.pipeline.size=2",), 2, 8, 8, ("parallel.pipeline.microbatches=4",)),
    ],
)
def test_an_update_has_the_same_rows(config, changes, at_once, rows, passes, more):
    asked = ask(**config)
    update = describe_update(asked.config, 8, 4)
    assert update == Update(32 * asked.config.gradient_accumulation, 4, asked.config.gradient_accumulation)
    candidate = make_candidate(asked, update, changes, "full", at_once)
    assert candidate.rejected == ""
    assert (candidate.rows, candidate.passes) == (rows, passes)
    assert candidate.changes == (*changes, "activation_checkpoint=full", *more)
    assert candidate.config == load_config(asked.config, candidate.changes)  # what is printed after --set
