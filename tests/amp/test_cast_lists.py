"""What each listed function does under O1 to dtypes of outputs and gradients, and what a model can add to the lists."""

from __future__ import annotations

import functools
import math
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from halfmesh.amp.cast_lists import Cast, CastTable, float_function, half_function, o1_lists, promote_function
from halfmesh.amp.o1_casts import o1_scope
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
POINTWISE = dict.fromkeys(
    words("acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan"), lambda x: (x(2, 3),)
)
FLOATS = {
    **POINTWISE,
    "pow": lambda x: (x(2, 3), x(2, 3)),
    "__pow__": lambda x: (x(2, 3), 2),
    "__rpow__": lambda x: (x(2, 3), 2.0),
    "cumprod": lambda x: (x(2, 3), 0),
    "cumsum": lambda x: (x(2, 3), 0),
    "dist": lambda x: (x(2, 3), x(2, 3)),
    "norm": lambda x: (x(2, 3),),
    "prod": lambda x: (x(2, 3),),
    "std": lambda x: (x(2, 3),),
    "sum": lambda x: (x(2, 3),),
    "var": lambda x: (x(2, 3),),
    "renorm": lambda x: (x(2, 3), 2, 0, 1.0),
    "cpu": lambda x: (x(2, 3),),
    "interpolate": lambda x: (x(1, 1, 4), 2),
    "grid_sample": lambda x: (x(1, 1, 2, 2), x(1, 2, 2, 2), "bilinear", "zeros", False),
    "softplus": lambda x: (x(2, 3),),
    "softmin": lambda x: (x(2, 3), 1),
    "log_softmax": lambda x: (x(2, 3), 1),
    "softmax": lambda x: (x(2, 3), 1),
    "gelu": lambda x: (x(2, 3),),
    "layer_norm": lambda x: (x(2, 3), (3,), x(3), x(3)),
    "group_norm": lambda x: (x(2, 4), 2, x(4), x(4)),
    "local_response_norm": lambda x: (x(2, 3, 4), 2),
    "normalize": lambda x: (x(2, 3),),
    "cosine_similarity": lambda x: (x(2, 3), x(2, 3)),
    "poisson_nll_loss": lambda x: (x(2, 3), x(2, 3)),
    "cosine_embedding_loss": lambda x: (x(2, 3), x(2, 3), SIGNS),
    "cross_entropy": lambda x: (x(2, 3), INDEX, x(3).detach()),
    "hinge_embedding_loss": lambda x: (x(2), SIGNS),
    "kl_div": lambda x: (x(2, 3), x(2, 3), None, None, "batchmean"),
    "l1_loss": lambda x: (x(2, 3), x(2, 3)),
    "mse_loss": lambda x: (x(2, 3), x(2, 3)),
    "margin_ranking_loss": lambda x: (x(2), x(2), SIGNS),
    "multilabel_margin_loss": lambda x: (x(2, 2), INDEX.repeat(2, 1)),
    "multilabel_soft_margin_loss": lambda x: (x(2, 3), x(2, 3)),
    "multi_margin_loss": lambda x: (x(2, 3), INDEX),
    "nll_loss": lambda x: (x(2, 3), INDEX),
    "binary_cross_entropy_with_logits": lambda x: (x(2, 3), x(2, 3)),
    "smooth_l1_loss": lambda x: (x(2, 3), x(2, 3)),
    "soft_margin_loss": lambda x: (x(2), SIGNS),
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
OPERATORS = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def cases(*casts):
    """(place, name) of every listed function with one of `casts` that has a call above."""
    return [
        pytest.param(place, name, id=f"{place.__name__}.{name}")
        for cast in casts
        for name in CALLS[cast]
        for place in PLACES
        if o1_lists().get(getattr(place, name, None)) is cast
    ]


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


def check(function, args, make, dtype):
    """The output of `function` under O1 has `dtype`, and each leaf gets a gradient of its own dtype."""
    with scope():
        output = function(*args)
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        return
    assert output.dtype == dtype
    output.float().sum().backward()
    used = [leaf for leaf in make.made if leaf.grad is not None]
    assert used
    assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all() for leaf in used)


