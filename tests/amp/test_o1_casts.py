"""O1's scope: what it sees, how it nests, that it leaves nothing behind, backward and models in it."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.amp.o1 import CastTable, O1Casts, half_function, o1_scope

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


# -- what is seen: unlisted functions and what is inside them --------------------------------------------------

FOLLOWERS = {
    "relu": F.relu,
    "mean": torch.mean,
    "dropout": F.dropout,
    "sigmoid": torch.sigmoid,
    "method softmax": lambda x: x.softmax(-1),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), torch.ones(4), torch.zeros(4), True),
    "max_pool2d with indices": lambda x: F.max_pool2d(x[None], 2, return_indices=True)[0],
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x[None], 1),
    "where": lambda x: torch.where(x > 0, x, x),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1]]), x),
    "huber_loss": lambda x: F.huber_loss(x, x + 1),
    "linalg": lambda x: torch.linalg.vector_norm(x),
    "split": lambda x: x.split(2)[0],
    "triplet": lambda x: F.triplet_margin_with_distance_loss(x, x + 1, x - 1),
}
SEEN_INSIDE = {
    "gumbel_softmax": (lambda x: F.gumbel_softmax(x, hard=True), FULL),
    "lp_pool2d": (lambda x: F.lp_pool2d(x[None], 2.0, 2), FULL),
    "gaussian_nll": (lambda x: F.gaussian_nll_loss(x, x, x.abs()), FULL),
    "method norm": (lambda x: x.norm(dim=1), FULL),
    "rmatmul": (lambda x: torch.Tensor.__rmatmul__(x, x), HALF),
    "rdiv": (lambda x: 1 / x, FULL),
}


def test_unlisted_functions_follow_their_input_and_python_functions_are_seen_through():
    for name, (function, expected) in ({n: (f, None) for n, f in FOLLOWERS.items()} | SEEN_INSIDE).items():
        for dtype in (HALF, FULL):
            x = (torch.rand(4, 4) + 0.5).to(dtype).requires_grad_()
            with scope():
                y = function(x)
            assert y.dtype == (expected or dtype), name
            y.float().sum().backward()
            assert x.grad.dtype == dtype, name


@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention(need_weights):
    for dtype in (HALF, FULL):
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


def test_what_is_no_floating_point_tensor_of_the_device_stays():
    n, x, meta = torch.arange(4), torch.rand(64), torch.ones(2, 2, device="meta")
    with scope():
        assert [n.sum().dtype, (n + n).dtype, (n @ n).dtype, n.pow(2).dtype, n.cpu().dtype] == [torch.int64] * 5
        assert [(n * ones(4)).dtype, (ones(2) * 0.5).dtype, (ones(2) + torch.tensor(2)).dtype] == [HALF] * 3
        spectrum = torch.stft(x, 8, window=torch.hann_window(8), return_complex=True)
        assert (spectrum @ spectrum.mT).dtype == torch.complex64
        assert (meta @ meta).dtype == FULL
        assert torch.from_numpy(np.ones(2, np.float32)).dtype == FULL
        assert (ones(2) == None) is False  # noqa: E711


# -- nesting ---------------------------------------------------------------------------------------------------


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
        assert rules() == "o1"
        with torch.autocast("cpu", BF16):
            assert rules() == "bf16"
            with ON(dtype=HALF):
                assert rules() == "o1"
        with torch.autocast("cuda", enabled=False):
            assert rules() == "o1"
        with torch.device("cpu"):  # a mode of torch's own
            assert rules() == "o1"
    for outer in (OFF, functools.partial(ON, dtype=BF16), functools.partial(ON, dtype=HALF)):
        with outer():
            before = rules()
            with scope():
                assert rules() == "o1"
            assert rules() == before
    assert rules() == "none"


@pytest.mark.parametrize(
    "fail",
    [
        lambda: 1 / 0,
        lambda: torch.mm(torch.ones(2, 3), torch.ones(2, 3)),
        lambda: F.dropout(torch.ones(1), p=3.0),
        lambda: ones(1).exp_(),
        lambda: torch.ones(1).backward(),
        lambda: half_function(lambda x: 1 / 0)(torch.ones(1)),
    ],
)
def test_an_exception_leaves_everything_as_it_was(fail):
    before = state()
    with scope():
        inside = state()
        for _ in range(2):
            with pytest.raises((RuntimeError, ValueError, ArithmeticError)):
                fail()
            assert state() == inside
            assert rules() == "o1"
    assert state() == before
    with pytest.raises((RuntimeError, ValueError, ArithmeticError)), scope(), OFF(), scope():
        fail()
    assert state() == before


def test_torch_is_not_touched():
    places = (torch, torch.Tensor, F, torch._C._TensorBase if hasattr(torch._C, "_TensorBase") else torch._C.TensorBase)
    before = [dict(vars(place)) for place in places]
    attention = nn.MultiheadAttention(4, 2)
    with scope():
        attention(torch.ones(1, 1, 4), torch.ones(1, 1, 4), torch.ones(1, 1, 4))
        assert [dict(vars(place)) for place in places] == before
    assert [dict(vars(place)) for place in places] == before


def test_a_scope_holds_for_its_thread():
    barrier, found = threading.Barrier(2, timeout=30), {}

    def run(name, around):
        with around():
            barrier.wait()
            found[name] = {rules() for _ in range(200)}
            barrier.wait()

    threads = [threading.Thread(target=run, args=case) for case in (("inside", scope), ("outside", nullcontext))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {"inside": {"o1"}, "outside": {"none"}}


# -- backward and autograd functions -----------------------------------------------------------------------------


def test_backward_hooks_and_gradient_penalties_in_the_scope():
    linear, x, seen = nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True), []
    linear.register_forward_hook(lambda module, args, output: seen.append((output @ output.mT).dtype))
    with scope():
        y = linear(x)
        y.register_hook(lambda grad: seen.extend([grad.dtype, (grad.float() @ grad.float().mT).dtype]))
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        penalty = (grad.norm() - 1) ** 2
        (penalty + y.float().sum()).backward()
        assert rules() == "o1"
    assert seen == [HALF, HALF, FULL, HALF, FULL]  # backward itself is not cast
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


@pytest.mark.parametrize(("function", "dtype"), [(ProductWithCasts, HALF), (ProductInFull, FULL)])
def test_autograd_functions_that_know_autocast(function, dtype):
    """Their backward runs as their forward did, within the scope and after it, where the engine runs it."""
    for around in (scope, lambda: O1Casts(CastTable(), "cpu")):
        seen.clear()
        x, w = torch.eye(2, requires_grad=True), nn.Parameter(torch.eye(2))
        with scope():
            y = function.apply(x, w).sum()
        with around():
            y.backward()
        assert seen == [dtype, dtype]
        assert [x.grad.dtype, w.grad.dtype] == [FULL, FULL]


# -- models ----------------------------------------------------------------------------------------------------


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
