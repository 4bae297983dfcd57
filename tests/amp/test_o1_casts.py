"""O1's scope: what it sees, how it nests, what it leaves behind, its cast weights, and models in it."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import threading
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from halfmesh.amp.cast_lists import CastTable, float_function, half_function
from halfmesh.amp.o1_casts import O1Casts, o1_scope

HALF, FULL, BF16 = torch.float16, torch.float32, torch.bfloat16
OFF = functools.partial(torch.autocast, "cpu", enabled=False)
ON = functools.partial(torch.autocast, "cpu", enabled=True)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def scope(table=None):
    return o1_scope(table or CastTable(), "cpu")


def ones(*shape, dtype=HALF):
    return torch.ones(*shape, dtype=dtype)


def state():
    """All that a scope touches on this thread."""
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()
    return (*autocast, torch.overrides._get_current_function_mode_stack())


def rules():
    """Which rules hold: "o1", torch's own for fp16 or bf16, or none."""
    x = torch.eye(2)
    by_dtypes = {(HALF, FULL): "o1", (HALF, HALF): "fp16", (BF16, HALF): "bf16", (FULL, HALF): "none"}
    return by_dtypes[(x @ x).dtype, x.half().sum().dtype]


class CountCasts(TorchDispatchMode):
    """Counts conversions of the dtype."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@contextmanager
def casts(expected):
    with CountCasts() as counter:
        yield
    assert counter.count == expected


# What is seen: unlisted functions and what is inside them

FOLLOWERS = {
    "relu": F.relu,
    "mean": torch.mean,
    "dropout": F.dropout,
    "sqrt": torch.sqrt,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "method softmax": lambda x: x.softmax(-1),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4), True),
    "instance_norm": lambda x: F.instance_norm(x[None], torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4)),
    "max_pool2d": lambda x: F.max_pool2d(x[None], 2),
    "max_pool2d with indices": lambda x: F.max_pool2d(x[None], 2, return_indices=True)[0],
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], 1),
    "pad": lambda x: F.pad(x, (1, 1)),
    "silu": F.silu,
    "where": lambda x: torch.where(x > 0, x, x),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1]]), x),
    "huber_loss": lambda x: F.huber_loss(x, x + 1),
    "linalg": lambda x: torch.linalg.vector_norm(x),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0],
    "split": lambda x: x.split(2)[0],
    "unflatten": lambda x: x.unflatten(0, (2, 2)),
    "unique": lambda x: x.detach().unique(),
    "linspace": lambda x: x + torch.linspace(0, 1, 4, dtype=x.dtype),
}


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", FOLLOWERS)
def test_unlisted_functions_follow_their_input(name, dtype):
    x = (torch.rand(4, 4).to(dtype) + 0.5).requires_grad_()
    with scope():
        y = FOLLOWERS[name](x)
    assert y.dtype == dtype
    if y.requires_grad:
        y.float().sum().backward()
        assert x.grad.dtype == dtype


SEEN_INSIDE = {
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x), FULL),
    "gumbel_softmax hard": (lambda x: F.gumbel_softmax(x, hard=True), FULL),
    "triplet": (lambda x: F.triplet_margin_with_distance_loss(x, x + 1, x - 1), None),
    "lp_pool2d": (lambda x: F.lp_pool2d(x[None], 2.0, 2), FULL),
    "gaussian_nll": (lambda x: F.gaussian_nll_loss(x, x, x.abs()), FULL),
    "norm": (lambda x: torch.norm(x), FULL),
    "method norm": (lambda x: x.norm(dim=1), FULL),
    "rmatmul": (lambda x: torch.Tensor.__rmatmul__(x, x), HALF),
    "einsum": (lambda x: torch.einsum("ij,jk->ik", x, x.half()), None),
    "rdiv": (lambda x: 1 / x, FULL),
}


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", SEEN_INSIDE)
def test_python_functions_of_torch_are_seen_through(name, dtype):
    function, expected = SEEN_INSIDE[name]
    x = (torch.rand(4, 4) + 0.5).to(dtype).requires_grad_()
    with scope():
        y = function(x)
    assert y.dtype == (expected or dtype)
    y.float().sum().backward()
    assert x.grad.dtype == dtype


def test_additions_are_found_inside_python_functions_of_torch():
    table = CastTable()
    table.register_float_function(torch, "relu")
    table.register_float_function(torch, "embedding")
    table.register_half_function(torch, "batch_norm")
    with scope(table):
        assert nn.ReLU()(ones(2)).dtype == FULL
        assert F.embedding(torch.tensor([0]), ones(2, 2)).dtype == FULL
        assert F.relu(F.dropout(F.batch_norm(torch.rand(2, 2), None, None, training=True))).dtype == FULL
        assert F.batch_norm(torch.rand(2, 2), None, None, training=True).dtype == HALF


def test_functions_exchanged_in_torch_are_called(monkeypatch):
    with scope():
        assert F.lp_pool2d(ones(1, 2, 2), 1.0, 1).sum().item() == 4
        monkeypatch.setattr(F, "relu", lambda x: x * 0)
        assert F.lp_pool2d(ones(1, 2, 2), 1.0, 1).sum().item() == 0


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights, dtype):
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.rand(1, 3, 4).to(dtype).requires_grad_()
    mask = torch.zeros(1, 3, dtype=torch.bool)
    with scope():
        y, weights = attention(x, x, x, need_weights=need_weights, key_padding_mask=mask)
    assert y.dtype == HALF
    assert weights is None if not need_weights else weights.dtype == FULL
    y.float().sum().backward()
    assert x.grad.dtype == dtype
    assert {p.grad.dtype for p in attention.parameters()} == {FULL}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoder_layer(training, norm_first):
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=norm_first).train(training)
    x = torch.rand(1, 3, 4)
    with scope(), nullcontext() if training else torch.no_grad():
        y = layer(x)
    assert y.dtype == FULL  # a residual in fp32, or a layer norm
    torch.testing.assert_close(y, layer(x), atol=2e-2, rtol=2e-2)
    if training:
        y.sum().backward()
        assert {p.grad.dtype for p in layer.parameters()} == {FULL}


def test_signals():
    x, window = torch.rand(64), torch.hann_window(8)
    with scope():
        spectrum = torch.stft(x, 8, window=window, return_complex=True)
        back = torch.istft(spectrum, 8, window=window, length=64)
        assert (spectrum @ spectrum.mT).dtype == torch.complex64
        assert (spectrum[0] * ones(1)).dtype == torch.complex64
        assert torch.fft.rfft(x).dtype == torch.complex64
    assert back.dtype == FULL
    torch.testing.assert_close(back, x, atol=1e-4, rtol=1e-4)


def test_integers_and_numbers_stay():
    n = torch.arange(4)
    with scope():
        assert [n.sum().dtype, (n + n).dtype, (n @ n).dtype, n.pow(2).dtype, n.cpu().dtype] == [torch.int64] * 5
        assert (n * ones(4)).dtype == HALF
        assert (n == n).all()
        assert torch.cat([n, n]).dtype == torch.int64
        assert ones(()).item() == 1.0
        assert [(ones(2) * 0.5).dtype, (ones(2) + torch.tensor(2)).dtype] == [HALF, HALF]


def test_only_tensors_of_the_scopes_device_are_cast():
    meta, x = torch.ones(2, 2, device="meta"), torch.ones(2, 2)
    with scope():
        assert (meta @ meta).dtype == FULL
        assert meta.half().exp_().dtype == HALF
        assert (x @ x).dtype == HALF


def test_sparse_is_cast_as_dense_is():
    x = torch.eye(3).to_sparse()
    with scope():
        assert (x @ torch.ones(3, 3)).dtype == HALF
        assert torch.sparse.mm(x, torch.ones(3, 3)).dtype == FULL  # unlisted
        assert x.half().sum().dtype == FULL


def test_numpy_pickle_deepcopy_and_printing_in_the_scope():
    h = torch.tensor([0.5, 1e-3], dtype=HALF)
    d = torch.tensor([1e9 + 0.123, 1e-9], dtype=torch.float64)
    shown = [str(h), repr(d), f"{h[0]:.2f}", f"{ones(2, 2) * 70}"]
    with scope():
        assert [str(h), repr(d), f"{h[0]:.2f}", f"{ones(2, 2) * 70}"] == shown
        assert np.asarray(h).dtype == np.float16
        assert h.tolist() == h.float().tolist()
        assert [copy.deepcopy(h).dtype, pickle.loads(pickle.dumps(h)).dtype] == [HALF, HALF]
        assert torch.from_numpy(np.ones(2, np.float32)).dtype == FULL
        assert [len(h), 0.5 in h, h.tolist()[0] == 0.5] == [2, True, True]
        assert [row.dtype for row in h] == [HALF, HALF]


def test_operators_with_other_classes_come_back_to_them():
    class Other:
        def __radd__(self, other):
            return "radd"

        def __eq__(self, other):
            return "eq"

        __hash__ = None

    with scope():
        assert ones(2) + Other() == "radd"
        assert (ones(2) == Other()) == "eq"
        assert (ones(2) == None) is False  # noqa: E711
        assert (ones(2) != "x") is True


def test_modes_for_a_default_device():
    with scope():
        with torch.device("cpu"):
            assert torch.mm(torch.eye(2), torch.eye(2)).dtype == HALF
        torch.set_default_device("cpu")
        try:
            assert (torch.eye(2) @ torch.eye(2)).dtype == HALF
            assert F.gumbel_softmax(ones(2)).dtype == FULL
        finally:
            torch.set_default_device(None)
        assert rules() == "o1"


def test_other_modes_see_what_they_would_see():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    for outer, inner in [(Seen, scope), (scope, Seen)]:
        names = []
        with outer(), inner():
            assert (torch.eye(2) @ torch.eye(2)).dtype == HALF
        assert "matmul" in names


# Nesting


def test_autocast_switches_the_casts_off_and_on():
    assert rules() == "none"
    with scope():
        assert rules() == "o1"
        with OFF():
            assert rules() == "none"
            with ON():
                assert rules() == "o1"
                with scope():
                    assert rules() == "o1"
            assert rules() == "none"
            with scope():
                assert rules() == "o1"
                with OFF():
                    assert rules() == "none"
            assert rules() == "none"
        assert rules() == "o1"
        with torch.autocast("cpu", BF16):
            assert rules() == "bf16"
            with ON(dtype=HALF):
                assert rules() == "o1"
        with torch.autocast("cuda", enabled=False):
            assert rules() == "o1"
    assert rules() == "none"


def test_scopes_nest_and_stand_in_autocast():
    with scope(), scope():
        assert rules() == "o1"
    for outer in (OFF, functools.partial(ON, dtype=BF16), functools.partial(ON, dtype=HALF)):
        with outer():
            before = rules()
            with scope():
                assert rules() == "o1"
            assert rules() == before


def test_tables_of_nested_scopes_do_not_mix():
    outer, inner = CastTable(), CastTable()
    inner.register_float_function(torch, "sigmoid")
    with scope(outer):
        with scope(inner):
            assert torch.sigmoid(ones(1)).dtype == FULL
        assert torch.sigmoid(ones(1)).dtype == HALF


def test_models_see_autocast():
    with scope():
        assert torch.is_autocast_enabled("cpu")
        assert torch.get_autocast_dtype("cpu") == HALF
        with OFF():
            assert not torch.is_autocast_enabled("cpu")


def test_the_bare_mode_waits_for_autocast():
    with O1Casts(CastTable(), "cpu"):
        assert rules() == "none"
        with ON(dtype=HALF):
            assert rules() == "o1"
        with ON(dtype=BF16):
            assert rules() == "bf16"
    assert rules() == "none"


ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, ArithmeticError)


def fail_in_half_function():
    half_function(lambda x: 1 / 0)(torch.ones(1))


@pytest.mark.parametrize(
    "fail",
    [
        lambda: 1 / 0,
        lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
        lambda: F.multi_head_attention_forward(*[torch.ones(1)] * 3, 4, *[None] * 9),
        lambda: F.dropout(torch.ones(1), p=3.0),
        lambda: ones(1).exp_(),
        lambda: F.binary_cross_entropy(ones(1), ones(1)),
        lambda: torch.autograd.grad(torch.ones(1), torch.ones(1)),
        lambda: torch.ones(1).backward(),
        lambda: ones(1).unflatten(0, (3, 3)),
        fail_in_half_function,
    ],
)
def test_an_exception_leaves_everything_as_it_was(fail):
    before = state()
    with scope():
        inside = state()
        for _ in range(2):
            with pytest.raises(ERRORS):
                fail()
            assert state() == inside
            assert rules() == "o1"
    assert state() == before
    with pytest.raises(ERRORS), scope(), OFF(), scope():
        fail()
    assert state() == before


def test_an_exception_drops_the_weights():
    linear, modes = nn.Linear(2, 2), []
    try:
        with scope():
            linear(torch.ones(1, 2))
            modes += torch.overrides._get_current_function_mode_stack()
            assert len(modes[0]._weights) == 2
            raise KeyError
    except KeyError:
        assert len(modes[0]._weights) == 0


def test_torch_is_not_touched():
    places = (torch, torch.Tensor, F, torch._C._TensorBase if hasattr(torch._C, "_TensorBase") else torch._C.TensorBase)
    before = [dict(vars(place)) for place in places]
    attention = nn.MultiheadAttention(4, 2)
    with scope():
        attention(torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
        assert [dict(vars(place)) for place in places] == before
    assert [dict(vars(place)) for place in places] == before


def in_threads(*functions):
    results = {}
    threads = [
        threading.Thread(target=lambda i=i, function=function: results.__setitem__(i, function()))
        for i, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[i] for i in range(len(functions))]


def test_a_scope_holds_for_its_thread():
    barrier = threading.Barrier(2, timeout=30)

    def inside():
        with scope():
            barrier.wait()
            found = [rules() for _ in range(200)]
            barrier.wait()
        return set(found)

    def outside():
        barrier.wait()
        found = [rules() for _ in range(200)]
        barrier.wait()
        return set(found)

    assert in_threads(inside, outside) == [{"o1"}, {"none"}]
    with scope():
        assert in_threads(rules) == ["none"]


def test_two_threads_with_one_table():
    table, barrier = CastTable(), threading.Barrier(2, timeout=30)
    attention = nn.MultiheadAttention(4, 2)
    x = torch.rand(2, 1, 4)

    def run(enabled):
        barrier.wait()
        found = set()
        for _ in range(20):
            with o1_scope(table, "cpu"), nullcontext() if enabled else OFF():
                found.add(attention(x, x, x)[0].dtype)
        return found

    assert in_threads(lambda: run(True), lambda: run(False)) == [{HALF}, {FULL}]


# Cast weights


def test_a_weight_is_cast_once():
    linear, x = nn.Linear(4, 4), ones(1, 4)
    with scope():
        with casts(2):
            y = linear(linear(x))
        with casts(0):
            y = linear(y)
    y.float().sum().backward()
    assert linear.weight.grad.dtype == FULL
    with scope(), casts(2):
        linear(x)


def test_activations_and_buffers_are_cast_each_time():
    x, w = torch.ones(2, 2), torch.ones(2, 2, requires_grad=True)
    with scope(), casts(4):
        x @ w
        x @ w


def test_float_functions_cast_half_weights_each_time():
    weight = nn.Parameter(ones(2))
    with scope(), casts(2):
        weight.exp()
        weight.exp()


def test_tied_weights_are_cast_once():
    embedding, head, tail = nn.Embedding(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3, bias=False)
    head.weight = tail.weight = embedding.weight

    def gradient():
        x = embedding(torch.tensor([0, 1]))
        with casts(3 if rules() == "o1" else 0):  # the weight, and x in both layers
            y = head(x) + tail(x)
        return torch.autograd.grad(y.float().sum(), embedding.weight)[0]

    with scope():
        mixed = gradient()
    torch.testing.assert_close(mixed, gradient(), atol=1e-2, rtol=1e-2)


class Ops(nn.Module):
    """apex's own three: a weight used twice by a half, a float and a promoted function."""

    def __init__(self, name, dtype):
        super().__init__()
        shape = (8, 8) if name == "half" else (2, 8)
        self.name = name
        self.weight = nn.Parameter((torch.arange(shape[0] * shape[1]).reshape(shape) % 8).to(dtype))

    def forward(self, x):
        return self.run(x, self.weight)

    def run(self, x, w):
        if self.name == "half":
            return x.mm(w).mm(w).sum()
        if self.name == "float":
            return (x + torch.pow(w, 2) + torch.pow(w, 2)).sum()
        return ((x * w) * w).sum()