def test_every_name_in_the_lists_is_covered_here():
    covered = {getattr(case.values[0], case.values[1]) for case in cases(*Cast)}
    covered |= {getattr(torch, name) for name in (*RNNS, *CELLS)}
    assert covered == set(o1_lists())


def test_every_name_in_the_lists_exists_in_this_torch():
    names = {name for calls in (PRODUCTS, FLOATS, PROMOTED, BANNED) for name in calls}
    assert [name for name in names if not any(hasattr(place, name) for place in PLACES)] == []
    assert o1_lists()[torch.mm] is Cast.HALF
    with pytest.raises(TypeError):
        o1_lists()[torch.mm] = Cast.FLOAT


@pytest.mark.parametrize(("place", "name"), cases(*Cast))
def test_torch_reports_the_very_function_that_is_listed(place, name):
    function = getattr(place, name)
    args = {k: v for calls in CALLS.values() for k, v in calls.items()}[name](Maker(FULL, requires_grad=False))
    with Reports() as reports:
        function(*args)
    assert reports.functions[0] is function


@pytest.mark.parametrize("name", [*RNNS, *CELLS])
def test_torch_reports_recurrent_functions(name):
    module = (RNNS.get(name) or CELLS[name])(2, 2)
    with Reports() as reports:
        module(torch.ones(1, 2))
    assert getattr(torch, name) in reports.functions


@pytest.mark.parametrize("dtypes", [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF), (BF16, FULL)])
@pytest.mark.parametrize(("place", "name"), cases(Cast.HALF))
def test_products_are_half(place, name, dtypes):
    make = Maker(*dtypes)
    check(getattr(place, name), PRODUCTS[name](make), make, HALF)


@pytest.mark.parametrize("dtypes", [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF), (BF16,)])
@pytest.mark.parametrize(("place", "name"), cases(Cast.FLOAT))
def test_floats_are_float(place, name, dtypes):
    make = Maker(*dtypes)
    check(getattr(place, name), FLOATS[name](make), make, FULL)


@pytest.mark.parametrize("dtypes", [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF), (BF16, HALF)])
@pytest.mark.parametrize(("place", "name"), cases(Cast.WIDEST))
def test_promoted_functions_take_the_widest_dtype(place, name, dtypes):
    make = Maker(*dtypes)
    check(getattr(place, name), PROMOTED[name](make), make, HALF if dtypes == (HALF,) else FULL)


@pytest.mark.parametrize("name", ["add", "mul", "div", "cat", "stack", "addcmul"])
def test_promotion_with_doubles_is_left_to_torch(name):
    make = Maker(HALF, DOUBLE)
    check(getattr(torch, name), PROMOTED[name](make), make, DOUBLE)


@pytest.mark.parametrize("dtypes", [(HALF,), (FULL,), (HALF, FULL), (FULL, HALF)])
@pytest.mark.parametrize("symbol", OPERATORS)
def test_operators_take_the_widest_dtype(symbol, dtypes):
    widest = HALF if dtypes == (HALF,) else FULL
    for shape in [(2, 3), ()]:  # to torch alone a single number has less say
        make = Maker(*dtypes)
        check(OPERATORS[symbol], (make(2, 3), make(*shape)), make, widest)


def test_comparisons_compare_in_the_widest_dtype():
    third = torch.tensor([1 / 3])
    with scope():
        assert not (third.half() == third).item()
        assert not torch.equal(third.half(), third)
        assert torch.equal(third.half(), third.half().float())
        assert (third.half() != third).item()


