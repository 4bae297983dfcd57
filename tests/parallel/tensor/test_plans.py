"""Tensor plans: which layers they divide, and every reason why a plan does not fit a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from halfmesh import TENSOR_PLANS, LayerPlan
from halfmesh.errors import InputError
from halfmesh.parallel.tensor.plans import resolve
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, refused


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


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module]) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(4), mlp()


class Model(nn.Module):
    def __init__(self, mlp: type[nn.Module] = FeedForward, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mlp) for _ in range(blocks))
        self.head = nn.Linear(4, 2)


class Language(nn.Module):
    """An embedding, a block, and a head with the embedding's weight."""

    def __init__(self, tied: bool = True, **counts: int) -> None:
        super().__init__()
        self.words, self.attention, self.head = nn.Embedding(12, 4), Attention(**counts), nn.Linear(4, 12)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.attention(self.words(ids)))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(8), nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.other = nn.MultiheadAttention(8, 4)

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.tail = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))


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
TAIL = {"tail.0": "colwise", "tail.1": "rowwise"}
NECK = {"neck.0": "colwise", "neck.1": "rowwise"}
DIVIDED: dict[str, tuple[Callable[[], nn.Module], Any, list[str] | None]] = {
    "auto": (Model, "auto", ALL),
    "by name": (Model, "my_mlp", [f"blocks.{i}.{name}" for i in BOTH for name in MLP]),
    "auto everywhere": (Model, {"*": "auto"}, ALL),
    "auto in a block": (lambda: Model(blocks=11), {"blocks.1": "auto"}, [f"blocks.1.{name}" for name in HEADS + MLP]),
    "auto and a pattern": (
        Model,
        {"*.mlp": "auto", "head": "colwise_gather"},
        [*(f"blocks.{i}.{name}" for i in BOTH for name in MLP), "head"],
    ),
    "the layer itself": (FeedForward, "auto", ["down", "up"]),
    "a derived class": (lambda: Model(Wider), "auto", ALL),
    "a derived class with another forward": (
        lambda: Model(Doubled),
        "auto",
        [f"blocks.{i}.{name}" for i in BOTH for name in HEADS],
    ),
    "a pattern": (Model, {"blocks.[0].mlp.up": " Colwise_Gather "}, ["blocks.0.mlp.up"]),
    "the same twice": (Model, {"head": "colwise_gather", "he*": "colwise_gather"}, ["head"]),
    "words": (Language, "auto", ["attention.out", "attention.qkv", "head", "words"]),
    "words not tied": (lambda: Language(tied=False), "auto", ["attention.out", "attention.qkv", "words"]),
    "tied by patterns": (
        Language,
        {"words": "vocab", "head": "colwise_gather"},
        ["head", "words"],
    ),
    "heads() from the shape": (
        lambda: Language(num_kv_heads=4),
        {**LANGUAGE, "attention": "heads()"},
        ["attention.out", "attention.qkv"],
    ),
    "no count of heads": (lambda: Language(head_dim=4), LANGUAGE, ["attention.out", "attention.qkv"]),
    "beyond the sequence": (Decoder, {**SEQUENCE, **TAIL, **NECK}, None),
}


def divided(rank: int, world_size: int) -> tuple[dict[str, list[str]], int]:
    """The modules whose weights are divided."""
    found = {}
    words = LayerPlan((Language,), {"words": "vocab"})
    with registered(my_mlp=MLP_PLAN, my_attention=ATTENTION_PLAN, words=words):
        for name, (make, plan, _) in DIVIDED.items():
            model = make()
            sizes = {n: m.weight.shape for n, m in model.named_modules() if hasattr(m, "weight")}
            divide(model, plan, make is Decoder)
            modules = dict(model.named_modules())
            found[name] = sorted(n for n, shape in sizes.items() if modules[n].weight.shape != shape)
        model = Model()
        divide(model)
    return found, model.blocks[1].attention.num_heads


@pytest.mark.distributed
def test_which_layers_are_divided():
    for found, heads in run_ranks(divided, 2):
        assert heads == 2
        for name, (*_, expected) in DIVIDED.items():
            assert expected is None or found[name] == sorted(expected), name


# -- what cannot be --------------------------------------------------------------------------------------------------


def test_patterns_that_fit_nothing_or_each_other():
    heads = {"*.attention": "heads(num_heads)", "blocks.[0].attention": "heads(num_heads, num_heads)"}
    for plan, words in [
        ({"blocks.*.mpl.up": "colwise"}, "'blocks.*.mpl.up' matches no module; did you mean 'blocks.*.mlp.up'?"),
        ({"layers.3.mlp": "auto"}, "'layers.3.mlp' matches no module; did you mean 'blocks.*.mlp'?"),
        ({"zzz": "colwise"}, "the pattern 'zzz' matches no module; it has blocks, blocks.*, blocks.*.attention"),
        ({"head": "fused_colwise"}, "module 'head': the style 'fused_colwise' does not take these arguments"),
        ({"head": "fused_colwise(3"}, "'fused_colwise(3' is not a style; write a name"),
        ({"head": "colwise(3)"}, "the style 'colwise(3)' does not take these arguments"),
        (
            {"head": "colwise", "h*": "rowwise"},
            "'head' has its weight sharded twice: colwise by plan 'head', rowwise by plan 'h*'; leave out one",
        ),
        (heads, "'blocks.0.attention' has its num_heads sharded twice: heads(num_heads) by plan '*.attention'"),
    ]:
        assert words in refused(Model(), plan), plan


