"""Which module gets which style: registered plans, patterns, and mistakes in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.registries import TENSOR_PLANS
from halfmesh.parallel.tensor_plans import LayerPlan, assign, generalise


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


class Gated(FeedForward):
    """Computes something else."""

    def forward(self, x):
        return super().forward(x) * 2


class Wider(FeedForward):
    """Made otherwise, computes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.more = 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.qkv(x)[..., :4])


class Block(nn.Module):
    def __init__(self, mlp: type[nn.Module] = FeedForward) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(4), mlp()


class Model(nn.Module):
    def __init__(self, mlp: type[nn.Module] = FeedForward) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(mlp) for _ in range(2))
        self.head = nn.Linear(4, 2)


MLP_PLAN = LayerPlan(
    layers=(FeedForward,),
    styles={"up": "colwise", "down": "rowwise"},
    sequence={"": "region", "act": "sequence"},
)
ATTENTION_PLAN = LayerPlan(
    layers=(f"{Attention.__module__}.{Attention.__qualname__}",),
    styles={"": "heads(num_heads)", "qkv": "fused_colwise(3)", "out": "rowwise"},
)


@pytest.fixture
def registered() -> Iterator[None]:
    TENSOR_PLANS.register("my_mlp", MLP_PLAN)
    TENSOR_PLANS.register("my_attention", ATTENTION_PLAN)
    yield
    TENSOR_PLANS.unregister("my_mlp")
    TENSOR_PLANS.unregister("my_attention")


def styles(model: nn.Module, plan: str | Mapping[str, str] = "auto", sequence: bool = False) -> dict[str, str]:
    """The style of each module that has one; asserts that nothing is wrong."""
    assignments, problems = assign(model, plan, sequence)
    assert problems == []
    return {a.name: a.text for a in assignments}


def wrong(model: nn.Module, plan: str | Mapping[str, str]) -> list[str]:
    return assign(model, plan, False)[1]


@pytest.mark.usefixtures("registered")
def test_registered_plans_find_their_layers():
    mlps = {f"blocks.{i}.mlp.{name}": style for i in (0, 1) for name, style in MLP_PLAN.styles.items()}
    heads = {f"blocks.{i}.attention": "heads(num_heads)" for i in (0, 1)}
    qkv = {f"blocks.{i}.attention.qkv": "fused_colwise(3)" for i in (0, 1)}
    out = {f"blocks.{i}.attention.out": "rowwise" for i in (0, 1)}
    assert styles(Model()) == {**mlps, **heads, **qkv, **out}
    assert styles(Model(), "my_mlp") == mlps
    assert styles(Model(), "My_MLP") == mlps
    assert styles(Model(), {"": "auto"}) == styles(Model(), {"*": "auto"}) == styles(Model())
    # The layer itself.
    assert styles(FeedForward()) == MLP_PLAN.styles


@pytest.mark.usefixtures("registered")
def test_sequence_parallelism_adds_to_a_plan():
    assert styles(FeedForward(), sequence=True) == {"up": "colwise", "down": "rowwise", "": "region", "act": "sequence"}


@pytest.mark.usefixtures("registered")
def test_a_derived_class_with_another_forward_is_not_known():
    assert "blocks.0.mlp.up" in styles(Model(Wider))
    assert not any("mlp" in name for name in styles(Model(Gated)))
    assert styles(Model(Gated))["blocks.1.attention.out"] == "rowwise"


@pytest.mark.usefixtures("registered")
def test_a_class_of_the_same_name_elsewhere_is_not_known():
    other = type("Attention", (nn.Module,), {"__module__": "elsewhere", "forward": lambda self, x: x})
    assert styles(nn.Sequential(other())) == {}


@pytest.mark.usefixtures("registered")
def test_auto_for_some_modules():
    assert set(styles(Model(), {"blocks.1": "auto"})) == {
        *("blocks.1.mlp.up", "blocks.1.mlp.down"),
        *("blocks.1.attention", "blocks.1.attention.qkv", "blocks.1.attention.out"),
    }
    assert set(styles(Model(), {"blocks.*.mlp": "auto"})) == {
        f"blocks.{i}.mlp.{n}" for i in (0, 1) for n in ("up", "down")
    }
    chosen = styles(Model(), {"*.mlp": "auto", "head": "colwise_gather"})
    assert chosen["head"] == "colwise_gather"
    assert len(chosen) == 5
    # blocks.1 is not below blocks.10.
    many = nn.Module()
    many.blocks = nn.ModuleList(Block() for _ in range(12))
    assert {name.split(".")[1] for name in styles(many, {"blocks.1": "auto"})} == {"1"}


def test_short_cuts_above_are_switched_off():
    layer = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(4, 4))
    for pattern in ("0.layers.1", "0.layers.1.linear1"):
        chosen = styles(model, {pattern: "auto"})
        assert chosen["0"] == "off(use_nested_tensor)"
        assert "0.layers.1.linear1" in chosen
        assert not any(name.startswith("0.layers.0") for name in chosen)
    assert "1" not in styles(model, {"": "auto"})