def test_operators_with_numbers():
    h = torch.full((2,), 0.5, dtype=HALF)
    with scope():
        assert [(2 + h).dtype, (h - 2).dtype, (2 - h).dtype, (2 * h).dtype, (h / 3).dtype] == [HALF] * 5
        assert [(h**2).dtype, (2**h).dtype, (h @ h).dtype] == [FULL, FULL, HALF]
        assert (1 / h).dtype == FULL  # torch makes a reciprocal of it
        assert torch.equal(1 / torch.full((1,), 2.0**-24, dtype=HALF), torch.full((1,), 2.0**24))


@pytest.mark.parametrize("dtypes", [(HALF,), (HALF, FULL), (FULL,), (FULL, HALF)])
@pytest.mark.parametrize(("place", "name"), cases(Cast.SELF))
def test_in_place_functions_match_what_they_change(place, name, dtypes):
    make = Maker(*dtypes)
    leaf, *others = IN_PLACE[name](make)
    changed = leaf.clone()
    before = changed.detach().clone()
    with scope():
        result = getattr(place, name)(changed, *others)
    assert result is changed
    assert changed.dtype == dtypes[0]
    assert not torch.equal(changed, before)
    if changed.requires_grad and name not in ("eq_", "ge_", "gt_", "le_", "lt_", "ne_"):
        changed.float().sum().backward()
        assert all(made.grad.dtype == made.dtype for made in make.made if made.grad is not None)
        assert others[0].grad is not None


@pytest.mark.parametrize("dtypes", [(HALF, FULL), (FULL, HALF)])
def test_in_place_operators_keep_the_dtype(dtypes):
    first, second = (torch.full((2,), 2.0, dtype=dtype) for dtype in dtypes)
    kept = first
    with scope():
        first += second
        first -= second
        first *= second
        first /= second
    assert first is kept
    assert first.dtype == dtypes[0]
    assert first.tolist() == [2, 2]


@pytest.mark.parametrize(("place", "name"), cases(Cast.NOT_HALF))
def test_in_place_floats_are_refused_on_half_and_work_on_float(place, name):
    half = IN_PLACE[name](Maker(HALF, requires_grad=False))
    kept = half[0].clone()
    with scope(), pytest.raises(NotImplementedError, match=r"in place.*write it out of place"):
        getattr(place, name)(*half)
    assert torch.equal(half[0], kept)
    full = IN_PLACE[name](Maker(FULL, HALF, requires_grad=False))
    expected = getattr(place, name)(full[0].clone(), *full[1:])
    with scope():
        assert getattr(place, name)(*full) is full[0]
    assert full[0].dtype == FULL
    assert torch.equal(full[0], expected)


def test_in_place_functions_whose_tensor_is_given_by_name():
    with scope():
        with pytest.raises(NotImplementedError, match="exp_ changes"):
            torch.exp_(input=torch.ones(2, dtype=HALF))
        changed = torch.zeros(2, dtype=HALF)
        torch.addmv_(input=changed, mat=torch.ones(2, 2), vec=torch.ones(2))
    assert changed.tolist() == [2, 2]


def test_binary_cross_entropy_is_refused_on_half():
    half, full = (torch.full((2,), 0.5, dtype=dtype) for dtype in (HALF, FULL))
    with scope():
        for args in [(half, full), (full, half), (half, half)]:
            for loss in (F.binary_cross_entropy, nn.BCELoss()):
                with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
                    loss(*args)
        assert F.binary_cross_entropy(full, full).dtype == FULL
        assert nn.BCEWithLogitsLoss()(half, full).dtype == FULL


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", RNNS)
@pytest.mark.parametrize(("layers", "bidirectional", "packed"), [(1, False, False), (2, True, False), (1, False, True)])
def test_recurrent_modules_are_half(name, dtype, layers, bidirectional, packed):
    module = RNNS[name](3, 2, num_layers=layers, bidirectional=bidirectional)
    x = Maker(dtype)(3, 2, 3)
    hidden = torch.zeros(layers * (1 + bidirectional), 2, 2, dtype=dtype)
    state = (hidden, hidden) if name == "lstm" else hidden
    with scope():
        inputs = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2])) if packed else x
        output, last = module(inputs, state)
    output = output.data if packed else output
    assert [output.dtype, *(h.dtype for h in (last if name == "lstm" else [last]))][:2] == [HALF, HALF]
    output.float().sum().backward()
    assert x.grad.dtype == dtype
    assert {p.grad.dtype for p in module.parameters()} == {FULL}


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", CELLS)
def test_recurrent_cells_are_half(name, dtype):
    cell, x = CELLS[name](3, 2), Maker(dtype)(2, 3)
    with scope():
        state = cell(x)
        state = cell(x, state)
    output = state[0] if name == "lstm_cell" else state
    assert output.dtype == HALF
    output.float().sum().backward()
    assert x.grad.dtype == dtype
    assert {p.grad.dtype for p in cell.parameters()} == {FULL}