@pytest.mark.parametrize("dtype", [HALF, FULL])
@pytest.mark.parametrize("name", ["half", "float", "promoted"])
@pytest.mark.parametrize("one_scope", [True, False])
def test_train_evaluate_train(name, dtype, one_scope):
    model, x = Ops(name, dtype), torch.ones(2, 8)

    def each():
        return nullcontext() if one_scope else scope()

    def train():
        model.weight.grad = None
        with each():
            loss = model(x)
        loss.float().backward()
        w = model.weight.detach().float().requires_grad_()
        with OFF():
            expected = torch.autograd.grad(model.run(x, w), w)[0]
        assert model.weight.grad.dtype == dtype
        assert torch.equal(model.weight.grad.float(), expected)
        model.weight.data -= 1.0

    with scope() if one_scope else nullcontext():
        train()
        with each(), torch.no_grad():
            model(x)
        train()
        with each(), torch.no_grad():
            model(x)
        train()


EDITS = {
    "in place": lambda m: m.weight.add_(1),
    "copy_": lambda m: m.weight.copy_(m.weight + 1),
    "fill_": lambda m: nn.init.constant_(m.weight, 3.0),
    "data": lambda m: m.weight.data.add_(1),
    "new data": lambda m: setattr(m.weight, "data", m.weight.data + 1),
    "detach": lambda m: m.weight.detach().add_(1),
    "load_state_dict": lambda m: m.load_state_dict({"weight": m.weight + 1}),
    "assign": lambda m: m.load_state_dict({"weight": m.weight + 1}, assign=True),
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


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"foreach": False}),
        (torch.optim.SGD, {"foreach": True, "momentum": 0.5}),
        (torch.optim.SGD, {"fused": True}),
        (torch.optim.Adam, {"foreach": False}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.Adagrad, {"fused": True}),
        (torch.optim.RMSprop, {}),
    ],
)
@pytest.mark.parametrize("off", [True, False])
def test_optimizer_steps_in_the_scope(optimizer, options, off):
    models = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optimizer(model.parameters(), lr=0.25, **options) for model in models]
    with scope():
        for _ in range(3):
            y = models[0](torch.eye(2))
            assert torch.equal(y.mT, models[0].weight.half())
            y.sum().backward()
            models[1].weight.grad = models[0].weight.grad.clone()
            with OFF() if off else nullcontext():
                optimizers[0].step()
                optimizers[0].zero_grad()
    with_steps = models[0].weight.detach().clone()
    for _ in range(3):  # the gradient is the same in each step
        optimizers[1].step()
    assert torch.equal(with_steps, models[1].weight)


