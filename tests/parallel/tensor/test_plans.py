"""Tensor plans: which layers they shard, and every reason why a plan does not fit a model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from halfmesh import TENSOR_PLANS, LayerPlan
from halfmesh.parallel.models.transformers import HuggingFacePlan
from halfmesh.parallel.tensor.plans import resolve
from tests.parity.test_tensor_models import BERT, GPT2, LLAMA, SWIN, T5, VIT
from tests.support.tensor_parity import rejected

BOTH = range(2)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Doubled(FeedForward):
    def forward(self, x):
        return super().forward(x) * 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv, self.out = 4, nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.qkv(x)[..., :4])


class Language(nn.Module):
    """An embedding, a block, and a head with the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(12, 4), Attention(), nn.Linear(4, 12)
        self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.attention(self.words(ids)))


def model(mlp: type[nn.Module] = FeedForward) -> nn.Module:
    made = nn.ModuleList(nn.ModuleDict({"attention": Attention(), "mlp": mlp()}) for _ in BOTH)
    return nn.ModuleDict({"blocks": made, "head": nn.Linear(4, 2)})


def pair() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def decoder() -> nn.Module:
    layer = nn.ModuleDict({"norm": nn.LayerNorm(8), "mlp": pair(), "other": nn.MultiheadAttention(8, 4)})
    layers = nn.ModuleList(copy.deepcopy(layer) for _ in BOTH)
    return nn.ModuleDict({"neck": pair(), "layers": layers, "norm": nn.LayerNorm(8), "tail": pair()})


MLP_PLAN = LayerPlan((FeedForward,), {"up": "colwise", "down": "rowwise"})
OF_HEADS = {"qkv": "fused_colwise(3)", "out": "rowwise"}
ATTENTION_PLAN = LayerPlan((f"{__name__}.Attention",), {"": "heads(num_heads)", **OF_HEADS})
LANGUAGE = {f"attention.{name}": style for name, style in OF_HEADS.items()}
MLPS = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
SEQUENCE = {"layers.0": "sequence_begin", "norm": "sequence_end", **MLPS}
SEQUENCE |= {"layers.*.mlp": "region", "layers.*.norm": "sequence", "layers.*.other": "partial"}
TAIL, NECK = ({f"{name}.0": "colwise", f"{name}.2": "rowwise"} for name in ("tail", "neck"))


@contextmanager
def registered(**plans: Any) -> Iterator[None]:
    for name, plan in plans.items():
        TENSOR_PLANS.register(name, plan)
    try:
        yield
    finally:
        for name in plans:
            TENSOR_PLANS.unregister(name)


MLP, HEADS = ["mlp.down", "mlp.up"], ["attention.out", "attention.qkv"]
ALL = [f"blocks.{i}.{name}" for i in BOTH for name in HEADS + MLP]
MLPS_OF_ALL = [f"blocks.{i}.{name}" for i in BOTH for name in MLP]
IN_LAYERS = [f"layers.{i}.mlp.{place}" for i in BOTH for place in (0, 2)]
GATHERED = {**SEQUENCE, "layers.*.mlp.0": "colwise_gather", "layers.*.mlp.2": "rowwise_split"}
SHARDED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "auto": (model, "auto", ALL),
    "by name": (model, "my_mlp", MLPS_OF_ALL),
    "auto and a pattern": (model, {"*.mlp": "auto", "head": "colwise_gather"}, [*MLPS_OF_ALL, "head"]),
    "with another forward": (partial(model, Doubled), "auto", [name for name in ALL if "attention" in name]),
    "words": (Language, "auto", ["attention.out", "attention.qkv", "head", "words"]),
    "beyond the sequence": (decoder, {**SEQUENCE, **TAIL, **NECK}, [*TAIL, *NECK, *IN_LAYERS]),
    "gathered and split in a region": (decoder, GATHERED, IN_LAYERS),
}


