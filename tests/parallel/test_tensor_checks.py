"""Every reason why a plan does not fit a model, or itself, found before anything is cut."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from halfmesh.parallel.registries import TENSOR_PLANS
from halfmesh.parallel.tensor_checks import resolve
from halfmesh.parallel.tensor_plans import LayerPlan


class Attention(nn.Module):
    def __init__(self, **counts: int) -> None:
        super().__init__()
        for name, count in counts.items():
            setattr(self, name, count)
        self.q, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return self.out(self.q(x))


class Language(nn.Module):
    """An embedding, a block, and a head with the embedding's weight."""

    def __init__(self, tied: bool = True, **counts: int) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.attention = Attention(**counts)
        self.head = nn.Linear(8, 12)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, ids):
        return self.head(self.attention(self.words(ids)))


PLAN = {"attention.q": "colwise", "attention.out": "rowwise"}


def problems(
    model: nn.Module, plan: str | Mapping[str, str] = "auto", size: int = 2, sequence: bool = False
) -> list[str]:
    return resolve(model, size, plan, sequence)[1]


def test_a_plan_without_problems():
    resolved, found = resolve(Language(), 2, PLAN)
    assert found == []
    assert [(a.name, a.text) for a in resolved.assignments] == [
        ("attention.q", "colwise"),
        ("attention.out", "rowwise"),
    ]
    assert resolved.size == 2
    assert resolved.regions == []
    assert not resolved.in_region("attention.q")


# -- models of which nothing is known --------------------------------------------------------------------------------


class Strange(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Linear(30, 40)) for _ in range(3))
        self.scale = nn.Parameter(nn.Linear(3, 3).weight)
        self.tail = nn.Linear(4, 2)

    def forward(self, x):
        return x


ADVICE = (
    "Write one: parallel = dict(tensor=dict(size=..., plan={'*.fc1': 'colwise', '*.fc2': 'rowwise'})), where 'colwise' "
    "layers hand divided features to 'rowwise' ones"
)
LARGEST = (
    "Its largest layers: layers.*.* (Linear) with 3,720 numbers, layers.*.* (Conv2d) with 228 numbers, tail (Linear) "
    "with 10 numbers, the model itself (Strange) with 9 numbers"
)


def test_no_plan_for_a_model():
    assert problems(Strange()) == [f"no plan is registered for any layer of Strange. {LARGEST}. {ADVICE}"]
    assert problems(Strange(), "timm_mlp") == [f"plan 'timm_mlp' divides nothing of Strange. {LARGEST}. {ADVICE}"]
    (message,) = problems(Strange(), {"tail": "heads()"})
    assert message.startswith("plan {'tail': 'heads()'} divides nothing of Strange. ")


def test_no_plan_for_a_sequential_model_names_its_layers():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Sequential(nn.Linear(8, 2)))
    (message,) = problems(model)
    assert "Its largest layers: 0 (Linear) with 40 numbers, 2.0 (Linear) with 18 numbers. Write one" in message


def test_a_compiled_model():
    model, part = Language(), Language()
    model.compile(backend="eager")
    part.attention.compile(backend="eager")
    for compiled in (model, part, torch.compile(Language(), backend="eager")):
        assert problems(compiled, {"*attention.q": "colwise", "*attention.out": "rowwise"}) == [
            "the model is compiled, and its layers cannot be divided any more; pass it uncompiled"
        ]


def test_an_unknown_plan_is_named():
    (message,) = problems(Language(), "timm_mpl")
    assert message.startswith("no tensor plan named 'timm_mpl'; did you mean 'timm_mlp'?")


# -- weights that modules share --------------------------------------------------------------------------------------


def test_torn_ties():
    (message,) = problems(Language(), {**PLAN, "head": "colwise_gather"})
    assert message == (
        "one weight is shared by words.weight (whole) and head.weight (dim 0), which would divide it differently; "
        "give these modules styles that divide it alike ('vocab' for an embedding and its head), or leave all of them "
        "whole"
    )
    (message,) = problems(Language(), {**PLAN, "words": "vocab", "head": "rowwise_split"})
    assert "words.weight (dim 0) and head.weight (dim 1)" in message
    assert problems(Language(), {**PLAN, "words": "vocab", "head": "vocab"}) == []
    assert problems(Language(), {**PLAN, "words": "vocab", "head": "colwise_gather"}) == []
    assert problems(Language(tied=False), {**PLAN, "head": "colwise_gather"}) == []


@pytest.mark.parametrize("known", ["words", "head"])
def test_auto_divides_both_modules_that_share_words(known):
    TENSOR_PLANS.register("half", LayerPlan((Language,), {known: "vocab", **PLAN}))
    try:
        resolved, found = resolve(Language(), 2)
        assert found == []
        other = ({"words", "head"} - {known}).pop()
        assert (other, "vocab", "auto") in [(a.name, a.text, a.plan) for a in resolved.assignments]
        assert len(resolve(Language(tied=False), 2)[0].assignments) == 3
    finally:
        TENSOR_PLANS.unregister("half")


class ScaledWords(nn.Embedding):
    def forward(self, ids):
        return super().forward(ids) * 2


def test_words_that_cannot_be_divided_are_told_once():
    model = Language(tied=False)
    model.words = ScaledWords(12, 8)
    model.head.weight = model.words.weight
    TENSOR_PLANS.register("words", LayerPlan((Language,), {"words": "vocab", "head": "vocab"}))
    try:
        assert problems(model) == [
            "words (vocab, from plan 'words'): it is a ScaledWords, and this style is for torch.nn.Embedding; choose "
            "another style, or leave it whole"
        ]
    finally:
        TENSOR_PLANS.unregister("words")


# -- heads -----------------------------------------------------------------------------------------------------------


COUNTS = ["num_heads", "n_heads", "n_head", "nheads", "nhead", "num_attention_heads", "num_kv_heads", "heads"]


@pytest.mark.parametrize("name", COUNTS)
def test_heads_that_nobody_divides(name):
    model = Language(**{name: 4})
    (message,) = problems(model, PLAN)
    assert message == (
        f"'attention' has {name}=4, and its features are divided; add 'attention': 'heads({name})' if its forward "
        "reads that number, or 'heads()' if it takes the number of heads from the shape (-1)"
    )
    assert problems(model, {**PLAN, "attention": f"heads({name})"}) == []
    assert problems(model, {**PLAN, "attention": "heads()"}) == []
    assert problems(model, {"attention.q": "colwise_gather"}) == [], "features are whole again"


@pytest.mark.parametrize("name", ["head_dim", "head_size", "dim_head", "head_features", "width"])
def test_other_numbers_count_no_heads(name):
    assert problems(Language(**{name: 4}), PLAN) == []
    assert problems(Language(num_heads=True), PLAN) == [], "nor does a flag"


def test_all_counts_are_named():
    model = nn.ModuleDict({"layers": nn.ModuleList([Attention(num_heads=4, n_kv_heads=2, heads=3)])})
    (message,) = problems(model, {"layers.*.q": "colwise"})
    assert "'layers.0' has num_heads=4, " in message
    assert "add 'layers.*': 'heads(num_heads, n_kv_heads, heads)' if" in message


def test_all_problems_are_told_together():
    model = Language(num_heads=3)
    found = problems(model, {**PLAN, "attention": "heads(num_heads)", "head": "colwise_gather"}, size=8)
    assert [message.partition(":")[0] for message in found] == [
        "attention (heads(num_heads), from plan 'attention')",
        "head (colwise_gather, from plan 'head')",
    ]