def test_requires_grad_toggled_in_the_scope():
    linear, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with scope():
        for requires_grad in (True, False, True):
            linear.weight.requires_grad_(requires_grad)
            linear.weight.grad = None
            y = linear(x)
            assert y.requires_grad == requires_grad
            if requires_grad:
                y.sum().backward()
            assert (linear.weight.grad is not None) == requires_grad


def test_backward_twice_through_one_cast_weight():
    linear, x = nn.Linear(2, 2, bias=False), torch.ones(1, 2)
    with scope():
        for times in (1, 2, 3):
            linear(x).sum().backward()
            assert torch.equal(linear.weight.grad, torch.full((2, 2), float(times)))


@pytest.mark.parametrize("frozen", [True, False])
def test_inference_mode(frozen):
    linear, x = nn.Linear(2, 2).requires_grad_(not frozen), torch.ones(1, 2, requires_grad=True)
    with scope():
        with torch.inference_mode():
            first = linear(x)
        linear(x).sum().backward()
        assert x.grad is not None
        assert (linear.weight.grad is None) == frozen
        with torch.inference_mode():
            assert torch.equal(linear(x), first)


def test_weights_made_in_inference_mode():
    with torch.inference_mode():
        linear = nn.Linear(2, 2)
    with scope():
        for where in (nullcontext, torch.inference_mode, torch.no_grad):
            with where():
                assert linear(torch.ones(1, 2)).dtype == HALF