def test_patterns():
    assert styles(Model(), {"blocks.*.mlp.up": "colwise"}) == {f"blocks.{i}.mlp.up": "colwise" for i in (0, 1)}
    assert styles(Model(), {"*.up": " colwise "}) == {f"blocks.{i}.mlp.up": " colwise " for i in (0, 1)}
    assert styles(Model(), {"blocks.[0].mlp.up": "colwise", "head": "colwise_gather"}) == {
        "blocks.0.mlp.up": "colwise",
        "head": "colwise_gather",
    }
    assert styles(Model(), {"*": "heads()"}).keys() == dict(Model().named_modules()).keys()


HAS = "it has blocks, blocks.*, blocks.*.attention, blocks.*.attention.out, blocks.*.attention.qkv, blocks.*.mlp, "
MISTAKES = [
    (
        {"blocks.*.mpl.up": "colwise"},
        ["the pattern 'blocks.*.mpl.up' matches no module; did you mean 'blocks.*.mlp.up'?"],
    ),
    ({"block.0.mlp": "auto"}, ["the pattern 'block.0.mlp' matches no module; did you mean 'blocks.*.mlp'?"]),
    ({"layers.3.mlp": "auto"}, ["the pattern 'layers.3.mlp' matches no module; did you mean 'blocks.*.mlp'?"]),
    ({"zzz": "colwise"}, [f"the pattern 'zzz' matches no module; {HAS}blocks.*.mlp.act, blocks.*.mlp.down"]),
    (
        {"head": "colwize"},
        ["plan 'head', module 'head': no tensor style named 'colwize'; did you mean 'colwise'?; registered: colwise, "],
    ),
    (
        {"head": "fused_colwise"},
        ["plan 'head', module 'head': the style 'fused_colwise' does not take these arguments: FusedColwise."],
    ),
    (
        {"head": "colwise", "h*": "rowwise"},
        ["'head' is divided in two ways: colwise by plan 'head', rowwise by plan 'h*'; leave one of them out"],
    ),
    (
        {"*.attention": "heads(num_heads)", "blocks.0.*": "heads(num_heads, width)"},
        [
            "'blocks.0.attention' has its num_heads divided twice: heads(num_heads) by plan '*.attention', "
            "heads(num_heads, width) by plan 'blocks.0.*'; leave one of them out"
        ],
    ),
    (
        {"head": "colwise", "nothing": "rowwise", "noone": "auto"},
        ["the pattern 'nothing' matches no module; it has", "the pattern 'noone' matches no module; it has"],
    ),
]


@pytest.mark.parametrize(("plan", "messages"), MISTAKES)
def test_mistakes_in_patterns(plan, messages):
    found = wrong(Model(), plan)
    assert len(found) == len(messages)
    for message, expected in zip(found, messages, strict=True):
        assert message.startswith(expected)


def test_the_same_style_twice_is_once():
    assert styles(Model(), {"head": "colwise_gather", "he*": "colwise_gather"}) == {"head": "colwise_gather"}


class Careless:
    """A plan that names modules without looking."""

    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        yield "blocks.0.mlp.upp", "colwise"
        yield "head", "colwise"


class Fussy:
    def styles_in(self, model: nn.Module, sequence_parallel: bool) -> Iterator[tuple[str, str]]:
        yield "head", "rowwise"
        raise InputError("the head is too small")


def test_plans_of_other_kinds():
    TENSOR_PLANS.register("careless", Careless())
    TENSOR_PLANS.register("fussy", Fussy())
    try:
        assert wrong(Model(), "careless") == [
            "plan 'careless' names 'blocks.0.mlp.upp', which the model has not; did you mean 'blocks.*.mlp.up'?"
        ]
        assignments, problems = assign(Model(), "fussy", False)
        assert (assignments, problems) == ([], ["the head is too small"])
        assert "the head is too small" in wrong(Model(), "auto")
    finally:
        TENSOR_PLANS.unregister("careless")
        TENSOR_PLANS.unregister("fussy")


@pytest.mark.usefixtures("registered")
def test_two_plans_for_one_layer():
    TENSOR_PLANS.register("other_mlp", LayerPlan((FeedForward,), {"up": "colwise_gather"}))
    try:
        assert wrong(FeedForward(), "auto") == [
            "'up' is divided in two ways: colwise by plan 'my_mlp', colwise_gather by plan 'other_mlp'; choose one "
            "(parallel.tensor.plan='other_mlp')"
        ]
        assert styles(FeedForward(), "other_mlp") == {"up": "colwise_gather"}
    finally:
        TENSOR_PLANS.unregister("other_mlp")


def test_a_layer_that_its_plan_refuses():
    plan = LayerPlan((Attention,), {"qkv": "colwise"}, find_problem=lambda layer: f"{layer.num_heads} are too few")
    with pytest.raises(InputError, match=r"^blocks\.0\.attention \(Attention\): 4 are too few$"):
        list(plan.styles_in(Model(), False))
    with pytest.raises(InputError, match=r"^the model \(Attention\): 4 are too few$"):
        list(plan.styles_in(Attention(), False))


def test_an_assignment_reads_well():
    (assignment,), _ = assign(Model(), {"head": "colwise"}, False)
    assert str(assignment) == "head (colwise, from plan 'head')"
    (assignment,), _ = assign(nn.Linear(2, 2), {"": "colwise"}, False)
    assert str(assignment) == "the model (colwise, from plan '')"


def test_generalise():
    assert generalise("blocks.12.mlp.fc1") == "blocks.*.mlp.fc1"
    assert generalise("blocks.12.3") == "blocks.*.*"
    assert generalise("fc1") == "fc1"
    assert generalise("") == ""
