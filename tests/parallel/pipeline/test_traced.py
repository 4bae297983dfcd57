"""Models cut at modules that are named: their pieces compute what they compute, or it is said why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.pipeline.pieces import Call
from halfmesh.parallel.pipeline.traced import TracedPartition
from tests.support.pipeline_parts import assert_equal, check_pieces, compose

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def linear() -> nn.Linear:
    return nn.Linear(4, 4)


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = linear(), linear(), linear()
        self.weight = nn.Parameter(torch.rand(4))
        self.register_buffer("table", torch.randn(10, 4))
        self.plain = torch.tensor(3.0)  # neither parameter nor buffer


def make(forward: Any) -> Base:
    """A model with this forward."""
    return type("Net", (Base,), {"forward": forward})()


# -- what can be cut -------------------------------------------------------------------------------------------------


def skips(self, x):
    first = self.a(x + self.table[:3] * self.weight)
    second = self.b(first)
    return self.c(second) + first + x


def dense(self, x):
    found = [self.a(x + self.table[:3] * self.weight)]
    for module in (self.b, self.c):
        found.append(module(found[-1]))
    return torch.stack(found).sum(0), *found


def trains_otherwise(self, x):
    x = self.a(x + self.table[:3] * self.weight)
    if self.training:
        x = x * 2
    return self.c(self.b(x))


def drops(self, x):
    x = F.dropout(self.a(x + self.table[:3]), training=self.training)
    x = F.dropout(self.b(x), 0.5, self.training)
    return self.c(x) * self.weight + torch.rand_like(x) + torch.rand(4)


def shapes_late(self, x):
    first = self.a(x + self.table[: x.size(0)])
    shape, rows = first.shape, x.size(0)
    return self.c(self.b(first)).view(shape[0], 2, -1).reshape(rows, shape[1]) * self.weight


def twice(self, x):
    x = self.a(x * self.weight + self.table[:3])
    x = self.a(self.b(x))
    return self.c(self.b(x))


def parameter_everywhere(self, x):
    return self.c(self.b(self.a(x * self.weight) * self.weight)) * self.weight + self.table[0]


def in_place(self, x):
    x = self.a(x * self.weight + self.table[:3])
    x = self.b(x)
    x.relu_()
    y = F.relu(self.c(x), inplace=True)
    same = y
    y += x
    return y * same


def in_place_on_the_way(self, x):
    y = x.clone()
    y += 1
    size = x.size(1)
    size += 0
    return self.c(self.b(self.a(y * self.weight + self.table[:3]))).view(-1, size) + y


def masks(self, x):
    mask = torch.ones((x.shape[0], x.shape[0]), device=x.device).tril()
    position = torch.arange(x.size(1)) * torch.tensor(2.0)
    return mask @ self.c(mask @ self.b(self.a(x + position) * self.weight)) + position + self.table[0]


def constants(self, x):
    return self.c(self.b(self.a(x)) * self.plain) * (self.plain * 2) + (self.table * self.weight)[:3]


def mapping(self, x):
    x = self.a(x * self.weight + self.table[:3])
    y = self.b(x)
    return {"out": self.c(y), "all": [x, (y, None)], "name": "y"}


@dataclass
class Output:
    logits: torch.Tensor
    hidden: tuple[torch.Tensor, ...]


def data_class(self, x):
    x = self.a(x * self.weight + self.table[:3])
    y = self.b(x)
    return Output(logits=self.c(y), hidden=(x, y))


def counts(self, x):
    x = self.a(x * self.weight + self.table[0])
    self.table.add_(1)
    return self.c(self.b(x)) + self.table[0]


FORWARDS = [skips, dense, trains_otherwise, drops, shapes_late, twice, parameter_everywhere, in_place]
FORWARDS += [in_place_on_the_way, masks, constants, mapping, data_class, counts]


@pytest.mark.parametrize("forward", FORWARDS)
def test_forward(forward):
    model = make(forward)
    known = set(vars(model)) | set(model.state_dict())
    table = model.table.clone()
    pieces = check_pieces(model, [X], partition=("b", "c"))
    assert [piece.name for piece in pieces] == ["the beginning", "b", "c"]
    assert set(vars(model)) | set(model.state_dict()) == known
    assert torch.equal(model.table, table)


def test_the_output_can_be_changed():
    output = compose(make(mapping), TracedPartition(("b",)).pieces_of(make(mapping)), X)
    assert type(output) is dict
    assert type(output["all"]) is list


def test_a_module_may_change_the_list_that_it_is_given():
    class Pops(nn.Module):
        def forward(self, items: list[torch.Tensor], options: dict[str, Any]) -> torch.Tensor:
            options["seen"] = True
            return items.pop() + items.pop()

    def forward(self, x):
        x = self.a(x + self.table[:3] * self.weight)
        return self.c(self.pops([self.b(x), x], {}))

    model = make(forward)
    model.pops = Pops()
    check_pieces(model, [X], partition=("b", "c"))


# -- arguments -------------------------------------------------------------------------------------------------------


def options(self, x, mask=None, flag=False, size=(2, 2), scale=1.0, kind="add"):
    x = self.a(x * self.weight + self.table[:3]) * scale
    if mask is not None:
        x = x * mask
    if flag:
        x = x * 2
    x = x + 1 if kind == "add" else x * 3
    return self.c(self.b(x)).view(-1, *size)


@pytest.mark.parametrize(
    "given",
    [{}, {"mask": X}, {"mask": None}, {"flag": True}, {"flag": False}, {"scale": 2.0}, {"kind": "mul"}],
    ids=str,
)
def test_optional_arguments(given):
    check_pieces(make(options), [X], given, ("b", "c"))


def test_calls_of_several_kinds_in_turn():
    model = make(options)
    pieces = TracedPartition(("b", "c")).pieces_of(model)
    for given in ({}, {"mask": X}, {}, {"mask": X, "flag": True}, {"mask": None}, {"flag": True}, {"kind": "x"}):
        for positional in (True, False):
            args, kwargs = ((X,), given) if positional else ((), {"x": X, **given})
            assert_equal(compose(model, pieces, *args, **kwargs), model(X, **given))
    assert_equal(compose(model, pieces, X, X, True), model(X, X, True))


def test_a_needed_argument_that_is_none():
    def forward(self, x, mask):
        x = self.a(x * self.weight + self.table[:3])
        return self.c(self.b(x if mask is None else x * mask))

    for mask in (None, X):
        check_pieces(make(forward), [X, mask], partition=("b", "c"))


def test_arguments_by_keyword_only_and_odd_names():
    def forward(self, input, /, max=None, *, b):
        return self.c(self.b(self.a(input * self.weight + self.table[:3]))) + b

    check_pieces(make(forward), [X], {"b": X}, ("b", "c"))


def test_wrong_arguments():
    model = make(skips)
    pieces = TracedPartition(("b",)).pieces_of(model)
    for args, kwargs in (((), {}), ((X, X), {}), ((X,), {"y": X})):
        with pytest.raises(InputError, match=r"Net.forward: (missing|too many|got an unexpected)"):
            compose(model, pieces, *args, **kwargs)


# -- containers ------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.training:
            x = x * 2
        return self.second(F.dropout(x, 0.5, self.training)) + x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.rows = nn.ModuleList([linear(), nn.Sequential(linear(), nn.GELU(), linear()), linear()])
        self.by_name = nn.ModuleDict({"inner": Inner(), "gru": nn.GRU(4, 4, batch_first=True)})
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for row in self.rows:
            x = x + row(x)
        x = self.by_name["inner"](x)
        x, last = self.by_name["gru"](x)
        return F.linear(self.norm(x.transpose(1, 2)).transpose(1, 2) + last.transpose(0, 1), self.embed.weight)


IDS = torch.arange(6).view(2, 3)


@pytest.mark.parametrize(
    "points",
    [
        ("rows.0",),
        ("rows.1", "rows.2"),
        ("rows.1.2", "by_name.inner", "norm"),
        ("rows.1.1", "by_name.inner.second", "by_name.gru"),
        ("by_name.inner.first", "by_name.inner.second", "norm"),
    ],
    ids=",".join,
)
def test_points_within_containers(points):
    check_pieces(Nested(), [IDS], partition=points)


def test_a_container_that_does_not_train_with_the_model():
    model = Nested()
    points = ("by_name.inner.second", "norm")
    pieces = TracedPartition(points).pieces_of(model)
    for _ in range(2):
        model.by_name["inner"].eval()
        assert_equal(compose(model, pieces, IDS), model(IDS))
        model.train()
        torch.manual_seed(0)
        found = compose(model, pieces, IDS)
        torch.manual_seed(0)
        assert_equal(found, model(IDS))
        model.eval()
        assert_equal(compose(model, pieces, IDS), model(IDS))
        model.train()


def test_gradients():
    one, other = make(skips), make(skips)
    one(X).square().sum().backward()
    compose(other, TracedPartition(("b", "c")).pieces_of(other), X).square().sum().backward()
    for p, q in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


def test_random_numbers_are_drawn_in_each_call():
    model = make(drops)
    pieces = TracedPartition(("b",)).pieces_of(model)
    assert not torch.equal(compose(model, pieces, X), compose(model, pieces, X))


def test_random_numbers_from_the_arguments_are_drawn_once():
    """Every stage could compute them, but each would draw others."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        noise = F.dropout(torch.ones_like(x), 0.5, self.training)
        return self.c(self.b(self.a(x * noise)) * noise)

    model = make(forward)
    pieces = TracedPartition(("b", "c")).pieces_of(model)
    torch.manual_seed(0)
    found = compose(model, pieces, X)
    torch.manual_seed(0)
    assert_equal(found, model(X))