def test_out_is_written_in_its_own_dtype():
    h, f = torch.eye(2).half(), torch.eye(2)
    with scope():
        for function in (torch.mm, torch.matmul, torch.add, torch.dot, torch.exp, torch.cumsum):
            for dtypes in ((HALF, HALF), (HALF, FULL), (FULL, FULL)):
                args = {torch.exp: (f,), torch.cumsum: (f, 0), torch.dot: (f[0], f[0])}.get(function, (f, f))
                args = [a.to(d) if isinstance(a, torch.Tensor) else a for a, d in zip(args, dtypes, strict=False)]
                for dtype in (HALF, FULL):
                    out = torch.empty(2, 2, dtype=dtype) if function is not torch.dot else torch.empty((), dtype=dtype)
                    assert function(*args, out=out) is out
                    assert out.dtype == dtype
                    torch.testing.assert_close(out.float(), function(*args).float(), atol=2e-3, rtol=2e-3)
        compared = torch.empty(2, 2, dtype=torch.bool)
        assert torch.eq(h / 3, f / 3, out=compared).diagonal().any().item() is False
        assert F.normalize(h[0] * 512, dim=0, out=torch.empty(2)).tolist() == [1, 0]
        assert torch.mm(f, f, out=None).dtype == HALF


# What a model can add


def dtype_of(table, function, *args):
    with scope(table):
        return function(*args).dtype


def test_registered_functions():
    table, h, f = CastTable(), torch.rand(2, 2).half(), torch.rand(2, 2)
    table.register_float_function(torch, "sigmoid")
    table.register_float_function(torch.Tensor, "softmax")
    table.register_half_function(torch, "einsum")
    table.register_half_function(torch.linalg, "matmul")
    table.register_float_function(torch.linalg, "norm")
    table.register_promote_function(torch, "lerp")
    table.register_float_function(F, "scaled_dot_product_attention")
    table.register_float_function(torch.fft, "rfft")
    assert dtype_of(table, torch.sigmoid, h) == FULL
    assert dtype_of(table, torch.Tensor.sigmoid, h) == HALF  # another function
    assert dtype_of(table, lambda x: x.softmax(0), h) == FULL
    assert dtype_of(table, torch.einsum, "ij,jk", f, f) == HALF
    assert dtype_of(table, torch.linalg.matmul, h, f) == HALF
    assert dtype_of(table, torch.linalg.norm, h) == FULL
    assert dtype_of(table, torch.lerp, h, f, 0.5) == FULL
    assert dtype_of(table, F.scaled_dot_product_attention, h[None], f[None], f[None]) == FULL
    assert dtype_of(table, torch.fft.rfft, h) == torch.complex64


def test_registered_functions_hold_for_one_table_from_the_next_call_on():
    table, h = CastTable(), torch.ones(2, dtype=HALF)
    with scope(table):
        assert torch.sigmoid(h).dtype == HALF
        table.register_float_function(torch, "sigmoid")
        assert torch.sigmoid(h).dtype == FULL
    assert dtype_of(CastTable(), torch.sigmoid, h) == HALF
    assert torch.sigmoid not in o1_lists()


