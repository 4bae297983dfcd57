"""What users do with these models: batches of different lengths, frozen layers, recomputation, cached outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfmesh
from tests.support.models import MODES
from tests.support.ranks import here, rank_device
from tests.support.whole import close_whole

from .cells import LAYOUTS, Samples, call, make_optimizer
from .zoo import LENGTH, SAMPLES, SUBJECTS, UPDATES, WORDS, Batch, Subject, text

for package in ("timm", "torchvision", "transformers"):
    pytest.importorskip(package)
pytestmark = pytest.mark.distributed

Weights = dict[str, torch.Tensor]
LR = 0.01
slow = pytest.mark.slow


def slow_but_first(*cases: Any) -> list[Any]:
    """The first case is in the default tier."""
    return [cases[0], *(pytest.param(*(case if isinstance(case, tuple) else [case]), marks=slow) for case in cases[1:])]


def make_engine(name: str, layout: str, model: nn.Module, data: Any, criterion: Any = None) -> halfmesh.Engine:
    """An engine over the parameters of `model` that train. `data`: a loader, or samples."""
    place = LAYOUTS[layout]
    if not isinstance(data, DataLoader):
        data = DataLoader(data, SAMPLES // place.data)
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], LR)
    config = place.config(SUBJECTS[name])
    return halfmesh.initialize(model, optimizer, criterion, data, config, device=rank_device())


def run(engine: halfmesh.Engine, own_loss: bool) -> Weights:
    """An epoch, and the end."""
    for batch in engine.dataloader:
        engine.zero_grad()
        output = engine(**batch) if own_loss else call(engine, batch)
        engine.backward(output.loss if own_loss else engine.criterion(output, batch["labels"]))
        engine.step()
    return close_whole(engine)


def weights_of(model: nn.Module) -> Weights:
    return {name: value.detach().clone().cpu() for name, value in model.state_dict().items()}


def by_hand(model: nn.Module, subject: Subject) -> Weights:
    """Plain torch, all samples of an update at once."""
    data = here(subject.data())
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad], LR)
    for update in range(UPDATES):
        optimizer.zero_grad()
        batch = {n: v[update * SAMPLES : (update + 1) * SAMPLES] for n, v in data.items()}
        subject.criterion(call(model, batch), batch["labels"]).backward()
        optimizer.step()
    return weights_of(model)


def largest_difference(a: Weights, b: Weights) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


# -- batches of different lengths ------------------------------------------------------------------------------------


class Shortest:
    """Makes batches as long as their longest text, as transformers' DataCollatorWithPadding does."""

    def __init__(self) -> None:
        self.lengths: set[int] = set()

    def __call__(self, items: list[Batch]) -> Batch:
        length = max(int(item["attention_mask"].sum()) for item in items)
        self.lengths.add(length)
        return {n: torch.stack([i[n][:length] if i[n].dim() else i[n] for i in items]) for n in items[0]}