def test_prepare_traces_each_kind_once(monkeypatch):
    model = make(options)
    (piece, _) = TracedPartition(("b",)).pieces_of(model)
    traced = []
    from halfmesh.parallel.pipeline import traced as module

    original = module.trace
    monkeypatch.setattr(module, "trace", lambda *args: (traced.append(1), original(*args))[1])
    for given, count in (({}, 1), ({}, 1), ({"mask": X}, 2), ({"mask": X * 2}, 2), ({"scale": 2.0}, 3), ({}, 3)):
        piece.prepare(model, Call((X,), given))
        assert len(traced) == count
    piece.prepare(model.eval(), Call((X,)))
    assert len(traced) == 4


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "message"),
    [
        (("bb",), "'bb' is not a module of the model; did you mean 'b'?"),
        (("nothing_like_it",), "'nothing_like_it' is not a module of the model$"),
        (("weight",), "'weight' is not a module of the model$"),
        (("b", "b"), r"a module is named twice in \('b', 'b'\)"),
        (("c", "b"), "the forward calls these modules in the order b, c"),
        (("b", "idle"), "idle is never called by the model's forward"),
        (("a", "b"), "the forward begins with a, which leaves nothing to the first stage; name the modules with which"),
    ],
)
def test_wrong_points(points, message):
    model = make(lambda self, x: self.c(self.b(self.a(x))))
    model.idle = linear()
    with pytest.raises(InputError, match=f"parallel.pipeline.partition: {message}".replace("?", r"\?")):
        TracedPartition(points).pieces_of(model)