def test_weights_are_freed_with_the_scope():
    linear = nn.Linear(2, 2)
    with scope():
        with torch.no_grad():
            linear(torch.ones(1, 2))
        mode = torch.overrides._get_current_function_mode_stack()[-1]
        half = weakref.ref(mode._weights[linear.weight][1])
        mode = weakref.ref(mode)
        assert half().dtype == HALF
    assert (half(), mode()) == (None, None)
    weight = weakref.ref(linear.weight)
    del linear
    gc.collect()
    assert weight() is None


def test_the_table_drops_weights_of_open_scopes():
    table, linear, x = CastTable(), nn.Linear(2, 2), ones(1, 2)
    with o1_scope(table, "cpu"):
        with casts(2):
            linear(x)
        table.forget_weights()
        with casts(2):
            linear(x)
    table.forget_weights()


def test_transforms():
    linear, x = nn.Linear(2, 2), torch.rand(3, 2)
    params = dict(linear.named_parameters())

    def loss(params, x):
        return torch.func.functional_call(linear, params, (x,)).square().sum()

    with scope():
        linear(x)
        grads = torch.func.grad(loss)(params, x)
        per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
        closed = torch.func.grad(lambda x: linear(x).sum())(x)
        rows = torch.func.vmap(linear)(x)
        jacobian = torch.func.jacrev(linear)(x[0])
        tangent = torch.func.jvp(linear, (x,), (x,))[1]
        y = linear(x)
    assert {grad.dtype for grad in (*grads.values(), *per_sample.values(), closed)} == {FULL}
    assert per_sample["weight"].shape == (3, 2, 2)
    assert [rows.dtype, jacobian.dtype, tangent.dtype] == [HALF, FULL, HALF]
    torch.testing.assert_close(jacobian, linear.weight.detach(), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(rows, y, atol=1e-3, rtol=1e-3)
    y.float().square().sum().backward()
    torch.testing.assert_close(linear.weight.grad, grads["weight"], atol=1e-2, rtol=1e-2)


def test_a_transform_does_not_leave_its_weights_behind():
    linear, x = nn.Linear(2, 2), torch.ones(1, 2)
    for transform in (
        lambda: torch.func.grad(lambda x: linear(x).sum())(x),
        lambda: torch.func.vmap(linear)(x),
        lambda: torch.func.jvp(linear, (x,), (x,)),
        lambda: torch.func.functionalize(linear)(x),
        lambda: torch.func.hessian(lambda x: linear(x).square().sum())(x),
    ):
        linear.zero_grad()
        with scope():
            transform()
            linear(x).sum().backward()
            torch.func.vmap(torch.func.grad(lambda x: linear(x).sum()))(x)
        assert torch.equal(linear.weight.grad, torch.ones(2, 2))


def test_fake_tensors_are_not_kept():
    from torch._subclasses.fake_tensor import FakeTensorMode

    linear = nn.Linear(2, 2)
    with scope():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert linear(torch.ones(1, 2)).dtype == HALF
        assert type(linear(torch.ones(1, 2))) is torch.Tensor


# Backward, checkpointing, autograd functions


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return x * torch.sigmoid(x).mean() + (x.half().sum(-1, keepdim=True) / 3)


def gradients(blocks, run, table):
    """Gradients of a forward in a scope and a backward under the bare mode."""
    torch.manual_seed(0)
    x = torch.rand(2, 4, requires_grad=True)
    blocks.zero_grad()
    with o1_scope(table, "cpu"):
        y = x
        for block in blocks:
            y = run(block, y)
        loss = y.square().sum()
    with O1Casts(table, "cpu"):
        loss.backward()
    return [x.grad, *(p.grad.clone() for p in blocks.parameters())]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_changes_no_bit(use_reentrant):
    table = CastTable()
    table.register_float_function(torch, "sigmoid")
    blocks = nn.ModuleList(Block() for _ in range(2))
    plain = gradients(blocks, lambda block, x: block(x), table)
    again = gradients(blocks, lambda block, x: checkpoint(block, x, use_reentrant=use_reentrant), table)
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    nested = gradients(
        blocks,
        lambda block, x: checkpoint(
            lambda x: checkpoint(block, x, use_reentrant=use_reentrant), x, use_reentrant=use_reentrant
        ),
        table,
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, nested, strict=True))


