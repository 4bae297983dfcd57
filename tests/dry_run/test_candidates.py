"""Which changes of a config are tried, and in which order."""

from __future__ import annotations

import pytest

from halfmesh import IncompatibleConfigError, load_config
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


def with_strategies(axes, data_ranks=2):
    """A layout, and where gradients are averaged over several ranks the same with zero1, and with fsdp."""
    names = ("zero1", "fsdp") if data_ranks > 1 else ()
    return [axes, *(f"{axes} parallel.data.strategy={name}".strip() for name in names)]


@pytest.mark.promise("help in choosing a layout")
def test_layouts_from_the_simplest_to_the_most_invasive():
    tensor, context, pipeline = (f"parallel.{name}.size" for name in ("tensor", "context", "pipeline"))
    experts = [f"parallel.expert.size={size}" for size in (2, 4)]
    assert layouts(ask(4, node=2), experts) == [
        *with_strategies(""),
        *with_strategies(f"{tensor}=2"),
        *with_strategies(f"{context}=2"),
        *with_strategies(f"{pipeline}=2"),
        *with_strategies(f"{pipeline}=4", 1),
        *with_strategies(f"{tensor}=2 {context}=2"),
        *with_strategies(f"{tensor}=2 {pipeline}=2", 1),
        *with_strategies(f"{context}=2 {pipeline}=2"),
    ]


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


def test_what_does_not_compose_is_rejected():
    asked = ask(fp16={"mode": "apex"})
    candidate = make_candidate(asked, describe_update(asked.config, 8, 4), ("parallel.tensor.size=2",), "", 4)
    assert candidate.rejected.startswith("apex fp16 x tensor: ")
    with pytest.raises(IncompatibleConfigError, match=r"config on 3 ranks, regardless of memory:\n.* .*tensor=2"):
        ask(3, parallel={"tensor": 2})


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
