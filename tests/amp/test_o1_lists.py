"""What each listed function does under O1 to dtypes of outputs and gradients."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from halfmesh.amp.o1 import O1_LISTS, Cast, CastTable, o1_scope

HALF, FULL, BF16 = torch.float16, torch.float32, torch.bfloat16
PLACES = (torch, F, torch.Tensor)
INDEX, SIGNS = torch.tensor([0, 1]), torch.tensor([1.0, -1.0])

# Names, and how they are called: "2x3" is a tensor of that shape, in the dtype under test.
PRODUCTS = (
    ("conv1d", "1x2x5", "3x2x3", "3"),
    ("conv2d", "1x2x4x4", "3x2x3x3", "3"),
    ("conv3d", "1x1x3x3x3", "2x1x2x2x2"),
    ("conv_transpose1d", "1x2x3", "2x3x3", "3"),
    ("conv_transpose2d", "1x2x3x3", "2x1x2x2"),
    ("conv_transpose3d", "1x1x2x2x2", "1x1x2x2x2"),
    ("conv_tbc", "4x1x2", "3x2x3", "3"),
    ("linear", "2x3", "4x3", "4"),
    ("scaled_dot_product_attention", "1x2x3", "1x2x3", "1x2x3"),
    ("prelu", "2x3", "1"),
    ("addmm", "2x2", "2x3", "3x2"),
    ("addmv", "2", "2x3", "3"),
    ("addr", "2x3", "2", "3"),
    ("matmul mm", "2x3", "3x2"),
    ("mv", "2x3", "3"),
    ("addbmm", "2x2", "2x2x3", "2x3x2"),
    ("baddbmm", "2x2x2", "2x2x3", "2x3x2"),
    ("bmm", "2x2x3", "2x3x2"),
)
FLOATS = (
    ("acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan", "2x3"),
    ("norm prod std sum var cpu softplus gelu normalize", "2x3"),
    ("pow dist cosine_similarity poisson_nll_loss l1_loss mse_loss smooth_l1_loss", "2x3", "2x3"),
    ("multilabel_soft_margin_loss binary_cross_entropy_with_logits", "2x3", "2x3"),
    ("cumprod cumsum", "2x3", 0),
    ("softmin log_softmax softmax", "2x3", 1),
    ("hinge_embedding_loss soft_margin_loss", "2", SIGNS),
    ("multi_margin_loss nll_loss cross_entropy", "2x3", INDEX),
    ("__pow__ __rpow__", "2x3", 2),
    ("renorm", "2x3", 2, 0, 1.0),
    ("interpolate", "1x1x4", 2),
    ("grid_sample", "1x1x2x2", "1x2x2x2", "bilinear", "zeros", False),
    ("layer_norm", "2x3", (3,), "3", "3"),
    ("group_norm", "2x4", 2, "4", "4"),
    ("local_response_norm", "2x3x4", 2),
    ("cosine_embedding_loss", "2x3", "2x3", SIGNS),
    ("kl_div", "2x3", "2x3", None, None, "batchmean"),
    ("margin_ranking_loss", "2", "2", SIGNS),
    ("multilabel_margin_loss", "2x2", INDEX.repeat(2, 1)),
    ("triplet_margin_loss", "2x3", "2x3", "2x3"),
    ("ctc_loss", "4x1x3", torch.tensor([[1]]), torch.tensor([4]), torch.tensor([1])),
)
WIDEST = (
    ("atan2 dot vdot add sub div mul eq equal ge gt le lt ne __eq__ __rsub__", "3", "3"),
    ("cross", "2x3", "2x3", 1),
    ("addcdiv addcmul", "3", "3", "3"),
    ("bilinear", "2x3", "2x3", "2x3x3", "2"),
    ("cat stack", ["3", "3"]),
    ("einsum", "ij,jk->ik", "2x3", "3x2"),
    ("tensordot", "2x3", "3x2", 1),
)
RECURRENT = {"rnn_relu": nn.RNN, "rnn_tanh": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}
CELLS = {"rnn_relu_cell": nn.RNNCell, "rnn_tanh_cell": nn.RNNCell, "gru_cell": nn.GRUCell, "lstm_cell": nn.LSTMCell}


def calls(*tables):
    return {name: args for table in tables for names, *args in table for name in names.split()}


IN_PLACE = {f"{name}_": args for name, args in calls(PRODUCTS, FLOATS, WIDEST).items()} | {"__ipow__": ["2x3", 2]}
CALLS = {
    Cast.HALF: calls(PRODUCTS),
    Cast.FLOAT: calls(FLOATS),
    Cast.WIDEST: calls(WIDEST),
    Cast.BANNED: {"binary_cross_entropy": ["2x3", "2x3"]},
    Cast.SELF: IN_PLACE,
    Cast.NOT_HALF: IN_PLACE,
}
# Dtypes of the arguments in turn, and that of the output.
OUTPUTS = {
    Cast.HALF: {(HALF,): HALF, (FULL,): HALF, (HALF, FULL): HALF, (FULL, HALF): HALF, (BF16, FULL): HALF},
    Cast.FLOAT: {(HALF,): FULL, (FULL,): FULL, (HALF, FULL): FULL, (FULL, HALF): FULL, (BF16,): FULL},
    Cast.WIDEST: {(HALF,): HALF, (FULL,): FULL, (HALF, FULL): FULL, (FULL, HALF): FULL, (BF16, HALF): FULL},
}


def listed(cast):
    """(function, name, arguments) of every listed function with `cast` that has a call above."""
    for name, args in CALLS[cast].items():
        for place in PLACES:
            if O1_LISTS.get(function := getattr(place, name, None)) is cast:
                yield function, name, args


class Maker:
    """Makes tensors whose dtypes go through `dtypes` in turn, between 0.25 and 0.75, where everything is defined."""

    def __init__(self, *dtypes, requires_grad=True):
        self.dtypes, self.requires_grad, self.made = dtypes, requires_grad, []

    def __call__(self, args):
        """The arguments of a call above."""
        if isinstance(args, list):
            return [self(arg) for arg in args]
        if not isinstance(args, str) or not re.fullmatch(r"\d+(x\d+)*", args):
            return args
        shape, dtype = [*map(int, args.split("x"))], self.dtypes[len(self.made) % len(self.dtypes)]
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


def make_recurrent(name, *args, **options):
    kind = {"nonlinearity": name.split("_")[1]} if name.startswith("rnn") else {}
    return (RECURRENT | CELLS)[name](*args, **kind, **options)


def test_every_listed_function_is_covered_here_and_reported_by_torch_as_itself():
    """Were it reported as another one, its cast would not be found."""
    covered = set()
    for name in (*RECURRENT, *CELLS):
        with Reports() as reports:
            make_recurrent(name, 2, 2)(torch.ones(1, 2))
        assert getattr(torch, name) in reports.functions
        covered.add(getattr(torch, name))
    for cast in Cast:
        for function, name, args in listed(cast):
            covered.add(function)
            given = Maker(FULL, requires_grad=False)(args)
            with Reports() as reports:
                function(*given)
            assert reports.functions[0] is function, name
    assert covered == set(O1_LISTS)


@pytest.mark.parametrize("cast", OUTPUTS)
def test_listed_functions_give_the_dtype_of_their_list(cast):
    assert {name for _, name, _ in listed(cast)} == CALLS[cast].keys(), "none has left its list"
    for function, name, args in listed(cast):
        for dtypes, expected in OUTPUTS[cast].items():
            make, label = Maker(*dtypes), (name, dtypes)
            with o1_scope(CastTable(), "cpu"):
                output = function(*make(args))
            if not isinstance(output, torch.Tensor) or not output.is_floating_point():
                continue
            assert output.dtype == expected, label
            output.float().sum().backward()
            used = [leaf for leaf in make.made if leaf.grad is not None]
            assert used, label
            assert all(leaf.grad.dtype == leaf.dtype and leaf.grad.isfinite().all() for leaf in used), label


def test_in_place_functions_match_what_they_change():
    for function, name, args in listed(Cast.SELF):
        for dtypes in ((HALF,), (HALF, FULL), (FULL,), (FULL, HALF)):
            make, label = Maker(*dtypes), (name, dtypes)
            leaf, *others = make(args)
            changed = leaf.clone()
            with o1_scope(CastTable(), "cpu"):
                assert function(changed, *others) is changed, label
            assert changed.dtype == dtypes[0], label
            if name not in ("eq_", "ge_", "gt_", "le_", "lt_", "ne_"):
                changed.float().sum().backward()
                assert all(made.grad.dtype == made.dtype for made in make.made if made.grad is not None), label


def test_in_place_floats_are_rejected_on_half_and_work_on_float():
    for function, name, args in listed(Cast.NOT_HALF):
        half = Maker(HALF, requires_grad=False)(args)
        full = Maker(FULL, HALF, requires_grad=False)(args)
        expected = function(full[0].clone(), *full[1:])
        with o1_scope(CastTable(), "cpu"):
            with pytest.raises(NotImplementedError, match=r"in place.*use the out-of-place form"):
                function(*half)
            assert function(*full) is full[0], name
        assert torch.equal(full[0], expected), name


def test_binary_cross_entropy_is_rejected_on_half():
    half, full = (torch.full((2,), 0.5, dtype=dtype) for dtype in (HALF, FULL))
    with o1_scope(CastTable(), "cpu"):
        for args in [(half, full), (full, half)]:
            with pytest.raises(NotImplementedError, match="use binary_cross_entropy_with_logits"):
                nn.BCELoss()(*args)
        assert F.binary_cross_entropy(full, full).dtype == FULL
        assert nn.BCEWithLogitsLoss()(half, full).dtype == FULL


@pytest.mark.parametrize("name", [*RECURRENT, *CELLS])
def test_recurrent_modules_are_half(name):
    for dtype in (HALF, FULL):
        module, x = make_recurrent(name, 3, 2), Maker(dtype)("2x3")
        with o1_scope(CastTable(), "cpu"):
            output = module(x)[0]
        assert output.dtype == HALF
        output.float().sum().backward()
        assert (x.grad.dtype, {p.grad.dtype for p in module.parameters()}) == (dtype, {FULL})