class Careless:
    """A plan that has a misspelt style, and refuses the model."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        yield "head", "colwize"
        raise InputError("the head is too small")


def test_registered_plans_that_cannot_be_followed():
    gathered = LayerPlan((FeedForward,), {"up": "colwise_gather"})
    few = LayerPlan((Attention,), {"qkv": "colwise"}, find_problem=lambda layer: f"{layer.num_heads} are too few")
    with registered(careless=Careless()):
        assert "the head is too small" in refused(Model(), "careless")
    with registered(misspelt=LayerPlan((FeedForward,), {"up": "colwize"})):
        message = refused(FeedForward(), "misspelt")
        assert "plan 'misspelt', module 'up': no tensor style named 'colwize'; did you mean 'colwise'" in message
    with registered(my_mlp=MLP_PLAN, other_mlp=gathered):
        assert "or name one plan (parallel.tensor.plan = 'name')" in refused(FeedForward())
    with registered(few=few):
        assert "blocks.0.attention (Attention): 4 are too few" in refused(Model())


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(30, 40)) for _ in range(3))
        self.scale = nn.Parameter(nn.Linear(3, 3).weight)
        self.tail = nn.Linear(4, 2)


def test_a_model_that_no_plan_knows():
    message = refused(Strange())
    assert "no plan is registered for any layer of Strange. Write one: parallel =" in message
    assert "plan={...}" in message, "no two layers follow each other"
    assert "plan 'timm_mlp' shards nothing of Strange" in refused(Strange(), "timm_mlp")


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (
            nn.ModuleList(
                nn.ModuleDict({"up": nn.Linear(4, 8), "act": nn.GELU(), "down": nn.Linear(8, 4)}) for _ in "ab"
            ),
            {"*.up": "colwise", "*.down": "rowwise"},
        ),
        (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), {"0": "colwise", "2": "rowwise"}),
    ],
)
def test_the_example_of_a_plan_names_layers_of_the_model(model, plan):
    message = refused(model)
    assert f"plan={plan}" in message
    assert resolve(model, 2, plan)[1] == []


def test_a_model_that_is_compiled_already():
    model, part = Language(), Language()
    model.compile(backend="eager")
    part.attention.compile(backend="eager")
    for compiled in (model, part):
        assert "the model is compiled already, and its layers cannot be sharded" in refused(compiled, LANGUAGE)


def test_shared_weights_are_divided_alike_or_refused():
    assert "one weight is shared by words.weight (whole) and head.weight (dim 0), which would shard it" in refused(
        Language(head_dim=1), {**LANGUAGE, "head": "colwise_gather"}
    )
    message = refused(Language(head_dim=1), {**LANGUAGE, "words": "vocab", "head": "rowwise_split"})
    assert "words.weight (dim 0) and head.weight (dim 1)" in message


@pytest.mark.parametrize("name", ["num_heads", "n_head", "nhead", "num_kv_heads", "heads"])
def test_counts_of_heads_that_nobody_divides(name):
    words = f"'attention' has {name}=4, and its features are sharded; add 'attention': 'heads({name})' if its forward"
    assert words in refused(Language(**{name: 4}), LANGUAGE)


def test_all_problems_are_told_together():
    plan = {**LANGUAGE, "attention": "heads(num_heads)", "head": "colwise_gather"}
    message = refused(Language(num_heads=3), plan, size=8)
    assert "attention (heads(num_heads), from plan 'attention'): 3 num_heads are not divisible by tensor=8" in message
    assert "head (colwise_gather, from plan 'head'): 12 output features are not divisible by tensor=8" in message


OUTSIDE = "under sequence_parallel=True it has to be in a 'region'"
WHOLE = "it is not between 'sequence_begin' and 'sequence_end', in the order in which the model has its modules"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        *(
            (plan, "no plan says where the sequence is sharded")
            for plan in (without("layers.0"), without("norm"), MLPS)
        ),
        (without("layers.*.mlp"), f"layers.0.mlp.0 (colwise, from plan 'layers.*.mlp.0'): {OUTSIDE}"),
        ({**SEQUENCE, **NECK, "neck": "region"}, f"neck (region, from plan 'neck'): {WHOLE}"),
        ({**SEQUENCE, **TAIL, "tail": "region"}, f"tail (region, from plan 'tail'): {WHOLE}"),
        (
            {**SEQUENCE, "layers.*.other": "attention", "layers.*.other.out_proj": "rowwise"},
            "layers.0.other (attention, from plan 'layers.*.other'): " + OUTSIDE,
        ),
        ({**SEQUENCE, "layers.*.mlp.2": "rowwise_split"}, "mlp.2'): its input is that of its 'region'"),
    ],
)
def test_sequence_parallelism_needs_to_know_all_that_lies_between(plan, words):
    assert words in refused(Decoder(), plan, sequence_parallel=True)


def test_patterns_that_shard_the_sequence_are_checked_without_the_key_too():
    assert f"layers.0.mlp.0 (colwise, from plan 'layers.*.mlp.0'): {OUTSIDE}" in refused(
        Decoder(), without("layers.*.mlp")
    )


def test_features_that_were_gathered_in_a_region_may_be_split_there():
    plan = {**SEQUENCE, "layers.*.mlp.0": "colwise_gather", "layers.*.mlp.2": "rowwise_split"}
    assert resolve(Decoder(), 2, plan, sequence_parallel=True)[1] == []


def test_models_that_bring_a_plan_with_heads_that_do_not_fit():
    model = nn.Sequential(nn.Linear(4, 4))
    model.tp_plan = {"0": "colwise"}
    model.config = SimpleNamespace(num_attention_heads=3, num_key_value_heads=None)
    assert "3 config.num_attention_heads are not divisible by tensor=2; tensor can be 1, 3" in refused(model)
