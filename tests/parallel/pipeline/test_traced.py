"""Models cut at split points compute bit by bit what they compute whole."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import full, nn, zeros

from halfmesh import Call
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


# -- what can be cut -------------------------------------------------------------------------------------------------


def skips(self, x):
    """Values, shapes and weights of one stage are used in others."""
    first = self.a(x * self.weight + self.table[: x.size(0)])
    shape, rows = first.shape, x.size(0)
    x = self.b(first) * self.weight
    return self.c(x).view(shape[0], 2, -1).reshape(rows, shape[1]) * self.weight + first + self.table[0]


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
    same = y
    y += x
    return y * same


def counts(self, x):
    x = self.a(x * self.weight + self.table[0])
    self.table.add_(1)
    return self.c(self.b(x)) + self.table[0]


def made_of_sizes(self, x):
    """Tensors that follow from shapes and constants are made in each stage."""
    rows, width = x.shape
    mask = torch.ones((x.shape[0], x.shape[0]), device=x.device).tril() + full((rows, rows), 0.5)
    position = torch.arange(x.size(1)) * torch.tensor(2.0)
    x = mask @ self.c(mask @ self.b(self.a(x + position) * self.weight)) + position + self.table[0]
    return x * self.plain + torch.eye(rows, width) + zeros(rows, width)


def operators(self, x):
    """Of operator, and_ and or_ are the only names that end like those of changes in place."""
    large, table = x > 0, self.table[:3] > 0
    keep = large & (x < 2) | operator.xor(large, table) & operator.and_(table, True)
    return self.c(self.b(self.a(x * keep) * self.weight) * (large | table) * (True & ~large)) * (keep ^ table)


def checks(self, x):
    rows, width = x.shape
    assert width == 4 and x.size(0) == rows, f"wrong width: {width}"  # noqa: PT018
    if rows > 100:
        raise ValueError(f"too many rows: {rows}")
    first = self.a(x + torch.arange(rows).unsqueeze(1) / max(rows, 2))
    if first.dim() != 2 or first.size(0) != x.size(0):
        raise ValueError("no matrix")
    return self.c(self.b(first)) * self.weight + self.table[:rows]


FORWARDS = [skips, drops, in_place, counts, made_of_sizes, operators, checks]


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
    "a model is traced and cut automatically", "cut at named modules", of="SageMaker", page="pipeline.md"
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


def test_what_the_forward_itself_rejects():
    model = make(checks)
    pieces = pieces_of(model, ("b", "c"))
    for shape, kind, words in (((3, 5), AssertionError, "wrong width"), ((101, 4), ValueError, "too many rows")):
        with pytest.raises(kind, match=words):
            compose(model, pieces, torch.zeros(shape))
    assert_equal(compose(model, pieces, X), model(X))


# -- containers ------------------------------------------------------------------------------------------------------


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(8, 4)
        self.rows = nn.ModuleList([linear(), nn.Sequential(linear(), nn.GELU(), linear()), linear()])
        self.by_name = nn.ModuleDict({"gru": nn.GRU(4, 4, batch_first=True)})
        self.norm = nn.BatchNorm1d(4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for row in self.rows:
            x = x + (row(x) * 2 if self.training else row(x))
        x, last = self.by_name["gru"](x)
        return F.linear(self.norm(x.transpose(1, 2)).transpose(1, 2) + last.transpose(0, 1), self.embed.weight)


def test_points_within_containers():
    for points in (("rows.1.1", "rows.1.2", "by_name.gru"), ("rows.2", "norm")):
        check_pieces(Nested(), [torch.arange(6).view(2, 3)], partition=points)
