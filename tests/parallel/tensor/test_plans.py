"""Tensor plans: which layers they divide, and every reason why a plan does not fit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from halfmesh import TENSOR_PLANS, LayerPlan
from halfmesh.errors import InputError
from halfmesh.parallel.tensor.plans import resolve
from tests.support.tensor_parity import rejected


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Doubled(FeedForward):
    """Computes something else."""

    def forward(self, x):
        return super().forward(x) * 2


class Wider(FeedForward):
    """Made otherwise, computes the same."""


class Attention(nn.Module):
    def __init__(self, **counts: int) -> None:
        super().__init__()
        for name, count in (counts or {"num_heads": 4}).items():
            setattr(self, name, count)
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.qkv(x)[..., :4])


def model(mlp: type[nn.Module] = FeedForward, blocks: int = 2) -> nn.Module:
    kinds = {"attention": Attention, "norm": partial(nn.LayerNorm, 4), "mlp": mlp}
    made = nn.ModuleList(nn.ModuleDict({name: make() for name, make in kinds.items()}) for _ in range(blocks))
    return nn.ModuleDict({"blocks": made, "head": nn.Linear(4, 2)})


class Language(nn.Module):
    """An embedding, a block, and a head with the embedding's weight."""

    def __init__(self, tied: bool = True, **counts: int) -> None:
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(12, 4), Attention(**counts), nn.Linear(4, 12)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.attention(self.words(ids)))


def decoder() -> nn.Module:
    def pair() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    layer = {"norm": partial(nn.LayerNorm, 8), "mlp": pair, "other": partial(nn.MultiheadAttention, 8, 4)}
    layers = nn.ModuleList(nn.ModuleDict({name: make() for name, make in layer.items()}) for _ in range(2))
    return nn.ModuleDict({"neck": pair(), "layers": layers, "norm": nn.LayerNorm(8), "tail": pair()})


MLP_PLAN = LayerPlan((FeedForward,), {"up": "colwise", "down": "rowwise"})
ATTENTION_PLAN = LayerPlan(
    (f"{Attention.__module__}.{Attention.__qualname__}",),
    {"": "heads(num_heads)", "qkv": "fused_colwise(3)", "out": "rowwise"},
)
LANGUAGE = {"attention.qkv": "fused_colwise(3)", "attention.out": "rowwise"}
MLPS = {"layers.*.mlp.0": "colwise", "layers.*.mlp.2": "rowwise"}
SEQUENCE = {"layers.0": "sequence_begin", "norm": "sequence_end", **MLPS}
SEQUENCE |= {"layers.*.mlp": "region", "layers.*.norm": "sequence", "layers.*.other": "partial"}


def without(name: str) -> dict[str, str]:
    return {pattern: style for pattern, style in SEQUENCE.items() if pattern != name}


@contextmanager
def registered(**plans: Any) -> Iterator[None]:
    with ExitStack() as stack:
        for name, plan in plans.items():
            TENSOR_PLANS.register(name, plan)
            stack.callback(TENSOR_PLANS.unregister, name)
        yield


# -- what is divided -------------------------------------------------------------------------------------------------