def test_checkpointed_parts_with_autocast_off_stay_so():
    def part(x):
        with OFF():
            dtypes.append((x.float() @ x.float()).dtype)
            return x.float() @ x.float()

    dtypes = []
    x = torch.eye(2, requires_grad=True)
    with scope():
        y = checkpoint(part, x, use_reentrant=False).sum()
    with O1Casts(CastTable(), "cpu"):
        y.backward()
    assert dtypes == [FULL, FULL]


def test_a_backward_in_the_scope_is_one_without_casts():
    dtypes = []

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            dtypes.append((x @ x).dtype)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            dtypes.append((torch.eye(2) @ torch.eye(2)).dtype)
            dtypes.append(rules())
            return grad

    x = torch.eye(2, requires_grad=True)
    with scope():
        Seen.apply(x).sum().backward()
        torch.autograd.grad(Seen.apply(x).sum(), x)
        assert rules() == "o1"
    assert dtypes == [HALF, FULL, "none"] * 2


def test_gradient_penalty_and_hooks():
    linear, x, seen = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), []
    linear.register_forward_hook(lambda module, args, output: seen.append((output @ output.mT).dtype))
    with scope():
        y = linear(x)
        y.register_hook(lambda grad: seen.append(grad.dtype))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        penalty = (grad.norm() - 1) ** 2
        (penalty + y.float().sum()).backward()
    assert seen == [HALF, HALF, HALF]
    assert [penalty.dtype, linear.weight.grad.dtype] == [FULL, FULL]