@pytest.mark.parametrize("name", SHARDED)
def test_which_layers_are_sharded(name):
    make, plan, expected = SHARDED[name]
    with registered(my_mlp=MLP_PLAN, my_attention=ATTENTION_PLAN, words=LayerPlan((Language,), {"words": "vocab"})):
        assignments, problems = resolve(make(), 2, plan, sequence_parallel=make is decoder)
    assert problems == []
    assert sorted({each.name for each in assignments if "weight" in each.style.splits(each.module)}) == sorted(expected)


def with_a_plan() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.tp_plan = {"0": "colwise"}
    model.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=None)
    return model


TWICE = {"*.attention": "heads(num_heads)", "blocks.[0].attention": "heads(num_heads, num_heads)"}
SHARED = {**LANGUAGE, "words": "vocab", "head": "rowwise_split"}
REJECTED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (model, {"blocks.*.mpl.up": "colwise"}, "'blocks.*.mpl.up' matches no module; did you mean 'blocks.*.mlp.up'?"),
    (model, {"head": "fused_colwise"}, "module 'head': the style 'fused_colwise' does not take these arguments"),
    (model, {"head": "colwise", "h*": "rowwise"}, "twice, by head (colwise, from plan 'head') and head (rowwise, from"),
    (model, TWICE, "num_heads is sharded twice, by blocks.*.attention (heads(num_heads), from plan '*.attention')"),
    (partial(nn.Conv2d, 2, 4, 3), "auto", "no plan is registered for any layer of Conv2d; write one"),
    (partial(nn.Conv2d, 2, 4, 3), "timm_mlp", "plan 'timm_mlp' shards nothing of Conv2d"),
    (Language, {**LANGUAGE, "head": "colwise_gather"}, "words.weight (whole) and head.weight (dim 0) share one weight"),
    (Language, SHARED, "words.weight (dim 0) and head.weight (dim 1)"),
    (Language, LANGUAGE, "sharded; add 'attention': 'heads(num_heads)' if its forward"),
    (with_a_plan, "auto", "3 config.num_attention_heads are not divisible by tensor=2; tensor can be 1, 3"),
]


@pytest.mark.parametrize(("make", "plan", "words"), REJECTED)
def test_plans_that_do_not_fit_a_model(make, plan, words):
    assert words in rejected(make(), plan)


def test_registered_plans_that_cannot_be_followed():
    few = LayerPlan((Attention,), {"qkv": "colwise"}, find_problem=lambda layer: f"{layer.num_heads} are too few")
    with registered(few=few):
        assert "blocks.0.attention (Attention): 4 are too few" in rejected(model())
    with registered(my_mlp=MLP_PLAN, other_mlp=LayerPlan((FeedForward,), {"up": "colwise_gather"})):
        assert "or name one plan" in rejected(FeedForward())


def test_all_problems_are_told_together_and_those_of_repeated_blocks_once():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(12)])
    _, problems = resolve(blocks, 2, {"*.0": "colwise", "*.2": "rowwise"})
    assert problems == [
        f"*.* ({place} features are not divisible by tensor=2; tensor can be 1, 3, 9"
        for place in ("colwise, from plan '*.0'): 9 output", "rowwise, from plan '*.2'): 9 input")
    ]


OUTSIDE = "under sequence_parallel=True it must be in a 'region'"
WHOLE = "it is not between 'sequence_begin' and 'sequence_end'"
OTHER = {"layers.*.other": "attention", "layers.*.other.out_proj": "rowwise"}
NO_REGION = {pattern: style for pattern, style in SEQUENCE.items() if style != "region"}
UNKNOWN = [
    (MLPS | {"layers.0": "sequence_begin"}, "no plan says where the sequence is sharded"),
    (NO_REGION, f"layers.*.mlp.* (colwise, from plan 'layers.*.mlp.0'): {OUTSIDE}"),
    ({**SEQUENCE, **NECK, "neck": "region"}, f"neck (region, from plan 'neck'): {WHOLE}"),
    ({**SEQUENCE, **OTHER}, f"layers.*.other (attention, from plan 'layers.*.other'): {OUTSIDE}"),
    ({**SEQUENCE, "layers.*.mlp.2": "rowwise_split"}, "in a 'region' it would add whole gradients"),
]


