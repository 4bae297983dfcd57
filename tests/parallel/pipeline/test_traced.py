"""Models cut at split points compute bit by bit what they compute whole."""

from __future__ import annotations

import operator
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import full, nn, zeros

from halfmesh import InputError
from tests.support.pipeline_parts import assert_equal, check_pieces, compose, pieces_of

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


def drops(self, x):
    """Every stage could compute the noise, which follows from the arguments, but each would draw another one."""
    noise = F.dropout(torch.ones_like(x), 0.5, self.training)
    x = F.dropout(self.a(x * noise + self.table[:3]), training=self.training)
    x = F.dropout(self.b(x) * noise, 0.5, self.training)
    return self.c(x) * self.weight * noise + torch.rand_like(x) + torch.rand(4)


def in_place(self, x):
    y = x.clone()
    y += 1
    x = self.b(self.a(y * self.weight + self.table[:3]))
    x.relu_()
    y = F.relu(self.c(x), inplace=True)
    y += x
    return y


def updates(self, x):
    """`x += y` changes all names of a tensor, and one of a number."""
    rows = half = x.shape[0]
    half //= 2
    mask = (torch.ones(4, rows) * half)[:, 0]
    mask *= 2
    residual = x = self.a(x * self.weight)
    x += mask * rows
    y = self.b(x + residual)
    y -= residual
    return self.c(y) + x + y + residual + self.table[half]


def made_of_sizes(self, x):
    """Tensors that follow from shapes and constants are made in each stage."""
    rows, width = x.shape
    mask = torch.ones((x.shape[0], x.shape[0]), device=x.device).tril() + full((rows, rows), 0.5)
    position = torch.arange(x.size(1)) * torch.tensor(2.0) + torch.arange(4)
    x = mask @ self.c(mask @ self.b(self.a(x + position) * self.weight)) + position + self.table[0]
    return x * self.plain + torch.eye(rows, width) + zeros(rows, width)


def operators(self, x):
    """Names of some end like those of changes in place."""
    large, table = x > 0, self.table[:3] > 0
    return self.c(self.b(self.a(x * (large & table)) * self.weight) * (large | table)) * operator.and_(table, True)


def checks(self, x):
    rows, width = x.shape
    assert width == 4 and x.size(0) == rows, f"wrong width: {width}"  # noqa: PT018
    if rows > 100:
        raise ValueError(f"too many rows: {rows}")
    first = self.a(x + torch.arange(rows).unsqueeze(1) / max(rows, 2))
    if first.dim() != 2 or first.size(0) != x.size(0):
        raise ValueError("no matrix")
    return self.c(self.b(first)) * self.weight + self.table[:rows]


@pytest.mark.parametrize("forward", [drops, in_place, updates, made_of_sizes, operators, checks])
def test_forward(forward):
    model = make(forward)
    known = set(vars(model)) | set(model.state_dict())
    pieces = check_pieces(model, [X], partition=("b", "c"))
    assert [piece.name for piece in pieces] == ["the beginning", "b", "c"]
    assert set(vars(model)) | set(model.state_dict()) == known


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


SHAPES = [(3, 4), (2, 4), (6, 4), (5, 4), (3, 2, 4), (3, 4), (6, 1, 4), (7, 4), (2, 4)]


@pytest.mark.promise(
    "a model is traced and cut automatically", "cut at named modules", of="SageMaker", page="pipeline.md"
)
def test_branches_by_shapes_are_those_of_each_call():
    model = make(branches)
    pieces = pieces_of(model, ("b", "c"))
    for shape in SHAPES:
        x = torch.randn(shape)
        assert_equal(compose(model, pieces, x), model(x))
        for rows in {1, shape[0]} if shape[0] < 5 else {1}:
            assert_equal(compose(model, pieces, x, torch.ones(rows, 4)), model(x, torch.ones(rows, 4)))
    assert_equal(compose(model, pieces, X, mask=None), model(X))


SCALE = torch.tensor(0.5)


