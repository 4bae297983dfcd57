"""What users do with these models: frozen layers, recomputation, cached outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim

import halfmesh
from tests.support.models import MODES
from tests.support.proofs import Row, rows
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import close_whole

from .zoo import LENGTH, SUBJECTS, WORDS, next_word, text

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.distributed

PIPELINE = {"pipeline": {"size": 2, "microbatches": 2}}
LAYOUTS = {"fsdp": {"data": "fsdp"}, "zero1": {"data": "zero1"}, "tensor": {"tensor": 2}, "pipeline": PIPELINE}
TRAINED = ("layer.1.", "classifier", "blocks.1.", "head.")


def frozen(name: str) -> Any:
    """All but the last block and the head."""
    subject = SUBJECTS[name]
    model, batch = subject.make(), subject.data()
    for key, param in model.named_parameters():
        param.requires_grad_(any(part in key for part in TRAINED))
    labels = batch.pop("labels")
    return model, (batch.get("x", batch), labels), subject.criterion


USES = [("BERT, classification", "zero1"), ("BERT, classification", "tensor"), ("timm ViT", "fsdp")]
USES += [("timm ViT", "pipeline")]


@rows(*(Row(f"{name}, {layout}", partial(frozen, name), {"parallel": LAYOUTS[layout]}) for name, layout in USES))
def test_trains_as_one_process(row):
    row.prove()


def dropping_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, bos_token_id=None, eos_token_id=None))


def recomputed(rank: int, world_size: int, layout: str, reentrant: bool) -> bool:
    """Whether transformers' gradient checkpointing gives the weights of none, with dropout."""
    found = []
    for checkpoints in (False, True):
        model = dropping_gpt2()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        optimizer, config = optim.SGD(model.parameters(), lr=0.1), {"parallel": LAYOUTS[layout]}
        engine = halfmesh.initialize(model, optimizer, next_word, None, config, device=rank_device())
        ids = here(text()["input_ids"])
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(input_ids=ids), ids))
            engine.step()
        found.append(close_whole(engine))
    return all(torch.equal(value, found[1][name]) for name, value in found[0].items())


@pytest.mark.sends
@pytest.mark.parametrize(("layout", "reentrant"), [("tensor", False), ("fsdp", True)])
def test_transformers_own_gradient_checkpointing_with_dropout(layout, reentrant):
    assert run_ranks(recomputed, 2, layout, reentrant) == [True, True]


def test_what_a_model_of_transformers_returns_is_what_it_returns_by_itself():
    from transformers import BatchEncoding
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    model = SUBJECTS["GPT-2"].make()
    engine = halfmesh.initialize(model, optim.SGD(model.parameters(), lr=0.1), config=MODES["naive_fp16"], device="cpu")
    batch = BatchEncoding(SUBJECTS["GPT-2"].data())
    output = engine(**batch)
    assert type(output) is CausalLMOutputWithCrossAttentions
    assert output[0] is output.loss is output["loss"]
    assert output.hidden_states is None
    cache = "cache" if "cache" in output else "past_key_values"  # the name before transformers 5.24
    assert type(output[cache]) is DynamicCache
    assert (output[cache].layers[0].keys.dtype, output.logits.dtype) == (torch.float16, torch.float32)
    engine.backward(output.loss)
    engine.step()
    engine.eval()
    with torch.no_grad():
        whole = engine(input_ids=batch["input_ids"]).logits
        begun = engine(input_ids=batch["input_ids"][:, :4])
        rest = engine(input_ids=batch["input_ids"][:, 4:], **{cache: begun[cache]}).logits
    assert (rest.float() - whole[:, 4:].float()).abs().max() < 0.1
