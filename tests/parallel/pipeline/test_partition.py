"""Partitioners: their pieces compute bit by bit what a model computes, and are dealt out to stages evenly."""

from __future__ import annotations

import random
from collections import OrderedDict
from itertools import combinations, pairwise, product
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh import BlockPartition, InputError
from halfmesh.parallel.pipeline.partition import resolve
from tests.support.pipeline_parts import assert_equal, check_pieces, compose, pieces_of

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
IDS = torch.randint(1, 32, (2, 6), generator=torch.Generator().manual_seed(0))
LEFT_PADDED = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])


def best(costs, count):
    """The smallest largest sum of a division into runs, by trying all."""
    return min(
        max(sum(costs[begin:end]) for begin, end in pairwise([0, *inner, len(costs)]))
        for inner in combinations(range(1, len(costs)), count - 1)
    )


def test_the_largest_stage_is_as_small_as_can_be():
    numbers = random.Random(0)
    for _ in range(30):
        costs = [numbers.choice([0, 1, 1, 2, 3, 7, 20]) for _ in range(numbers.randint(1, 9))]
        count = numbers.randint(1, len(costs))
        model = nn.Sequential(*(nn.Linear(1, cost, bias=False) if cost else nn.Tanh() for cost in costs))
        found = resolve(model, count, 1, "auto")
        assert all(found.stages)
        assert len(found.stages) == count
        assert max(found.costs) == best(costs, count), (costs, count)