seen = []


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        seen.append((x @ w).dtype)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        seen.append((grad @ w.mT).dtype)
        return grad @ w.mT, x.mT @ grad


class ProductWithCasts(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu"))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


class ProductInFull(torch.autograd.Function):
    forward = staticmethod(torch.amp.custom_fwd(Product.forward, device_type="cpu", cast_inputs=FULL))
    backward = staticmethod(torch.amp.custom_bwd(Product.backward, device_type="cpu"))


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("function", "dtypes"),
    [(ProductWithCasts, [HALF, HALF]), (ProductInFull, [FULL, FULL])],
)
def test_autograd_functions_that_know_autocast(function, dtypes, inside):
    seen.clear()
    x, w = torch.eye(2, requires_grad=True), nn.Parameter(torch.eye(2))
    with scope():
        y = function.apply(x, w).sum()
        if inside:
            y.backward()
    if not inside:
        with O1Casts(CastTable(), "cpu"):
            y.backward()
    assert seen == dtypes
    assert [x.grad.dtype, w.grad.dtype] == [FULL, FULL]


def test_autograd_functions_that_do_not_know_autocast():
    seen.clear()
    x, w = torch.eye(2, dtype=HALF, requires_grad=True), torch.eye(2, dtype=HALF, requires_grad=True)
    with scope():
        Product.apply(x, w).float().sum().backward()
    assert seen == [HALF, HALF]
    assert [x.grad.dtype, w.grad.dtype] == [HALF, HALF]


