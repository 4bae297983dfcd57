"""O1's scope: what it sees, how it nests, that it leaves nothing behind, backward in it, and what a model adds."""

import functools
import types
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from halfmesh.amp.o1 import CastTable, float_function, half_function, o1_scope, promote_function
from halfmesh.errors import InputError

HALF, FULL, BF16 = torch.float16, torch.float32, torch.bfloat16
OFF, ON = (functools.partial(torch.autocast, "cpu", enabled=enabled) for enabled in (False, True))


def scope(table=None):
    return o1_scope(table or CastTable(), "cpu")


FOLLOW = None
UNLISTED = {
    "relu": (F.relu, FOLLOW),
    "method softmax": (lambda x: x.softmax(-1), FOLLOW),
    "batch_norm": (lambda x: F.batch_norm(x, torch.ones(4), torch.ones(4)), FOLLOW),
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, hard=True), FULL),
    "gaussian_nll": (lambda x: F.gaussian_nll_loss(x, x, x.abs()), FULL),
    "method norm": (lambda x: x.norm(dim=1), FULL),
    "rmatmul": (lambda x: torch.Tensor.__rmatmul__(x, x), HALF),
}


def test_unlisted_functions_follow_their_input_and_python_functions_are_seen_through():
    for name, (function, expected) in UNLISTED.items():
        for dtype in (HALF, FULL):
            x = (torch.rand(4, 4) + 0.5).to(dtype).requires_grad_()
            with scope():
                y = function(x)
            assert y.dtype == (expected or dtype), name
            y.float().sum().backward()
            assert x.grad.dtype == dtype, name


def rules():
    """Which rules hold: "o1", torch's own for fp16 or bf16, or none."""
    x = torch.eye(2)
    by_dtypes = {(HALF, FULL): "o1", (HALF, HALF): "fp16", (BF16, HALF): "bf16", (FULL, HALF): "none"}
    return by_dtypes[(x @ x).dtype, x.half().sum().dtype]


def test_autocast_switches_the_casts_off_and_on():
    assert rules() == "none"
    with scope():
        assert rules() == "o1"
        with OFF():
            assert rules() == "none"
            with ON():
                assert rules() == "o1"
        with torch.autocast("cpu", BF16):
            assert rules() == "bf16"
        with torch.autocast("cuda", enabled=False), torch.device("cpu"):  # another device's, and a mode of torch's own
            assert rules() == "o1"
        with pytest.raises(ZeroDivisionError), ON(dtype=BF16), scope():
            _ = 1 / 0
        assert rules() == "o1"
    assert rules() == "none"


def dtype_of(table, function, *args):
    with scope(table):
        return function(*args).dtype


def test_registered_functions():
    table, h, f = CastTable(), torch.rand(2, 2).half(), torch.rand(2, 2)
    with scope(table):
        assert torch.sigmoid(h).dtype == HALF
        table.register_float_function(torch, "sigmoid")
        assert torch.sigmoid(h).dtype == FULL, "from the next call on"
        assert torch.ops.aten.sigmoid(h).dtype == HALF, "another function"
    table.register_half_function(torch, "einsum")
    table.register_promote_function(torch, "lerp")
    table.register_float_function(torch.ops.aten, "sigmoid")
    assert dtype_of(table, torch.einsum, "ij,jk", f, f) == HALF
    assert dtype_of(table, torch.lerp, h, f, 0.5) == FULL
    assert dtype_of(table, torch.ops.aten.sigmoid, h) == FULL
    assert dtype_of(table, torch.ops.aten.sigmoid.default, h) == FULL
    assert dtype_of(CastTable(), torch.sigmoid, h) == HALF, "in one table only"


def test_what_cannot_be_registered_is_rejected():
    module = types.ModuleType("mine")
    module.attend = lambda x: x
    with pytest.raises(InputError, match=r"wrap it: .* = halfmesh.half_function"):
        CastTable().register_half_function(module, "attend")
    for name in ("sigmoid_", "__iadd__"):
        with pytest.raises(InputError, match="in place"):
            CastTable().register_float_function(torch.Tensor, name)


@half_function
def as_half(x, others=(), *, out=None):
    return x, *others, out


@float_function
def as_float(x):
    """Its own words."""
    return x


@promote_function
def as_widest(x, y):
    return x, y


def test_decorators_cast_what_the_function_is_called_with_in_a_scope_only():
    h, f = torch.ones(1, dtype=HALF), torch.ones(1)
    with scope():
        values = as_half(f, [f, torch.arange(2), "word"], out=f)
        assert [getattr(v, "dtype", v) for v in values] == [HALF, HALF, torch.int64, "word", HALF]
        assert as_float(h).dtype == FULL
        assert [v.dtype for v in as_widest(h, f)] == [FULL, FULL]
        assert [v.dtype for v in as_widest(h, h)] == [HALF, HALF]
        with OFF():
            assert as_half(f)[0] is f
    assert (as_half(f)[0] is f, as_float(h) is h, as_widest(h, f)) == (True, True, (h, f))
    assert (as_float.__name__, as_float.__doc__) == ("as_float", "Its own words.")


class CountCasts(TorchDispatchMode):
    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@contextmanager
def casts(expected):
    with CountCasts() as counter:
        yield
    assert counter.made == expected


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
    "data": lambda m: m.weight.data.add_(1),
    "new data": lambda m: setattr(m.weight, "data", m.weight.data + 1),
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