@pytest.mark.parametrize("name", words("add radd sub rsub mul rmul truediv div mod matmul pow rpow eq ne lt le gt ge"))
def test_registered_operators(name):
    table, x = CastTable(), torch.full((1,), 2.0)
    with Reports() as reports:
        getattr(torch.Tensor, f"__{name}__")(x, x)
    table.register_half_function(torch.Tensor, f"__{name}__")
    assert table.get(reports.functions[0]) is Cast.HALF
    table.register_float_function(torch.Tensor, "__truediv__")
    assert dtype_of(table, lambda x: x / 2, x.half()) == FULL


def test_registered_operators_of_torch_ops():
    table, h, f = CastTable(), torch.rand(2, 2).half(), torch.rand(2, 2)
    table.register_half_function(torch.ops.aten, "mm")
    table.register_float_function(torch.ops.aten.sigmoid, "default")
    assert dtype_of(table, torch.ops.aten.mm, h, f) == HALF
    assert dtype_of(table, torch.ops.aten.mm.default, f, f) == HALF
    assert dtype_of(table, torch.ops.aten.sigmoid.default, h) == FULL


def test_a_function_of_the_models_own_module_is_refused():
    module = types.ModuleType("mine")
    module.attend = lambda x: x
    with pytest.raises(InputError) as error:
        CastTable().register_half_function(module, "attend")
    assert "decorate it where it is defined with @halfmesh.half_function" in str(error.value)
    assert "mine.attend = halfmesh.half_function(mine.attend)" in str(error.value)


def test_a_decorated_function_can_be_registered_again():
    module, table = types.ModuleType("mine"), CastTable()
    module.same = half_function(lambda x: x)
    assert dtype_of(table, module.same, torch.ones(2)) == HALF
    table.register_float_function(module, "same")
    assert dtype_of(table, module.same, torch.ones(2, dtype=HALF)) == FULL


def test_a_misspelt_name_suggests():
    with pytest.raises(InputError, match=r"torch has no function 'einsumm'; did you mean 'einsum'\?"):
        CastTable().register_half_function(torch, "einsumm")
    with pytest.raises(InputError, match="Tensor has no function 'shape'"):
        CastTable().register_half_function(torch.Tensor, "shape")


@pytest.mark.parametrize(("module", "name"), [(torch.Tensor, "sigmoid_"), (F, "relu_"), (torch.Tensor, "__iadd__")])
def test_in_place_functions_cannot_be_registered(module, name):
    with pytest.raises(InputError, match="in place"):
        CastTable().register_float_function(module, name)


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
        assert as_half(f)[1] is None
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

    with scope():
        assert loss(torch.ones(1, 2, dtype=HALF), torch.ones(2, 2)) == (FULL, HALF, HALF)


def test_casts_go_on_in_a_decorated_function_that_switches_them_on_again():
    @half_function
    def forward(x):
        with torch.autocast("cpu", enabled=True):
            return (x @ x).dtype, x.half().sum().dtype

    with scope(), torch.autocast("cpu", enabled=False):
        assert forward(torch.eye(2)) == (HALF, FULL)  # by torch's own lists the sum is half
        assert as_float(torch.ones(1, dtype=HALF)).dtype == HALF


def test_decorated_methods_and_recursion():
    class Tree(nn.Module):
        @half_function
        def forward(self, x, depth):
            return self(x.float(), depth - 1) if depth else x

    with scope():
        assert Tree()(torch.ones(1), 3).dtype == HALF
    assert Tree()(torch.ones(1), 3).dtype == FULL


def test_an_exception_in_a_decorated_function_goes_through():
    @half_function
    def fail(x):
        raise KeyError("here")

    with scope():
        with pytest.raises(KeyError, match="here"):
            fail(torch.ones(1))
        assert (torch.eye(2) @ torch.eye(2)).dtype == HALF