# Models


class Subclass(torch.Tensor):
    """Stays what it is through every function."""


def test_subclasses_of_tensors():
    attention = nn.MultiheadAttention(4, 2, batch_first=True)
    x = torch.rand(1, 3, 4)
    kept = x.as_subclass(Subclass)
    with scope():
        plain = attention(x, x, x)[0]
        y = attention(kept, kept, kept)[0]
        assert [type(kept @ kept.mT), (kept @ kept.mT).dtype] == [Subclass, HALF]
        assert F.gumbel_softmax(kept.half()).dtype == FULL
    assert [type(y), y.dtype] == [Subclass, HALF]
    assert torch.equal(y.as_subclass(torch.Tensor), plain)


def test_subclasses_that_refuse_are_asked():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented if func is F.gumbel_softmax else super().__torch_function__(func, types, args, kwargs)

    x = ones(2).as_subclass(Refusing)
    for where in (nullcontext, scope):
        with where(), pytest.raises(TypeError, match="gumbel_softmax"):
            F.gumbel_softmax(x)


def test_parameters_of_a_class_of_their_own():
    class Own(nn.Parameter):
        pass

    linear = nn.Linear(2, 2)
    linear.weight = Own(torch.ones(2, 2))
    with scope():
        y = linear(torch.ones(1, 2))
    y.float().sum().backward()
    assert [y.dtype, linear.weight.grad.dtype] == [HALF, FULL]


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_parametrized_weights(norm):
    linear = norm(nn.Linear(3, 3))
    with scope():
        y = linear(linear(torch.rand(2, 3)))
        y.float().square().sum().backward()
    assert y.dtype == HALF
    assert {p.grad.dtype for p in linear.parameters()} == {FULL}


def test_lazy_modules_and_deepcopy():
    lazy = nn.LazyLinear(2)
    with scope():
        assert lazy(torch.ones(1, 3)).dtype == HALF
        other = copy.deepcopy(lazy)
        assert torch.equal(other(torch.ones(1, 3)), lazy(torch.ones(1, 3)))
    assert {p.dtype for p in other.parameters()} == {FULL}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_left_to_torch():
    linear = nn.Linear(2, 2)
    scripted, traced = torch.jit.script(nn.Linear(2, 2)), torch.jit.trace(linear, torch.ones(1, 2))
    with scope():
        for module in (scripted, traced, torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))):
            assert module(ones(1, 2)).dtype == HALF
            assert module(torch.ones(1, 2)).dtype == HALF
        assert rules() == "o1"


def test_operators_with_rules_of_their_own_for_autocast():
    torchvision = pytest.importorskip("torchvision")
    features, boxes = torch.rand(1, 1, 4, 4).half(), torch.tensor([[0, 0.0, 0.0, 2.0, 2.0]])
    with scope():
        pooled = torchvision.ops.roi_align(features, boxes, 2)
    with torch.autocast("cpu", HALF):
        expected = torchvision.ops.roi_align(features, boxes, 2)
    assert torch.equal(pooled, expected)
    table = CastTable()
    table.register_float_function(torch.ops.torchvision, "roi_align")
    with scope(table):
        assert torchvision.ops.roi_align(features, boxes, 2).dtype == FULL