class Masked(nn.Module):
    """Blocks share a mask, which is computed with a module of its own."""

    def __init__(self, count: int = 3) -> None:
        super().__init__()
        self.begin, self.scale, self.head = nn.Linear(4, 4), nn.Linear(4, 4), None
        self.position = nn.Parameter(torch.randn(4))
        self.body = nn.ModuleDict({"blocks": nn.ModuleList(nn.Linear(4, 4) for _ in range(count))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask, x = self.scale(x), self.begin(x) + self.position
        for block in self.body["blocks"]:
            x = x + block(x) * mask
        return x


MASKED = BlockPartition(
    layers=(Masked,),
    blocks="body.blocks",
    begin=lambda model, x: model.begin(x) + model.position,
    end=lambda model, x: x,
    end_uses=("head",),
    share=lambda model, x: model.scale(x),
    shared_uses=("scale",),
    block=lambda block, x, mask: x + block(x) * mask,
    find_problem=lambda model: None if len(model.body["blocks"]) else "it has no blocks",
)


def test_blocks_use_what_they_share():
    pieces = check_pieces(Masked(), [torch.randn(2, 4)], partition=MASKED)
    of_blocks = [{f"body.blocks.{index}", "scale"} for index in range(3)]
    assert [set(piece.uses) for piece in pieces] == [{"begin", "position"}, *of_blocks, set()]
    derived = type("Derived", (Masked,), {"forward": lambda self, x: x})
    assert MASKED.pieces_of(derived()) is None
    with pytest.raises(InputError, match=r"the model \(Masked\): it has no blocks"):
        MASKED.pieces_of(Masked(count=0))


def replace(module: nn.Module, method: str) -> nn.Module:
    """Give `module` another `method`."""
    module.__class__ = type("Derived", (type(module),), {method: lambda self, *args, **kwargs: None})
    return module


class Twice(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def nested() -> nn.Module:
    """With a module at two places, and inner ones that do more when they are called, which stay whole."""
    act, hooked = nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    hooked.register_forward_hook(lambda module, args, output: output * 3)
    inner = nn.Sequential(OrderedDict(up=nn.Linear(4, 8), acts=nn.Sequential(nn.GELU(), act), none=nn.Sequential()))
    more = nn.Sequential(nn.BatchNorm1d(8), act, nn.Dropout(0.5))
    return nn.Sequential(OrderedDict(body=inner, twice=Twice(nn.Linear(8, 8), nn.ReLU()), hooked=hooked, more=more))


def test_sequential():
    names = ["body.up", "body.acts.0", "body.acts.1", "body.none", "twice", "hooked", "more.0", "more.1", "more.2"]
    assert [piece.name for piece in check_pieces(nested(), [torch.randn(3, 4)])] == names
    with pytest.raises(InputError, match="no partitioner knows Twice"):
        pieces_of(Twice(nn.Linear(2, 2)))


def make_vit(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 3, "num_heads": 2, "num_classes": 5}
    return pytest.importorskip("timm.models").vision_transformer.VisionTransformer(**{**sizes, **options})


VITS = [
    {"reg_tokens": 2, "no_embed_class": True, "qk_norm": True, "init_values": 0.1, "global_pool": "map"},
    {"final_norm": False, "num_classes": 0, "drop_rate": 0.2, "patch_drop_rate": 0.5, "drop_path_rate": 0.5},
]


@pytest.mark.parametrize("options", VITS, ids=str)
def test_vision_transformer(options):
    pieces = check_pieces(make_vit(**options), [IMAGES])
    assert [piece.name for piece in pieces] == ["the beginning", "blocks.0", "blocks.1", "blocks.2", "the end"]
    for method in ("forward", "forward_features", "forward_head", "pool"):
        with pytest.raises(InputError, match="no partitioner knows Derived"):
            pieces_of(replace(make_vit(), method))


LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "max_position_embeddings": 16}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16}
BERT = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
KINDS = {
    "llama": ("LlamaForCausalLM", LLAMA),
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "bert": ("BertForSequenceClassification", BERT),
    "masked": ("BertForMaskedLM", BERT),
}
DECODERS = ("llama", "gpt2")


def make(kind: str, **options: Any) -> Any:
    name, sizes = KINDS[kind]
    model = getattr(pytest.importorskip("transformers"), name)
    torch.manual_seed(0)
    return model(model.config_class(vocab_size=32, **{**sizes, **options}))


POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)  # two packed sequences
TYPES = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        ("llama", {"position_ids": POSITIONS}),
        ("gpt2", {"position_ids": POSITIONS[:1] + 3}),
        ("bert", {"token_type_ids": TYPES, "position_ids": POSITIONS[:1] + 1}),
        ("masked", {"token_type_ids": TYPES}),
    ],
)
def test_language_models(kind, inputs):
    """Past keys stay on their stages."""
    uncached = {"use_cache": False} if kind in DECODERS else {}
    more = {"num_key_value_heads": 1, "attention_bias": True, "attention_dropout": 0.3} if kind == "llama" else {}
    for attention, training in product(("eager", "sdpa"), (True, False)):
        model = make(kind, attn_implementation=attention, **more).train(training)
        torch.manual_seed(1)
        expected = model(input_ids=IDS, **inputs, **uncached)
        torch.manual_seed(1)
        assert_equal(compose(model, pieces_of(model), input_ids=IDS, **inputs), expected)
    padded = {"input_ids": IDS, "attention_mask": LEFT_PADDED}
    names = [piece.name for piece in check_pieces(make(kind, **uncached), [], padded)]
    assert (names[0], len(names), names[-1]) == ("the beginning", 5, "the end")


@pytest.mark.parametrize("kind", [*DECODERS, "bert"])
def test_what_language_models_reject(kind):
    model = make(kind).eval()
    pieces = pieces_of(model)
    given = {"inputs_embeds": torch.zeros(2, 6, 16), "output_hidden_states": True, "return_dict": False, "labels": IDS}
    given |= {"use_cache": True, "logits_to_keep": 1} if kind in DECODERS else {}
    for name, value in given.items():
        with pytest.raises(InputError, match=f"^{name}: a Hugging Face model in a pipeline takes only input_ids"):
            compose(model, pieces, input_ids=IDS, **{name: value})
    inner, outer = make(kind), make(kind)
    replace(inner.base_model, "forward")
    for model in (inner, replace(outer, "forward")):
        with pytest.raises(InputError, match="no partitioner knows"):
            pieces_of(model)
