"""O1 casts a weight once per scope: it is cast anew after each change, and freed with the scope."""

from __future__ import annotations

import functools
import weakref
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfmesh.amp.o1 import CastTable, o1_scope

HALF, FULL = torch.float16, torch.float32
OFF = functools.partial(torch.autocast, "cpu", enabled=False)


def scope():
    return o1_scope(CastTable(), "cpu")


class CountCasts(TorchDispatchMode):
    """Notes conversions of the dtype."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.made.append(weakref.ref(out))
        return out


@contextmanager
def casts(expected):
    with CountCasts() as counter:
        yield
    assert len(counter.made) == expected


def test_a_weight_is_cast_once_and_activations_each_time():
    linear, x, w = nn.Linear(4, 4), torch.ones(1, 4, dtype=HALF), torch.ones(4, 4, requires_grad=True)
    with scope():
        with casts(2):
            y = linear(linear(x))
        with casts(0):
            y = linear(y)
        with casts(2):  # no parameter
            x @ w
            x @ w
    y.float().sum().backward()
    assert linear.weight.grad.dtype == FULL
    with scope(), casts(2):
        linear(x)


EDITS = {
    "in place": lambda m: m.weight.add_(1),
    "data": lambda m: m.weight.data.add_(1),
    "new data": lambda m: setattr(m.weight, "data", m.weight.data + 1),
    "detach": lambda m: m.weight.detach().add_(1),
    "load_state_dict": lambda m: m.load_state_dict({"weight": m.weight + 1}),
    "new parameter": lambda m: setattr(m, "weight", nn.Parameter(m.weight + 1)),
    "foreach": lambda m: torch._foreach_add_([m.weight], 1),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_of_a_weight_in_the_scope_are_seen(edit):
    linear, x = nn.Linear(2, 2, bias=False), torch.eye(2)
    with scope():
        for grad in (True, False, True):
            with torch.set_grad_enabled(grad):
                assert torch.equal(linear(x).mT, linear.weight.half())
            with torch.no_grad():
                EDITS[edit](linear)
        assert torch.equal(linear(x).mT, linear.weight.half())


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_optimizer_steps_in_the_scope(options):
    model, alone = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    alone.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(each.parameters(), lr=0.25, **options) for each in (model, alone))
    with scope():
        for _ in range(3):
            y = model(torch.eye(2))
            assert torch.equal(y.mT, model.weight.half())
            y.sum().backward()
            alone.weight.grad = model.weight.grad.clone()
            optimizer.step()
            with OFF():
                optimizer.zero_grad()
    for _ in range(3):  # the gradient is the same in each step
        other.step()
    assert torch.equal(model.weight, alone.weight)