def test_points_that_begin_together():
    with pytest.raises(InputError, match=r"rows.1 and rows.1.0 begin at the same place; name one of them"):
        TracedPartition(("rows.1", "rows.1.0")).pieces_of(Nested())


def asks(self, x):
    x = self.a(x)
    return self.c(self.b(x)) if x.sum() > 0 else self.c(x)


def loops(self, x):
    for _ in range(x.size(0)):
        x = self.a(x)
    return self.c(self.b(x))


def without_gradients(self, x):
    with torch.no_grad():
        x = self.a(x)
    return self.c(self.b(x))


def with_autocast(self, x):
    x = self.a(x)
    with torch.autocast("cpu", torch.bfloat16):
        x = self.b(x)
    return self.c(x.float())


def keeps(self, x):
    self.last = self.a(x)
    return self.c(self.b(self.last))


@pytest.mark.parametrize(
    ("forward", "reason"),
    [
        (asks, "symbolically traced variables cannot be used as inputs to control flow"),
        (loops, "'_Proxy' object cannot be interpreted as an integer"),
        (without_gradients, "a is called within no_grad, autocast or the like, which a trace does not keep"),
        (with_autocast, "b is called within no_grad, autocast or the like, which a trace does not keep"),
        (keeps, r"it keeps values on the model \(last\)"),
    ],
)
def test_forward_that_cannot_be_traced(forward, reason):
    model = make(forward)
    with pytest.raises(
        InputError, match=f"^Net.forward cannot be traced for split points: {reason}. Move what .*PARTITIONERS"
    ):
        TracedPartition(("b",)).pieces_of(model)
    assert not hasattr(model, "last")