@pytest.mark.parametrize(("plan", "words"), UNKNOWN)
def test_sequence_parallelism_needs_to_know_all_that_lies_between(plan, words):
    assert words in rejected(decoder(), plan), "also without the key"


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


UNFIT = [
    ("colwise", nn.Linear(1, 84), 9, "84 output features are not divisible by tensor=9; tensor can be 1, 2, 3, 4,"),
    ("fused_colwise(3)", nn.Linear(4, 18), 4, "18 output features in 3 blocks are not divisible by tensor=4"),
    ("vocab", nn.Embedding(7, 4), 2, "7 vocabulary entries are not divisible by tensor=2; tensor can be 1, 7"),
    ("colwise", Scaled(4, 8), 2, "it is a Scaled, but this style is for torch.nn.Linear"),
    ("vocab", nn.Embedding(8, 4, max_norm=1.0), 2, "max_norm is set, which does not work on a shard"),
    ("heads(heads)", nn.Linear(2, 2), 2, "it has no whole number named 'heads' (found: None)"),
    *(
        ("attention", nn.MultiheadAttention(8, 4, **more), 2, "this style does not support kdim, vdim, add_bias_kv and")
        for more in ({"kdim": 6}, {"add_bias_kv": True}, {"add_zero_attn": True})
    ),
    ("attention", nn.MultiheadAttention(9, 3), 2, "3 heads are not divisible by tensor=2"),
    ("attention", nn.Linear(8, 4), 2, "it is a Linear, but this style is for torch.nn.MultiheadAttention"),
]


@pytest.mark.parametrize(("style", "layer", "size", "words"), UNFIT)
def test_layers_that_a_style_cannot_shard(style, layer, size, words):
    _, problems = resolve(nn.ModuleDict({"layer": layer}), size, {"layer": style})
    assert f"layer ({style}, from plan 'layer'): {words}" in problems[0]


@pytest.mark.slow
def test_tensor_plans_of_transformers_are_known():
    """Of all configs in the installed version that carry one; their experts stay whole."""
    hf = pytest.importorskip("transformers")
    configs = [getattr(hf, name) for name in dir(hf) if name.endswith("Config")]
    plans = [getattr(config, "base_model_tp_plan", None) or {} for config in configs]
    assert sum(map(bool, plans)) > 100
    styles = {style for plan in plans for pattern, style in plan.items() if "experts" not in pattern.split(".")}
    assert styles <= set(HuggingFacePlan.STYLES)


def test_models_of_timm_that_cannot_be_sharded():
    timm = pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    normed = VisionTransformer(**{**VIT, "scale_attn_norm": True, "scale_mlp_norm": True, "num_heads": 1})
    for words in ("blocks.0.attn (Attention): it has a norm over all", "blocks.0.mlp (Mlp): it has a norm over all"):
        assert words in rejected(normed)
    swin = timm.create_model("swin_tiny_patch4_window7_224", **SWIN)
    assert "no plan says where the sequence is sharded" in rejected(swin, sequence_parallel=True)


def test_language_models_that_cannot_be_sharded():
    hf = pytest.importorskip("transformers")
    warnings.filterwarnings("ignore")
    llama = {**LLAMA, "hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 2}
    limited = hf.T5EncoderModel(hf.T5Config(**T5))
    limited.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.max_norm = 1.0
    crossing = hf.GPT2Config(**GPT2, add_cross_attention=True)
    cross = hf.BertConfig(**BERT, is_decoder=True, add_cross_attention=True)
    for model, words in [
        (hf.LlamaForCausalLM(hf.LlamaConfig(**llama)), "3 config.num_key_value_heads are not divisible by tensor=2"),
        (hf.GPT2LMHeadModel(crossing), "this plan has no cross-attention"),
        (hf.BertLMHeadModel(cross), "crossattention (BertAttention): this plan has no cross-attention"),
        (limited, "relative_attention_bias (embedding_features, from plan 't5_attention'): max_norm is set, which"),
    ]:
        assert words in rejected(model)
