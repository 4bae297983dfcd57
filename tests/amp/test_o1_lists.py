"""What each listed function does under O1 to dtypes of outputs and gradients, and what a model can add to the lists."""

from __future__ import annotations

import functools
import math
import operator
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from halfmesh.amp.o1 import O1_LISTS, Cast, CastTable, float_function, half_function, o1_scope, promote_function
from halfmesh.errors import InputError

HALF, FULL, DOUBLE, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
PLACES = (torch, F, torch.Tensor)
INDEX, SIGNS = torch.tensor([0, 1]), torch.tensor([1.0, -1.0])
RNNS = {"rnn_relu": functools.partial(nn.RNN, nonlinearity="relu"), "rnn_tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {
    "rnn_relu_cell": functools.partial(nn.RNNCell, nonlinearity="relu"),
    "rnn_tanh_cell": nn.RNNCell,
    "gru_cell": nn.GRUCell,
    "lstm_cell": nn.LSTMCell,
}


def words(text):
    return text.split()


# The arguments of each function; `x(*shape)` is a floating-point tensor of the dtype under test.
PRODUCTS = {
    "conv1d": lambda x: (x(1, 2, 5), x(3, 2, 3), x(3)),
    "conv2d": lambda x: (x(1, 2, 4, 4), x(3, 2, 3, 3), x(3)),
    "conv3d": lambda x: (x(1, 1, 3, 3, 3), x(2, 1, 2, 2, 2)),
    "conv_transpose1d": lambda x: (x(1, 2, 3), x(2, 3, 3), x(3)),
    "conv_transpose2d": lambda x: (x(1, 2, 3, 3), x(2, 1, 2, 2)),
    "conv_transpose3d": lambda x: (x(1, 1, 2, 2, 2), x(1, 1, 2, 2, 2)),
    "conv_tbc": lambda x: (x(4, 1, 2), x(3, 2, 3), x(3)),
    "linear": lambda x: (x(2, 3), x(4, 3), x(4)),
    "scaled_dot_product_attention": lambda x: (x(1, 2, 3), x(1, 2, 3), x(1, 2, 3)),
    "prelu": lambda x: (x(2, 3), x(1)),
    "addmm": lambda x: (x(2, 2), x(2, 3), x(3, 2)),
    "addmv": lambda x: (x(2), x(2, 3), x(3)),
    "addr": lambda x: (x(2, 3), x(2), x(3)),
    "matmul": lambda x: (x(2, 3), x(3, 2)),
    "mm": lambda x: (x(2, 3), x(3, 2)),
    "mv": lambda x: (x(2, 3), x(3)),
    "addbmm": lambda x: (x(2, 2), x(2, 2, 3), x(2, 3, 2)),
    "baddbmm": lambda x: (x(2, 2, 2), x(2, 2, 3), x(2, 3, 2)),
    "bmm": lambda x: (x(2, 2, 3), x(2, 3, 2)),
}
FLOATS = {
    **dict.fromkeys(
        words("acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan")
        + words("norm prod std sum var cpu softplus gelu normalize"),
        lambda x: (x(2, 3),),
    ),
    **dict.fromkeys(
        words("pow dist cosine_similarity poisson_nll_loss l1_loss mse_loss multilabel_soft_margin_loss")
        + words("binary_cross_entropy_with_logits smooth_l1_loss"),
        lambda x: (x(2, 3), x(2, 3)),
    ),
    **dict.fromkeys(words("cumprod cumsum"), lambda x: (x(2, 3), 0)),
    **dict.fromkeys(words("softmin log_softmax softmax"), lambda x: (x(2, 3), 1)),
    **dict.fromkeys(words("hinge_embedding_loss soft_margin_loss"), lambda x: (x(2), SIGNS)),
    **dict.fromkeys(words("multi_margin_loss nll_loss"), lambda x: (x(2, 3), INDEX)),
    **dict.fromkeys(words("__pow__ __rpow__"), lambda x: (x(2, 3), 2)),
    "renorm": lambda x: (x(2, 3), 2, 0, 1.0),
    "interpolate": lambda x: (x(1, 1, 4), 2),
    "grid_sample": lambda x: (x(1, 1, 2, 2), x(1, 2, 2, 2), "bilinear", "zeros", False),
    "layer_norm": lambda x: (x(2, 3), (3,), x(3), x(3)),
    "group_norm": lambda x: (x(2, 4), 2, x(4), x(4)),
    "local_response_norm": lambda x: (x(2, 3, 4), 2),
    "cosine_embedding_loss": lambda x: (x(2, 3), x(2, 3), SIGNS),
    "cross_entropy": lambda x: (x(2, 3), INDEX, x(3).detach()),
    "kl_div": lambda x: (x(2, 3), x(2, 3), None, None, "batchmean"),
    "margin_ranking_loss": lambda x: (x(2), x(2), SIGNS),
    "multilabel_margin_loss": lambda x: (x(2, 2), INDEX.repeat(2, 1)),
    "triplet_margin_loss": lambda x: (x(2, 3), x(2, 3), x(2, 3)),
    "ctc_loss": lambda x: (x(4, 1, 3), torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1])),
}
PROMOTED = {
    **dict.fromkeys(words("atan2 dot vdot add sub div mul eq equal ge gt le lt ne __eq__"), lambda x: (x(3), x(3))),
    "__rsub__": lambda x: (x(3), x(3)),
    "cross": lambda x: (x(2, 3), x(2, 3), 1),
    "addcdiv": lambda x: (x(3), x(3), x(3)),
    "addcmul": lambda x: (x(3), x(3), x(3)),
    "bilinear": lambda x: (x(2, 3), x(2, 3), x(2, 3, 3), x(2)),
    "cat": lambda x: ([x(3), x(3)],),
    "stack": lambda x: ((x(3), x(3)),),
    "einsum": lambda x: ("ij,jk->ik", x(2, 3), x(3, 2)),
    "tensordot": lambda x: (x(2, 3), x(3, 2), 1),
}
BANNED = {"binary_cross_entropy": lambda x: (x(2, 3), x(2, 3))}
IN_PLACE = {name + "_": args for name, args in {**PRODUCTS, **FLOATS, **PROMOTED}.items()} | {
    "__ipow__": lambda x: (x(2, 3), 2)
}
CALLS = {
    Cast.HALF: PRODUCTS,
    Cast.FLOAT: FLOATS,
    Cast.WIDEST: PROMOTED,
    Cast.BANNED: BANNED,
    Cast.SELF: IN_PLACE,
    Cast.NOT_HALF: IN_PLACE,
}
OPERATORS = [getattr(operator, name) for name in words("add sub mul truediv eq ne lt le gt ge")]


