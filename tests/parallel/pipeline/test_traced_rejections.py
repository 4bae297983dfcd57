"""What cannot be cut at split points: the message names the statement, and the model stays as it was."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from halfmesh import InputError
from tests.support.pipeline_parts import compose, pieces_of

from .test_traced import X, make

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


def assigns_a_buffer(self, x):
    self.table += 1
    return self.c(self.b(self.a(x)))


def loops(self, x):
    x = self.a(x)
    for number in range(x.shape[1]):
        x = x + number
    return self.c(self.b(x))


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
        (asks, ("b",), r"cannot be traced .* to control flow \(`return self.c\(self.b\(x\)\) if x.sum\(\) > 0 else"),
        (without_gradients, ("b",), "a is called inside no_grad, autocast or similar, which a trace does not record"),
        (
            keeps,
            ("b",),
            r"it keeps a value on the model \(last\) \(`self.last = self.a\(x\)`, line \d+ of .*rejections.py\)",
        ),
        (
            assigns_a_buffer,
            ("b",),
            r"it keeps a value on the model \(table\) \(`self.table \+= 1`, line .* in place: self.table.add_\(...\)",
        ),
        (loops, ("b",), r"cannot be interpreted as an integer \(`for number in range\(x.shape\[1\]\):`, line"),
        (steps, ("b",), "it changes numbers or flags on the model"),
        (flips, ("b",), "draws random numbers from python or numpy"),
        (anything, ("b",), r"Net.forward takes \*args or \*\*kwargs, which cannot be traced .*PARTITIONERS"),
        (
            has_a_constant,
            ("b",),
            r"a tensor that is not part of the model; make it a buffer \(`return .* SCALE\)\)\)`, line",
        ),
        (changes_its_argument, ("b",), rf"changes x in place \(`x.mul_\(2\)`, line .*\), {COPY}"),
        (updates_what_has_another_name, ("b",), rf"changes zeros_like in place \(`mask \+= 1`, line .*\), {COPY}"),
        (
            changes_a_buffer_late,
            ("b", "c"),
            rf"changes table in place \(`self.table.add_\(1\)`, line .*\), {COPY}",
        ),
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


def test_a_call_or_a_mode_that_needs_other_modules():
    def forward(self, x, context=None):
        x = self.b(self.a(x))
        return self.c(x) if context is None and not self.training else self.c(x) + self.cross(x)

    model = make(forward).eval()
    model.cross = nn.Linear(4, 4)
    pieces = pieces_of(model, ("b", "c"))
    with pytest.raises(
        InputError, match="called with context, x in evaluation, a stage needs cross, which it does not"
    ):
        compose(model, pieces, X, X)
    with pytest.raises(
        InputError, match=r"called with x in training, a stage needs cross.* the mode that the model is in"
    ):
        compose(model.train(), pieces, X)
