"""Batches of different lengths, labels that do not count, frozen layers, dropout, recomputation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import halfmesh
from tests.support.models import MODES
from tests.support.ranks import RankFailure, run_jobs

from . import real_use as use
from .zoo import SUBJECTS

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.distributed

JOBS: dict[str, Callable[..., Any]] = {
    **{f"lengths {layout}": partial(use.lengths, layout=layout) for layout in ("data", "fsdp", "tensor", "pipeline")},
    **{
        f"weighted {layout} {count}": partial(use.weighted, layout=layout, accumulation=count)
        for layout, count in (("data", 2), ("fsdp", 1), ("tensor", 2), ("pipeline", 2))
    },
    **{
        f"frozen {name} {layout}": partial(use.frozen, name=name, layout=layout)
        for name in ("BERT, classification", "timm ViT")
        for layout in ("zero1", "fsdp", "tensor", "pipeline")
    },
    **{
        f"recomputed {layout} {reentrant}": partial(use.recomputed, layout=layout, reentrant=reentrant)
        for layout, reentrant in (
            ("fsdp", False),
            ("fsdp", True),
            ("tensor", True),
            ("tensor", False),
            ("pipeline", False),
        )
    },
    **{f"masks {name}": partial(use.masks, name=name) for name in ("GPT-2", "BERT, classification", "T5")},
    **{f"drop_path {layout}": partial(use.drop_path, layout=layout) for layout in ("tensor", "pipeline")},
    **{f"saved {name}": partial(use.saved, name=name) for name in ("GPT-2", "T5")},
}


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """What each job returned on its two ranks; all run in one launch."""
    return dict(zip(JOBS, run_jobs(list(JOBS.values()), 2), strict=True))


def named(kind: str) -> list[str]:
    return [name for name in JOBS if name.startswith(f"{kind} ")]


def of(results: dict[str, Any], job: str) -> Any:
    found = results[job]
    assert not isinstance(found, RankFailure), str(found)
    return found


@pytest.mark.parametrize("job", named("lengths"))
def test_batches_of_different_lengths(job, results):
    for lengths, apart in of(results, job):
        assert apart < 1e-6
        assert len(lengths) > 1


@pytest.mark.parametrize("job", named("weighted"))
def test_labels_that_do_not_count(job, results):
    for apart in of(results, job):
        assert apart < 1e-6


@pytest.mark.parametrize("job", named("frozen"))
def test_a_frozen_backbone(job, results):
    for apart, those in of(results, job):
        assert apart < 1e-6
        assert those


@pytest.mark.parametrize("job", named("recomputed"))
def test_transformers_own_gradient_checkpointing_with_dropout(job, results):
    assert of(results, job) == [0.0, 0.0]


@pytest.mark.parametrize("job", named("masks"))
def test_what_is_dropped_agrees_where_activations_are_whole(job, results):
    (weights, first), (others, second) = of(results, job)
    assert weights == others
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert len(same) > 2
    assert first.keys() - same == {name for name in first if "DenseReluDense" in name}  # divided, in T5 alone


@pytest.mark.parametrize("job", named("drop_path"))
def test_stochastic_depth_of_timm(job, results):
    first, second = of(results, job)
    assert first == second


@pytest.mark.parametrize("job", named("saved"))
def test_checkpoints_of_divided_models_load_elsewhere(job, results):
    assert of(results, job) == [(0.0, 0.0)] * 2


@pytest.mark.parametrize("mode", ["none", "naive_fp16", "torch_bf16", "apex_o1", "apex_o2"])
def test_what_a_model_of_transformers_returns_is_what_it_returns_by_itself(mode):
    from transformers import BatchEncoding
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    model = SUBJECTS["GPT-2"].make()
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=MODES[mode], device="cpu")
    batch = BatchEncoding({name: value[:8] for name, value in SUBJECTS["GPT-2"].data().items()})
    output = engine(**batch)
    assert type(output) is CausalLMOutputWithCrossAttentions
    assert list(output) == ["loss", "logits", "past_key_values"]
    assert output[0] is output.loss is output["loss"]
    assert output.hidden_states is None
    assert type(output.past_key_values) is DynamicCache
    half = {"naive_fp16": torch.float16, "torch_bf16": torch.bfloat16}.get(mode, torch.float32)
    if "apex" not in mode:
        assert output.past_key_values.layers[0].keys.dtype == half
        assert output.logits.dtype == (torch.float32 if mode == "naive_fp16" else half)
    assert output.loss.dtype == torch.float32
    engine.backward(output.loss)
    engine.step()
    assert type(engine(**batch, return_dict=False)) is tuple
    engine.eval()
    with torch.no_grad():
        whole = engine(input_ids=batch["input_ids"]).logits
        begun = engine(input_ids=batch["input_ids"][:, :4])
        rest = engine(input_ids=batch["input_ids"][:, 4:], past_key_values=begun.past_key_values).logits
    assert (rest.float() - whole[:, 4:].float()).abs().max() < 0.1