def row(self, x):
    return self.c(self.b(self.a(x)))


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


def flips(self, x):
    return self.c(self.b(self.a(x * 2 if random.random() < 0.5 else x)))


def anything(self, x, **kwargs):
    return self.c(self.b(self.a(x)))


def has_a_constant(self, x):
    return self.c(self.b(self.a(x * SCALE)))


def updates_an_argument(self, x):
    y = x.view(-1)
    y *= 2
    return self.c(self.b(self.a(x)))


def updates_what_has_another_name(self, x):
    other = mask = torch.zeros_like(x)
    mask += 1
    return self.c(self.b(self.a(x) * mask)) * other


def updates_a_view(self, x):
    mask = torch.zeros_like(x)
    row = mask[0]
    row += 1
    return self.c(self.b(self.a(x) * mask))


def updates_in_two_stages(self, x):
    residual = x = self.a(x)
    x += 1
    x = x.mul_(self.b(x))
    return self.c(x) + residual


def changes_a_buffer_late(self, x):
    x = self.b(self.a(x * self.table[0]))
    self.table.add_(1)
    return self.c(x)


def asks_often(self, x):
    """With 2**24 ways through it, all of which fail."""
    for layer in [self.a, self.b, self.c] * 8:
        x = x + layer(x) if x.shape[0] % 2 else layer(x)
    return x[: len(x)]


COPY = "but other stages have a copy of it"


@pytest.mark.promise("a model is traced and cut automatically")
@pytest.mark.parametrize(
    ("forward", "points", "message"),
    [
        (row, ("bb",), r"partition: 'bb' is not a module of the model; did you mean 'b'\?"),
        (row, ("b", "b"), "no module is left for the stage of b; name other split points"),
        (row, ("c", "b"), "the forward calls these modules in the order b, c"),
        (row, ("b", "idle"), "idle is never called by the model's forward"),
        (asks, ("b",), r"cannot be traced .* to control flow \(`return self.c\(self.b\(x\)\) if x.sum\(\) > 0 else"),
        (without_gradients, ("b",), "a is called inside no_grad, autocast or similar, which a trace does not record"),
        (asks_often, ("b",), "cannot be traced"),
        (keeps, ("b",), r"it keeps a value on the model \(last\)"),
        (flips, ("b",), "draws random numbers for itself"),
        (anything, ("b",), r"Net.forward takes \*args or \*\*kwargs, which cannot be traced; .*PARTITIONERS"),
        (has_a_constant, ("b",), r"not part of the model; make it a buffer \(`return .* SCALE\)\)\)`, line"),
        (updates_an_argument, ("b",), rf"changes view in place \(imul\), {COPY}"),
        (updates_what_has_another_name, ("b",), rf"changes zeros_like in place \(iadd\), {COPY}"),
        (updates_a_view, ("b",), rf"changes getitem in place \(iadd\), {COPY}"),
        (updates_in_two_stages, ("b", "c"), rf"changes iadd in place \(mul_\), {COPY}"),
        (changes_a_buffer_late, ("b", "c"), rf"changes table in place \(add_\), {COPY}"),
    ],
)
def test_what_cannot_be_cut(forward, points, message):
    model = make(forward)
    model.idle = nn.Linear(4, 4)
    before = dict(vars(model)), model.state_dict(keep_vars=True)
    with pytest.raises(InputError, match=message):
        pieces_of(model, points)
    assert vars(model) == before[0]
    now = model.state_dict(keep_vars=True)
    assert all(now[name] is tensor for name, tensor in before[1].items()), "the model is as it was"


def test_a_call_that_needs_other_modules():
    def forward(self, x, context=None):
        x = self.b(self.a(x))
        return self.c(x) if context is None else self.c(x) + self.cross(x)

    model = make(forward).eval()
    model.cross = nn.Linear(4, 4)
    pieces = pieces_of(model, ("b", "c"))
    with pytest.raises(InputError, match="called with context, x in evaluation, a stage needs cross"):
        compose(model, pieces, X, X)