def listed(cast):
    """(place, name) of every listed function with `cast` that has a call above."""
    places = [(place, name) for name in CALLS[cast] for place in PLACES]
    return [(place, name) for place, name in places if O1_LISTS.get(getattr(place, name, None)) is cast]


class Maker:
    """Makes tensors whose dtypes go through `dtypes` in turn, between 0.25 and 0.75, where everything is defined."""

    def __init__(self, *dtypes, requires_grad=True):
        self.dtypes, self.requires_grad, self.made = dtypes, requires_grad, []

    def __call__(self, *shape):
        dtype = self.dtypes[len(self.made) % len(self.dtypes)]
        values = torch.arange(math.prod(shape)).reshape(shape).sin() / 4 + 0.5
        self.made.append(values.to(dtype).requires_grad_(self.requires_grad))
        return self.made[-1]


class Reports(TorchFunctionMode):
    """Notes every function that torch reports."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def scope(table=None):
    return o1_scope(table or CastTable(), "cpu")


def check(function, args, make, dtype, label):
    """The output of `function` under O1 has `dtype`, and each leaf gets a gradient of its own dtype."""
    with scope():
        output = function(*args)
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return
    assert output.dtype == dtype, label
    output.float().sum().backward()
    used = [leaf for leaf in make.made if leaf.grad is not None]
    assert used, label
    assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all() for leaf in used), label


def check_list(cast, *pairs):
    """`pairs`: dtypes of the arguments, in turn, with the dtype of the output."""
    for place, name in listed(cast):
        for dtypes, expected in pairs:
            make = Maker(*dtypes)
            check(getattr(place, name), CALLS[cast][name](make), make, expected, (place.__name__, name, dtypes))


def test_every_listed_function_is_covered_here_and_reported_by_torch_as_itself():
    """Were it reported as another one, its cast would not be found."""
    covered = {getattr(torch, name) for name in (*RNNS, *CELLS)}
    for name in (*RNNS, *CELLS):
        with Reports() as reports:
            (RNNS.get(name) or CELLS[name])(2, 2)(torch.ones(1, 2))
        assert getattr(torch, name) in reports.functions
    for cast in Cast:
        for place, name in listed(cast):
            function = getattr(place, name)
            covered.add(function)
            args = CALLS[cast][name](Maker(FULL, requires_grad=False))
            with Reports() as reports:
                function(*args)
            assert reports.functions[0] is function, (place, name)
    assert covered == set(O1_LISTS)
    names = {name for calls in (PRODUCTS, FLOATS, PROMOTED, BANNED) for name in calls}
    assert [name for name in names if not any(hasattr(place, name) for place in PLACES)] == []


def test_products_are_half():
    check_list(Cast.HALF, *((d, HALF) for d in [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF), (BF16, FULL)]))


def test_floats_are_float():
    check_list(Cast.FLOAT, *((d, FULL) for d in [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF), (BF16,)]))


def test_promoted_functions_take_the_widest_dtype():
    mixed = [(FULL,), (HALF, FULL), (FULL, HALF), (BF16, HALF)]
    check_list(Cast.WIDEST, ((HALF,), HALF), *((d, FULL) for d in mixed))
    for name in ("add", "mul", "div", "cat", "stack", "addcmul"):  # doubles are left to torch
        make = Maker(HALF, DOUBLE)
        check(getattr(torch, name), PROMOTED[name](make), make, DOUBLE, name)


def test_operators_take_the_widest_dtype():
    for function in OPERATORS:
        for dtypes in ((HALF,), (FULL,), (HALF, FULL), (FULL, HALF)):
            for shape in ((2, 3), ()):  # to torch alone a single number has less say
                make = Maker(*dtypes)
                widest = HALF if dtypes == (HALF,) else FULL
                check(function, (make(2, 3), make(*shape)), make, widest, (function, dtypes))
    third = torch.tensor([1 / 3])
    with scope():
        assert not (third.half() == third).item()
        assert not torch.equal(third.half(), third)
        assert torch.equal(third.half(), third.half().float())
        h = torch.full((2,), 0.5, dtype=HALF)
        assert [(2 + h).dtype, (h - 2).dtype, (2 - h).dtype, (2 * h).dtype, (h / 3).dtype] == [HALF] * 5
        assert [(h**2).dtype, (2**h).dtype, (h @ h).dtype] == [FULL, FULL, HALF]
        assert (1 / h).dtype == FULL  # torch makes a reciprocal of it
        assert torch.equal(1 / torch.full((1,), 2.0**-24, dtype=HALF), torch.full((1,), 2.0**24))


def test_in_place_functions_match_what_they_change():
    for place, name in listed(Cast.SELF):
        for dtypes in ((HALF,), (HALF, FULL), (FULL,), (FULL, HALF)):
            make, label = Maker(*dtypes), (place.__name__, name, dtypes)
            leaf, *others = IN_PLACE[name](make)
            changed = leaf.clone()
            before = changed.detach().clone()
            with scope():
                result = getattr(place, name)(changed, *others)
            assert result is changed, label
            assert changed.dtype == dtypes[0], label
            assert not torch.equal(changed, before), label
            if changed.requires_grad and name not in ("eq_", "ge_", "gt_", "le_", "lt_", "ne_"):
                changed.float().sum().backward()
                assert all(made.grad.dtype == made.dtype for made in make.made if made.grad is not None), label
                assert others[0].grad is not None, label


def test_in_place_floats_are_refused_on_half_and_work_on_float():
    for place, name in listed(Cast.NOT_HALF):
        function = getattr(place, name)
        half = IN_PLACE[name](Maker(HALF, requires_grad=False))
        kept = half[0].clone()
        with scope(), pytest.raises(NotImplementedError, match=r"in place.*write it out of place"):
            function(*half)
        assert torch.equal(half[0], kept), name
        full = IN_PLACE[name](Maker(FULL, HALF, requires_grad=False))
        expected = function(full[0].clone(), *full[1:])
        with scope():
            assert function(*full) is full[0], name
        assert full[0].dtype == FULL, name
        assert torch.equal(full[0], expected), name
    with scope(), pytest.raises(NotImplementedError, match="exp_ changes"):
        torch.exp_(input=torch.ones(2, dtype=HALF))


def test_binary_cross_entropy_is_refused_on_half():
    half, full = (torch.full((2,), 0.5, dtype=dtype) for dtype in (HALF, FULL))
    with scope():
        for args in [(half, full), (full, half)]:
            for loss in (F.binary_cross_entropy, nn.BCELoss()):
                with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
                    loss(*args)
        assert F.binary_cross_entropy(full, full).dtype == FULL
        assert nn.BCEWithLogitsLoss()(half, full).dtype == FULL


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", RNNS)
def test_recurrent_modules_are_half(name, packed):
    for dtype, layers, bidirectional in ((HALF, 1, False), (FULL, 2, True)):
        module = RNNS[name](3, 2, num_layers=layers, bidirectional=bidirectional)
        x = Maker(dtype)(3, 2, 3)
        hidden = torch.zeros(layers * (1 + bidirectional), 2, 2, dtype=dtype)
        with scope():
            inputs = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])) if packed else x
            output, last = module(inputs, (hidden, hidden) if name == "lstm" else hidden)
        output = output.data if packed else output
        assert [output.dtype, (last[0] if name == "lstm" else last).dtype] == [HALF, HALF]
        output.float().sum().backward()
        assert x.grad.dtype == dtype
        assert {p.grad.dtype for p in module.parameters()} == {FULL}


@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells_are_half(name):
    for dtype in (HALF, FULL):
        cell, x = CELLS[name](3, 2), Maker(dtype)(2, 3)
        with scope():
            state = cell(x, cell(x))
        output = state[0] if name == "lstm_cell" else state
        assert output.dtype == HALF
        output.float().sum().backward()
        assert (x.grad.dtype, {p.grad.dtype for p in cell.parameters()}) == (dtype, {FULL})


# -- what a model can add --------------------------------------------------------------------------------------


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
    table.register_float_function(torch.Tensor, "softmax")
    table.register_half_function(torch, "einsum")
    table.register_half_function(torch.linalg, "matmul")
    table.register_promote_function(torch, "lerp")
    table.register_float_function(F, "scaled_dot_product_attention")
    table.register_float_function(torch.ops.aten, "sigmoid")
    assert dtype_of(table, torch.Tensor.sigmoid, h) == HALF  # another function
    assert dtype_of(table, lambda x: x.softmax(0), h) == FULL
    assert dtype_of(table, torch.einsum, "ij,jk", f, f) == HALF
    assert dtype_of(table, torch.linalg.matmul, h, f) == HALF
    assert dtype_of(table, torch.lerp, h, f, 0.5) == FULL
    assert dtype_of(table, F.scaled_dot_product_attention, h[None], f[None], f[None]) == FULL
    assert dtype_of(table, torch.ops.aten.sigmoid, h) == FULL
    assert dtype_of(table, torch.ops.aten.sigmoid.default, h) == FULL
    assert dtype_of(CastTable(), torch.sigmoid, h) == HALF, "in one table only"
    assert torch.sigmoid not in O1_LISTS


def test_what_cannot_be_registered_is_refused():
    module = types.ModuleType("mine")
    module.attend = lambda x: x
    with pytest.raises(InputError, match=r"decorate it where it is defined with @halfmesh.half_function"):
        CastTable().register_half_function(module, "attend")
    with pytest.raises(AttributeError, match=r"module 'torch' has no attribute 'einsumm'"):
        CastTable().register_half_function(torch, "einsumm")
    for place, name in [(torch.Tensor, "sigmoid_"), (torch.Tensor, "__iadd__"), (torch.Tensor, "__add__")]:
        with pytest.raises(InputError, match="in place"):
            CastTable().register_float_function(place, name)


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


def test_decorators_cast_what_the_function_is_called_with():
    h, f = torch.ones(1, dtype=HALF), torch.ones(1)
    with scope():
        values = as_half(f, [f, INDEX, "word"], out=f)
        assert [getattr(v, "dtype", v) for v in values] == [HALF, HALF, torch.int64, "word", HALF]
        assert as_float(h).dtype == FULL
        assert [v.dtype for v in as_widest(h, f)] == [FULL, FULL]
        assert [v.dtype for v in as_widest(h, h)] == [HALF, HALF]


def test_decorators_change_nothing_outside():
    h, f = torch.ones(1, dtype=HALF), torch.ones(1)
    assert as_half(f)[0] is f
    assert as_float(h) is h
    assert as_widest(h, f) == (h, f)
    assert (as_float.__name__, as_float.__doc__) == ("as_float", "Its own words.")
    with scope(), torch.autocast("cpu", enabled=False):
        assert as_half(f)[0] is f
        assert as_float(h) is h


def test_functions_called_by_a_decorated_one_are_cast_too():
    @float_function
    def loss(x, w):
        return x.dtype, F.linear(x, w).dtype, as_half(x)[0].dtype

    class Tree(nn.Module):
        @half_function
        def forward(self, x, depth):
            return self(x.float(), depth - 1) if depth else x

    @half_function
    def fail(x):
        raise KeyError("here")

    with scope():
        assert loss(torch.ones(1, 2, dtype=HALF), torch.ones(2, 2)) == (FULL, HALF, HALF)
        assert Tree()(torch.ones(1), 3).dtype == HALF
        with pytest.raises(KeyError, match="here"):
            fail(torch.ones(1))
        assert (torch.eye(2) @ torch.eye(2)).dtype == HALF