MLP, HEADS, BOTH = ["mlp.down", "mlp.up"], ["attention.out", "attention.qkv"], range(2)
ALL = [f"blocks.{i}.{name}" for i in BOTH for name in HEADS + MLP]
MLPS_OF_ALL = [f"blocks.{i}.{name}" for i in BOTH for name in MLP]
TAIL = {"tail.0": "colwise", "tail.2": "rowwise"}
NECK = {"neck.0": "colwise", "neck.2": "rowwise"}
DIVIDED: dict[str, tuple[Callable[[], nn.Module], Any, list[str]]] = {
    "auto": (model, "auto", ALL),
    "by name": (model, "my_mlp", MLPS_OF_ALL),
    "auto everywhere": (model, {"*": "auto"}, ALL),
    "auto in a block": (partial(model, blocks=11), {"blocks.1": "auto"}, [f"blocks.1.{name}" for name in HEADS + MLP]),
    "auto and a pattern": (model, {"*.mlp": "auto", "head": "colwise_gather"}, [*MLPS_OF_ALL, "head"]),
    "the layer itself": (FeedForward, "auto", ["down", "up"]),
    "a derived class": (partial(model, Wider), "auto", ALL),
    "with another forward": (partial(model, Doubled), "auto", [name for name in ALL if "attention" in name]),
    "a pattern": (model, {"blocks.[0].mlp.up": " Colwise_Gather "}, ["blocks.0.mlp.up"]),
    "the same twice": (model, {"head": "colwise_gather", "he*": "colwise_gather"}, ["head"]),
    "words": (Language, "auto", ["attention.out", "attention.qkv", "head", "words"]),
    "words not tied": (partial(Language, tied=False), "auto", ["attention.out", "attention.qkv", "words"]),
    "tied by patterns": (Language, {"words": "vocab", "head": "colwise_gather"}, ["head", "words"]),
    "heads() from the shape": (partial(Language, num_kv_heads=4), {**LANGUAGE, "attention": "heads()"}, HEADS),
    "no count of heads": (partial(Language, head_dim=4), LANGUAGE, HEADS),
    "beyond the sequence": (
        decoder,
        {**SEQUENCE, **TAIL, **NECK},
        [*TAIL, *NECK, *(f"layers.{i}.mlp.{place}" for i in BOTH for place in (0, 2))],
    ),
    "gathered and split in a region": (
        decoder,
        {**SEQUENCE, "layers.*.mlp.0": "colwise_gather", "layers.*.mlp.2": "rowwise_split"},
        [f"layers.{i}.mlp.{place}" for i in BOTH for place in (0, 2)],
    ),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_which_layers_are_divided(name):
    make, plan, expected = DIVIDED[name]
    with registered(my_mlp=MLP_PLAN, my_attention=ATTENTION_PLAN, words=LayerPlan((Language,), {"words": "vocab"})):
        assignments, problems = resolve(make(), 2, plan, sequence_parallel=make is decoder)
    assert problems == []
    assert sorted({each.name for each in assignments if "weight" in each.splits()}) == sorted(expected)


# -- what cannot be --------------------------------------------------------------------------------------------------


class Strange(nn.Module):
    """No two layers follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(30, 40)) for _ in range(3))
        self.scale = nn.Parameter(nn.Linear(3, 3).weight)
        self.tail = nn.Linear(4, 2)


def compiled(part: str) -> nn.Module:
    model = Language()
    model.get_submodule(part).compile(backend="eager")
    return model


def with_a_plan() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.tp_plan = {"0": "colwise"}
    model.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=None)
    return model


TWICE = {"*.attention": "heads(num_heads)", "blocks.[0].attention": "heads(num_heads, num_heads)"}
SHARED = {**LANGUAGE, "words": "vocab", "head": "rowwise_split"}
NO_PLAN = "no plan is registered for any layer of Strange. Write one: parallel ="
COMPILED = "the model is already compiled, so its layers cannot be sharded"
REJECTED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (model, {"blocks.*.mpl.up": "colwise"}, "'blocks.*.mpl.up' matches no module; did you mean 'blocks.*.mlp.up'?"),
    (model, {"layers.3.mlp": "auto"}, "'layers.3.mlp' matches no module; did you mean 'blocks.*.mlp'?"),
    (model, {"zzz": "colwise"}, "the pattern 'zzz' matches no module; it has blocks, blocks.*, blocks.*.attention"),
    (model, {"head": "fused_colwise"}, "module 'head': the style 'fused_colwise' does not take these arguments"),
    (model, {"head": "fused_colwise(3"}, "'fused_colwise(3' is not a style; write a name"),
    (model, {"head": "colwise", "h*": "rowwise"}, "sharded twice: colwise by plan 'head', rowwise by plan 'h*'"),
    (model, TWICE, "'blocks.0.attention' has its num_heads sharded twice: heads(num_heads) by plan '*.attention'"),
    (Strange, "auto", NO_PLAN),
    (Strange, "timm_mlp", "plan 'timm_mlp' shards nothing of Strange"),
    (partial(compiled, ""), LANGUAGE, COMPILED),
    (partial(compiled, "attention"), LANGUAGE, COMPILED),
    (
        partial(Language, head_dim=1),
        {**LANGUAGE, "head": "colwise_gather"},
        "words.weight (whole) and head.weight (dim 0) share one weight, but would shard it",
    ),
    (partial(Language, head_dim=1), SHARED, "words.weight (dim 0) and head.weight (dim 1)"),
    *(
        (
            partial(Language, **{name: 4}),
            LANGUAGE,
            f"'attention' has {name}=4, and its features are sharded; add 'attention': 'heads({name})' if its forward",
        )
        for name in ("num_heads", "n_head", "nhead", "num_kv_heads", "heads")
    ),
    (with_a_plan, "auto", "3 config.num_attention_heads are not divisible by tensor=2; tensor can be 1, 3"),
]


@pytest.mark.parametrize(("make", "plan", "words"), REJECTED)
def test_plans_that_do_not_fit_a_model(make, plan, words):
    assert words in rejected(make(), plan)


class Careless:
    """A plan that has a misspelt style, and rejects the model."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        yield "head", "colwize"
        raise InputError("the head is too small")


def test_registered_plans_that_cannot_be_followed():
    gathered = LayerPlan((FeedForward,), {"up": "colwise_gather"})
    few = LayerPlan((Attention,), {"qkv": "colwise"}, find_problem=lambda layer: f"{layer.num_heads} are too few")
    with registered(careless=Careless()):
        assert "the head is too small" in rejected(model(), "careless")
    with registered(misspelt=LayerPlan((FeedForward,), {"up": "colwize"})):
        message = rejected(FeedForward(), "misspelt")
        assert "plan 'misspelt', module 'up': no tensor style named 'colwize'; did you mean 'colwise'" in message
    with registered(my_mlp=MLP_PLAN, other_mlp=gathered):
        assert "or name one plan (parallel.tensor.plan = 'name')" in rejected(FeedForward())
    with registered(few=few):
        assert "blocks.0.attention (Attention): 4 are too few" in rejected(model())


def test_the_example_of_a_plan_names_layers_of_the_model():
    layers = {"up": nn.Linear(4, 8), "act": nn.GELU(), "down": nn.Linear(8, 4)}
    for model, plan in (
        (nn.ModuleList(nn.ModuleDict(layers) for _ in "ab"), {"*.up": "colwise", "*.down": "rowwise"}),
        (nn.Sequential(*layers.values()), {"0": "colwise", "2": "rowwise"}),
    ):
        assert f"plan={plan}" in rejected(model)
        assert resolve(model, 2, plan)[1] == []
    assert "plan={...}" in rejected(Strange())


def test_all_problems_are_told_together():
    plan = {**LANGUAGE, "attention": "heads(num_heads)", "head": "colwise_gather"}
    message = rejected(Language(num_heads=3), plan, size=8)
    assert "attention (heads(num_heads), from plan 'attention'): 3 num_heads are not divisible by tensor=8" in message
    assert "head (colwise_gather, from plan 'head'): 12 output features are not divisible by tensor=8" in message


def test_blocks_with_the_same_problem_are_one_line():
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6)) for _ in range(12)])
    _, problems = resolve(blocks, 2, {"*.0": "colwise", "*.2": "rowwise"})
    expected = ("0.0 (colwise, from plan '*.0'): 9 output features", "0.2 (rowwise, from plan '*.2'): 9 input features")
    assert problems == [
        f"{text} are not divisible by tensor=2; tensor can be 1, 3, 9 (11 more layers like it)" for text in expected
    ]