def test_custom_operators_follow_torch_autocast():
    @torch.library.custom_op("halfmesh_tests::project", mutates_args=())
    def project(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return x @ w

    with torch.autocast("cpu", HALF):
        expected = project(ones(2, 2), torch.ones(2, 2))
    with scope():
        assert torch.equal(project(ones(2, 2), torch.ones(2, 2)), expected)


def rotate(x, positions):
    """Rotary embedding as language models write it."""
    with OFF():
        frequencies = torch.outer(positions.float(), 1.0 / (10.0 ** (torch.arange(0, 2).float() / 2)))
        dtypes = frequencies.dtype, (x.float() @ x.float().mT).dtype
        assert dtypes == (FULL, FULL)
        cos, sin = (torch.cat([f, f], -1) for f in (frequencies.cos(), frequencies.sin()))
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    half = torch.cat([-x[..., 2:], x[..., :2]], -1)
    return x * cos + half * sin


def test_attention_with_rotary_embedding_and_a_cache():
    projection, cache = nn.Linear(4, 12), []
    x = torch.rand(1, 3, 4)
    with scope():
        for _ in range(2):
            q, k, v = projection(x).chunk(3, -1)
            q, k = (rotate(t, torch.arange(3)) for t in (q, k))
            cache.append((k, v))
            keys, values = (torch.cat(t, 1) for t in zip(*cache, strict=True))
            scores = (q @ keys.mT) / 2**0.5
            scores = scores.masked_fill(torch.zeros(3, keys.shape[1], dtype=torch.bool), torch.finfo(scores.dtype).min)
            weights = F.softmax(scores, -1, dtype=FULL).to(q.dtype)
            x = x + weights @ values
    assert [q.dtype, keys.dtype, weights.dtype, x.dtype] == [HALF, HALF, HALF, FULL]
    x.sum().backward()
    assert projection.weight.grad.dtype == FULL


def test_a_vision_transformer_with_fused_attention():
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    torch.manual_seed(0)
    model = vision_transformer.VisionTransformer(8, 4, num_classes=3, embed_dim=8, depth=2, num_heads=2)
    assert model.blocks[0].attn.fused_attn
    x = torch.rand(2, 3, 8, 8)
    with scope():
        y = model(x)
        loss = F.cross_entropy(y, torch.tensor([0, 1]))
    loss.backward()
    assert [y.dtype, loss.dtype] == [HALF, FULL]
    assert {p.grad.dtype for p in model.parameters()} == {FULL}
    torch.testing.assert_close(y.float(), model(x), atol=2e-2, rtol=2e-2)


def test_a_convolutional_network():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.BatchNorm2d(4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", groups=2),
        nn.GroupNorm(2, 4),
        nn.Hardswish(),
        nn.Upsample(scale_factor=2.0),
        nn.PReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(4, 2),
        nn.LogSoftmax(1),
    )
    dtypes = []
    for module in model:
        module.register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
    with scope():
        loss = F.nll_loss(model(torch.rand(2, 3, 8, 8)), torch.tensor([0, 1]))
    loss.backward()
    assert dtypes == [*[HALF] * 5, *[FULL] * 3, *[HALF] * 5, FULL]
    assert {p.grad.dtype for p in model.parameters()} == {FULL}
    assert model[1].running_mean.dtype == FULL


def test_data_loaders_in_the_scope():
    class Items(torch.utils.data.Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.full((2,), float(i)), np.float32(i)

    with scope():
        for workers in (0, 1):
            loader = torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=workers)
            batches = list(loader)
            assert [[x.dtype, y.dtype] for x, y in batches] == [[FULL, FULL]] * 2


def test_generators_carry_the_scope_as_they_carry_autocast():
    def layers(x):
        with OFF():
            yield (x @ x).dtype
        yield (x @ x).dtype

    with scope():
        assert list(layers(torch.eye(2))) == [FULL, HALF]


def test_initialization_clipping_and_flattening_of_weights():
    with scope():
        linear = nn.Linear(3, 3)
        for initialize in (
            nn.init.kaiming_normal_,
            nn.init.orthogonal_,
            nn.init.xavier_uniform_,
            nn.init.trunc_normal_,
        ):
            initialize(linear.weight)
        nn.utils.clip_grad_norm_(linear.parameters(), 1.0)
        vector = nn.utils.parameters_to_vector(linear.parameters())
        nn.utils.vector_to_parameters(vector + 1, linear.parameters())
        assert torch.equal(F.linear(torch.eye(3), linear.weight), linear.weight.half().mT)
    assert {p.dtype for p in linear.parameters()} == {FULL}


def test_decorated_functions_in_checkpointed_parts():
    @float_function
    def normalize(x):
        dtypes.append(x.dtype)
        return x / x.sum()

    dtypes = []
    x, w = torch.rand(2, 2, requires_grad=True), nn.Parameter(torch.rand(2, 2))
    with scope():
        y = checkpoint(lambda x: normalize(x @ w), x, use_reentrant=False).square().sum()
    with O1Casts(CastTable(), "cpu"):
        y.backward()
    assert dtypes == [FULL, FULL]