@pytest.mark.parametrize("around", [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_what_is_around_the_whole_forward_does_not_matter(around):
    with around():
        assert len(TracedPartition(("b", "c")).pieces_of(make(skips))) == 3


def changes_its_argument(self, x):
    x.mul_(2)
    return self.c(self.b(self.a(x)))


def updates_its_argument(self, x):
    x += 1
    return self.c(self.b(self.a(x)))


def fills(self, x):
    mask = torch.zeros_like(x)
    torch.fill_(mask, 2)
    return self.c(self.b(self.a(x) * mask)) * mask


def updates_what_has_another_name(self, x):
    other = mask = torch.zeros_like(x)
    mask += 1
    return self.c(self.b(self.a(x) * mask)) * other


def writes(self, x):
    other = torch.zeros_like(x)
    torch.add(x, 1, out=other)
    return self.c(self.b(self.a(x) * other)) * other


@pytest.mark.parametrize(
    ("forward", "what"),
    [
        (changes_its_argument, r"x in place \(mul_\)"),
        (updates_its_argument, r"x in place \(iadd\)"),
        (fills, r"zeros_like in place \(fill_\)"),
        (updates_what_has_another_name, r"zeros_like in place \(iadd\)"),
        (writes, r"zeros_like in place \(add\)"),
    ],
)
def test_changes_in_place_of_what_each_stage_computes(forward, what):
    with pytest.raises(InputError, match=f"the forward changes {what}, but every stage that needs it computes it"):
        TracedPartition(("b", "c")).pieces_of(make(forward))


def test_a_buffer_that_another_stage_changes():
    def forward(self, x):
        x = self.b(self.a(x * self.table[0]))
        self.table.add_(1)
        return self.c(x)

    with pytest.raises(InputError, match="table is changed in place in another stage than it is first used"):
        TracedPartition(("b", "c")).pieces_of(make(forward))


@pytest.mark.parametrize("forward", [lambda self, *args: 0, lambda self, x, **kwargs: 0])
def test_a_forward_that_takes_anything(forward):
    with pytest.raises(
        InputError, match=r"Net.forward takes \*args or \*\*kwargs, which cannot be traced .*PARTITIONERS"
    ):
        TracedPartition(("b",)).pieces_of(make(forward))


def test_a_call_that_needs_other_modules():
    def forward(self, x, context=None):
        x = self.b(self.a(x))
        return self.c(x) if context is None else self.c(x) + self.cross(context)

    model = make(forward)
    model.cross = linear()
    pieces = TracedPartition(("b", "c")).pieces_of(model)
    with pytest.raises(
        InputError, match="called with context, x in training, a stage needs cross, which it does not hold"
    ):
        compose(model, pieces, X, X)


def test_a_mode_that_needs_other_modules():
    def forward(self, x):
        x = self.b(self.a(x))
        return (self.c(x), self.cross(x)) if self.training else self.c(x)

    model = make(forward).eval()
    model.cross = linear()
    pieces = TracedPartition(("b", "c")).pieces_of(model)
    with pytest.raises(
        InputError, match=r"called with x in training, a stage needs cross.* the mode that the model is in"
    ):
        compose(model.train(), pieces, X)
