"""Models cut at split points compute bit by bit what they compute whole, or it is said why they cannot be cut."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import full, nn, zeros

from halfmesh import Call, InputError
from tests.support.pipeline_parts import assert_equal, check_pieces, compose, pieces_of

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
SCALE = torch.tensor(0.5)


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


def drops(self, x):
    x = F.dropout(self.a(x + self.table[:3]), training=self.training)
    x = F.dropout(self.b(x), 0.5, self.training)
    return self.c(x) * self.weight + torch.rand_like(x) + torch.rand(4)


def shapes_late(self, x):
    first = self.a(x + self.table[: x.size(0)])
    shape, rows = first.shape, x.size(0)
    return self.c(self.b(first)).view(shape[0], 2, -1).reshape(rows, shape[1]) * self.weight


def parameter_everywhere(self, x):
    return self.c(self.b(self.a(x * self.weight) * self.weight)) * self.weight + self.table[0]


def in_place(self, x):
    y = x.clone()
    y += 1
    x = self.b(self.a(y * self.weight + self.table[:3]))
    x.relu_()
    y = F.relu(self.c(x), inplace=True)
    same = y
    y += x
    return y * same


def masks(self, x):
    mask = torch.ones((x.shape[0], x.shape[0]), device=x.device).tril()
    position = torch.arange(x.size(1)) * torch.tensor(2.0)
    x = mask @ self.c(mask @ self.b(self.a(x + position) * self.weight)) + position + self.table[0]
    return x * self.plain


def operators(self, x):
    """Of operator, and_ and or_ are the only names that end like those of changes in place."""
    large, table = x > 0, self.table[:3] > 0
    keep = large & (x < 2) | operator.xor(large, table) & operator.and_(table, True)
    return self.c(self.b(self.a(x * keep) * self.weight) * (large | table) * (True & ~large)) * (keep ^ table)


def made_of_sizes(self, x):
    rows, width = x.shape
    mask = torch.tril(torch.ones(rows, x.size(0))) + torch.zeros(rows, rows) + full((rows, rows), 0.5)
    x = self.b(mask @ self.a(x * self.weight + self.table[0]))
    return self.c(x + torch.zeros(1, width) + torch.eye(rows, width)) + zeros(rows, width)


def counts(self, x):
    x = self.a(x * self.weight + self.table[0])
    self.table.add_(1)
    return self.c(self.b(x)) + self.table[0]


def checks(self, x):
    rows, width = x.shape
    assert width == 4 and x.size(0) == rows, f"wrong width: {width}"  # noqa: PT018
    if rows > 100:
        raise ValueError(f"too many rows: {rows}")
    position = torch.arange(rows).unsqueeze(1) / max(rows, 2)
    first = self.a(x + position)
    if first.dim() != 2 or first.size(0) != x.size(0):
        raise ValueError("no matrix")
    x = self.b(first)
    assert x.shape == first.shape
    return self.c(x) * self.weight + self.table[:rows]


FORWARDS = [skips, drops, shapes_late, parameter_everywhere, in_place, masks, operators, made_of_sizes, counts, checks]


@pytest.mark.parametrize("forward", FORWARDS)
def test_forward(forward):
    model = make(forward)
    known = set(vars(model)) | set(model.state_dict())
    pieces = check_pieces(model, [X], partition=("b", "c"))
    assert [piece.name for piece in pieces] == ["the beginning", "b", "c"]
    assert set(vars(model)) | set(model.state_dict()) == known


# -- calls -----------------------------------------------------------------------------------------------------------


def options(self, x, mask=None, flag=False, size=(2, 2), scale=1.0, kind="add"):
    x = self.a(x * self.weight + self.table[:3]) * scale
    if mask is not None:
        x = x * mask
    if flag:
        x = x * 2
    x = x + 1 if kind == "add" else x * 3
    return self.c(self.b(x)).view(-1, *size)


def test_calls_of_several_kinds_in_turn():
    model = make(options)
    pieces = check_pieces(model, [X], partition=("b", "c"))
    for given in ({}, {"mask": X}, {"scale": 2.0}, {"mask": X, "flag": True}, {"mask": None}, {"kind": "x"}, {}):
        for args, kwargs in (((X,), given), ((), {"x": X, **given})):
            assert_equal(compose(model, pieces, *args, **kwargs), model(X, **given))
    assert_equal(compose(model, pieces, X, X, True), model(X, X, True))


def branches(self, x, mask=None):
    """Of which branch it takes, shapes decide; of an argument, and of activations."""
    if x.dim() == 3:
        x = x.mean(1)
    if mask is not None and mask.size(0) != x.size(0):
        mask = mask[:1]
    x = self.a(x * self.weight)
    if x.shape[0] % 2:
        x = x * 2
    x = self.b(x)
    if x.numel() > 16:
        x = torch.cat([x, x])
    x = self.c(x)
    return x + self.table[0] if mask is None else x * mask


class Keeps(nn.Linear):
    """A module that is called as it is, and may keep what it likes."""

    last: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x
        return super().forward(x)


SHAPES = [(3, 4), (2, 4), (6, 4), (5, 4), (3, 2, 4), (3, 4), (6, 1, 4), (7, 4), (2, 4)]


@pytest.mark.promise(
    "a model is traced and cut automatically",
    "cut at named modules; `forward` may branch on shapes, per call; what cannot be traced is refused "
    "with its statement, and the model is unchanged",
    of="SageMaker",
    page="pipeline.md",
)
def test_branches_by_shapes_are_those_of_each_call():
    model = make(branches)
    model.a = Keeps(4, 4)
    pieces = pieces_of(model, ("b", "c"))
    for shape in SHAPES:
        x = torch.randn(shape)
        pieces[0].prepare(model, Call((x,), {}))
        assert model.a.last is None, "nothing is left of a run on tensors without data"
        assert_equal(compose(model, pieces, x), model(x))
        for rows in {1, shape[0]} if shape[0] < 5 else {1}:
            assert_equal(compose(model, pieces, x, torch.ones(rows, 4)), model(x, torch.ones(rows, 4)))
        model.a.last = None
    assert_equal(compose(model, pieces, X, mask=None), model(X))


@pytest.mark.parametrize(
    ("shape", "kind", "words"), [((3, 5), AssertionError, "wrong width"), ((101, 4), ValueError, "too many rows")]
)
def test_what_the_forward_itself_refuses(shape, kind, words):
    model = make(checks)
    pieces = pieces_of(model, ("b", "c"))
    with pytest.raises(kind, match=words) as caught:
        compose(model, pieces, torch.zeros(shape))
    assert type(caught.value) is kind
    assert_equal(compose(model, pieces, X), model(X))


def test_random_numbers_from_the_arguments_are_drawn_once():
    """Every stage could compute them, but each would draw others."""

    def forward(self, x):
        noise = F.dropout(torch.ones_like(x), 0.5, self.training)
        return self.c(self.b(self.a(x * noise)) * noise)

    model = make(forward)
    pieces = pieces_of(model, ("b", "c"))
    torch.manual_seed(0)
    found = compose(model, pieces, X)
    torch.manual_seed(0)
    assert_equal(found, model(X))


# -- containers ------------------------------------------------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = linear(), linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * 2 if self.training else self.first(x)
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
        ("rows.1", "rows.2"),
        ("rows.1.1", "by_name.inner.second", "by_name.gru"),
        ("rows.1.2", "by_name.inner.first", "norm"),
    ],
    ids=",".join,
)
def test_points_within_containers(points):
    check_pieces(Nested(), [IDS], partition=points)


# -- refusals --------------------------------------------------------------------------------------------------------


def row(self, x):
    return self.c(self.b(self.a(x)))


def through_inner(self, x):
    return self.c(self.inner(self.a(x)))


def asks(self, x):
    x = self.a(x)
    return self.c(self.b(x)) if x.sum() > 0 else self.c(x)


def without_gradients(self, x):
    with torch.no_grad():
        x = self.a(x)
    return self.c(self.b(x))


def keeps(self, x):
    self.last = self.a(x)
    return self.c(self.b(self.last))


def keeps_in_a_list(self, x):
    x = self.a(x)
    self.outputs.append(x)
    return self.c(self.b(x))


def assigns_a_buffer(self, x):
    self.table += 1
    return self.c(self.b(self.a(x)))


def loops(self, x):
    x = self.a(x)
    for number in range(x.shape[1]):
        x = x + number
    return self.c(self.b(x))


def refuses_then_loops(self, x):
    assert x.dim() == 2
    if x.size(0) > 100:
        raise ValueError("too many")
    return self.c(self.b(self.a(x))) + len(list(x))


def never_accepts(self, x):
    if x.dim() == 2:
        raise ValueError("a matrix")
    raise ValueError("no matrix")


def steps(self, x):
    self.alpha = getattr(self, "alpha", 0) + 1
    return self.c(self.b(self.a(x)))


def flips(self, x):
    return self.c(self.b(self.a(x * 2 if random.random() < 0.5 else x)))


def anything(self, x, **kwargs):
    return self.c(self.b(self.a(x)))


def has_a_constant(self, x):
    return self.c(self.b(self.a(x * SCALE)))


def changes_its_argument(self, x):
    x.mul_(2)
    return self.c(self.b(self.a(x)))


def updates_what_has_another_name(self, x):
    other = mask = torch.zeros_like(x)
    mask += 1
    return self.c(self.b(self.a(x) * mask)) * other


def updates_a_mask(self, x):
    other = mask = x > 0
    mask &= x < 2
    return self.c(self.b(self.a(x) * mask)) * other


def changes_a_buffer_late(self, x):
    x = self.b(self.a(x * self.table[0]))
    self.table.add_(1)
    return self.c(x)


COPY = "but other stages have a copy of it"


@pytest.mark.promise("a model is traced and cut automatically")
@pytest.mark.parametrize(
    ("forward", "points", "message"),
    [
        (row, ("bb",), r"partition: 'bb' is not a module of the model; did you mean 'b'\?"),
        (row, ("b", "b"), "no module is left for the stage of b; name other split points"),
        (row, ("c", "b"), "the forward calls these modules in the order b, c"),
        (row, ("b", "idle"), "idle is never called by the model's forward"),
        (row, ("a", "b"), "no module is left for the stage of the beginning"),
        (through_inner, ("inner", "inner.0"), "no module is left for the stage of inner"),
        (asks, ("b",), r"cannot be traced .* to control flow \(`return self.c\(self.b\(x\)\) if x.sum\(\) > 0 else"),
        (without_gradients, ("b",), "a is called within no_grad, autocast or the like, which a trace does not keep"),
        (
            keeps,
            ("b",),
            r"it keeps a value on the model \(last\) \(`self.last = self.a\(x\)`, line \d+ of .*test_traced.py\)",
        ),
        (keeps_in_a_list, ("b",), r"it keeps a value on the model \(outputs\)"),
        (
            assigns_a_buffer,
            ("b",),
            r"it keeps a value on the model \(table\) \(`self.table \+= 1`, line .* in place: self.table.add_\(...\)",
        ),
        (loops, ("b",), r"cannot be interpreted as an integer \(`for number in range\(x.shape\[1\]\):`, line"),
        (refuses_then_loops, ("b",), r"cannot be iterated.*\(`return self.c.* \+ len\(list\(x\)\)`, line"),
        (never_accepts, ("b",), r"a matrix \(`raise ValueError\(\"a matrix\"\)`, line"),
        (steps, ("b",), "it changes numbers or flags on the model"),
        (flips, ("b",), "draws random numbers of python or numpy"),
        (anything, ("b",), r"Net.forward takes \*args or \*\*kwargs, which cannot be traced .*PARTITIONERS"),
        (
            has_a_constant,
            ("b",),
            r"a tensor that is not on the model; make it a buffer \(`return .* SCALE\)\)\)`, line",
        ),
        (changes_its_argument, ("b",), rf"changes x in place \(`x.mul_\(2\)`, line .*\), {COPY}"),
        (updates_what_has_another_name, ("b",), rf"changes zeros_like in place \(`mask \+= 1`, line .*\), {COPY}"),
        (updates_a_mask, ("b",), rf"changes gt in place \(`mask &= x < 2`, line .*\), {COPY}"),
        (
            changes_a_buffer_late,
            ("b", "c"),
            rf"changes table in place \(`self.table.add_\(1\)`, line .*\), {COPY}",
        ),
    ],
)
def test_what_cannot_be_cut(forward, points, message):
    model = make(forward)
    model.idle = linear()
    model.inner, model.outputs = nn.Sequential(linear()), []
    before = dict(vars(model)), model.state_dict(keep_vars=True)
    with pytest.raises(InputError, match=message):
        pieces_of(model, points)
    assert (vars(model), model.outputs) == (before[0], [])
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is tensor for name, tensor in before[1].items()), "the model is as it was"


def test_a_call_or_a_mode_that_needs_other_modules():
    def forward(self, x, context=None):
        x = self.b(self.a(x))
        return self.c(x) if context is None and not self.training else self.c(x) + self.cross(x)

    model = make(forward).eval()
    model.cross = linear()
    pieces = pieces_of(model, ("b", "c"))
    with pytest.raises(
        InputError, match="called with context, x in evaluation, a stage needs cross, which it does not"
    ):
        compose(model, pieces, X, X)
    with pytest.raises(
        InputError, match=r"called with x in training, a stage needs cross.* the mode that the model is in"
    ):
        compose(model.train(), pieces, X)