OUTSIDE = "under sequence_parallel=True it must be in a 'region'"
WHOLE = "it is not between 'sequence_begin' and 'sequence_end', in the order in which the model has its modules"
NOWHERE = "no plan says where the sequence is sharded"
OTHER = {"layers.*.other": "attention", "layers.*.other.out_proj": "rowwise"}
UNKNOWN = [
    *((plan, NOWHERE) for plan in (without("layers.0"), without("norm"), MLPS)),
    (without("layers.*.mlp"), f"layers.0.mlp.0 (colwise, from plan 'layers.*.mlp.0'): {OUTSIDE}"),
    ({**SEQUENCE, **NECK, "neck": "region"}, f"neck (region, from plan 'neck'): {WHOLE}"),
    ({**SEQUENCE, **TAIL, "tail": "region"}, f"tail (region, from plan 'tail'): {WHOLE}"),
    ({**SEQUENCE, **OTHER}, f"layers.0.other (attention, from plan 'layers.*.other'): {OUTSIDE}"),
    ({**SEQUENCE, "layers.*.mlp.2": "rowwise_split"}, "mlp.2'): its input is that of its 'region'"),
]


@pytest.mark.parametrize(("plan", "words"), UNKNOWN)
def test_sequence_parallelism_needs_to_know_all_that_lies_between(plan, words):
    assert words in rejected(decoder(), plan, sequence_parallel=True)
    if words != NOWHERE:
        assert words in rejected(decoder(), plan), "patterns are checked without the key, too"