def lengths(rank: int, world_size: int, layout: str) -> tuple[set[int], float]:
    """Which lengths batches had, and how far the weights are from those that padding to one length gives."""
    name = "BERT, classification"
    subject, place = SUBJECTS[name], LAYOUTS[layout]
    model, collate = subject.make(), Shortest()
    loader = DataLoader(Samples(subject.data()), SAMPLES // place.data, collate_fn=collate)
    own = place.pipeline == 1
    engine = make_engine(name, layout, model, loader, None if own else subject.criterion)
    weights = run(engine, own)
    return collate.lengths, largest_difference(weights, by_hand(here(subject.make()), subject))


@pytest.mark.parametrize("layout", slow_but_first("data", "fsdp", "tensor", "pipeline"))
def test_batches_of_different_lengths(layout):
    for found, apart in LAYOUTS[layout].run(lengths, layout):
        assert apart < 1e-6
        assert len(found) > 1


# -- frozen ----------------------------------------------------------------------------------------------------------

TRAINED = ("layer.1.", "classifier", "blocks.1.", "head.", "layer4.", "fc.")


def freeze(model: nn.Module) -> nn.Module:
    """All but the last block and the head."""
    for name, param in model.named_parameters():
        param.requires_grad_(any(part in name for part in TRAINED))
    return model


def frozen(rank: int, world_size: int, name: str, layout: str) -> tuple[float, bool]:
    """How far the weights are from those of one process; whether those that train moved, and no others."""
    subject = SUBJECTS[name]
    model = freeze(subject.make())
    start = weights_of(model)
    weights = run(make_engine(name, layout, model, Samples(subject.data()), subject.criterion), own_loss=False)
    plain = freeze(subject.make())
    trained = {name for name, param in plain.named_parameters() if param.requires_grad}
    moved = {name for name, _ in plain.named_parameters() if not torch.equal(weights[name], start[name])}
    return largest_difference(weights, by_hand(here(plain), subject)), moved == trained


@pytest.mark.parametrize("name", ["BERT, classification", pytest.param("timm ViT", marks=slow)])
@pytest.mark.parametrize("layout", slow_but_first("zero1", "fsdp", "tensor", "pipeline"))
def test_a_frozen_backbone(name, layout):
    for apart, those in LAYOUTS[layout].run(frozen, name, layout):
        assert apart < 1e-6
        assert those


# -- dropout and recomputation ---------------------------------------------------------------------------------------


def _dropping_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": LENGTH, "vocab_size": WORDS}
    return GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.2, bos_token_id=None, eos_token_id=None))


def recomputed(rank: int, world_size: int, layout: str, reentrant: bool) -> float:
    """How far transformers' gradient checkpointing is from none, with dropout."""
    found = []
    for checkpoints in (False, True):
        model = _dropping_gpt2()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        own = LAYOUTS[layout].pipeline == 1
        criterion = None if own else SUBJECTS["GPT-2"].criterion
        found.append(run(make_engine("GPT-2", layout, model, Samples(text()), criterion), own))
    return largest_difference(*found)


@pytest.mark.parametrize(
    ("layout", "reentrant"), slow_but_first(("tensor", False), ("fsdp", True), ("fsdp", False), ("pipeline", False))
)
def test_transformers_own_gradient_checkpointing_with_dropout(layout, reentrant):
    assert LAYOUTS[layout].run(recomputed, layout, reentrant) == [0.0, 0.0]


# -- outputs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["none", "naive_fp16", "torch_bf16"])
def test_what_a_model_of_transformers_returns_is_what_it_returns_by_itself(mode):
    from transformers import BatchEncoding
    from transformers.cache_utils import DynamicCache
    from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

    model = SUBJECTS["GPT-2"].make()
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=MODES[mode], device="cpu")
    batch = BatchEncoding({name: value[:8] for name, value in SUBJECTS["GPT-2"].data().items()})
    output = engine(**batch)
    assert type(output) is CausalLMOutputWithCrossAttentions
    cache = "cache" if "cache" in output else "past_key_values"  # the name before transformers 5.24
    assert list(output) == ["loss", "logits", cache]
    assert output[0] is output.loss is output["loss"]
    assert output.hidden_states is None
    assert type(output[cache]) is DynamicCache
    half = {"naive_fp16": torch.float16, "torch_bf16": torch.bfloat16}.get(mode, torch.float32)
    assert output[cache].layers[0].keys.dtype == half
    assert output.logits.dtype == (torch.float32 if mode == "naive_fp16" else half)
    assert output.loss.dtype == torch.float32
    engine.backward(output.loss)
    engine.step()
    assert type(engine(**batch, return_dict=False)) is tuple
    engine.eval()
    with torch.no_grad():
        whole = engine(input_ids=batch["input_ids"]).logits
        begun = engine(input_ids=batch["input_ids"][:, :4])
        rest = engine(input_ids=batch["input_ids"][:, 4:], **{cache: begun[cache]}).logits
    assert (rest.float() - whole[:, 4:].float()).abs().max() < 0.1
