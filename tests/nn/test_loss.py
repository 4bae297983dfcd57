"""The cross entropy of logits that are computed chunk by chunk."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import parametrize

import halfmesh
from halfmesh.dry_run.tracker import Tracker
from halfmesh.errors import InputError
from halfmesh.nn import linear_cross_entropy
from halfmesh.nn.loss import _chunk_size

CLASSES, FEATURES = 20, 8
WEIGHT = torch.linspace(0.5, 2, CLASSES, dtype=torch.float64)
ALL = {"ignore_index": 3, "weight": WEIGHT, "label_smoothing": 0.2}


def whole(input, head, target, chunk_size=None, **options):
    """All logits at once."""
    logits = head(input).flatten(0, -2)
    loss = F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), target.flatten(), **options)
    return loss.view(target.shape) if options.get("reduction") == "none" else loss


def make(dtype=torch.float64, bias=True, rows=3, length=7):
    torch.manual_seed(0)
    head = nn.Linear(FEATURES, CLASSES, bias, dtype=dtype)
    input = torch.randn(rows, length, FEATURES, dtype=dtype, requires_grad=True)
    target = torch.randint(CLASSES, (rows, length))
    target[0, :3] = 3
    return input, head, target


def trained(function, input, head, target, seed=None, **options):
    """The loss, and its gradients for the input and the head's parameters."""
    loss = function(input, head, target, **options)
    seed = torch.linspace(1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape) if seed is None else seed
    return loss, *torch.autograd.grad(loss, [input, *head.parameters()], seed)


@pytest.mark.parametrize("chunk_size", [1, 5, 7, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [{}, {"ignore_index": 3}, {"ignore_index": 3, "weight": WEIGHT}, {"label_smoothing": 0.2}, ALL],
    ids=["plain", "ignored", "weights", "smooth", "all of these"],
)
def test_is_torchs_loss_of_all_logits(options, reduction, chunk_size):
    given = make()
    expected = trained(whole, *given, reduction=reduction, **options)
    found = trained(linear_cross_entropy, *given, reduction=reduction, chunk_size=chunk_size, **options)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    "options", [{}, {"weight": WEIGHT}, {"label_smoothing": 0.2}], ids=["plain", "weights", "smooth"]
)
def test_without_a_target_that_counts(options):
    input, head, target = make()
    given = input, head, torch.full_like(target, -100)
    expected = trained(whole, *given, **options)
    assert expected[0].isnan()
    for one, other in zip(trained(linear_cross_entropy, *given, chunk_size=4, **options), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_without_tokens():
    input, head, target = (value if isinstance(value, nn.Module) else value[:0] for value in make())
    assert linear_cross_entropy(input, head, target).isnan()
    assert linear_cross_entropy(input, head, target, reduction="sum") == 0


@pytest.mark.parametrize("frozen", ["input", "weight", "bias"])
def test_what_is_not_trained(frozen):
    input, head, target = make()
    other = input if frozen == "input" else getattr(head, frozen)
    other.requires_grad_(False)
    trains = [tensor for tensor in (input, head.weight, head.bias) if tensor is not other]
    found, expected = (
        torch.autograd.grad(function(input, head, target, chunk_size=5), trains)
        for function in (linear_cross_entropy, whole)
    )
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_without_gradients_nothing_is_kept():
    input, head, target = make()
    with torch.no_grad():
        assert not linear_cross_entropy(input, head, target, chunk_size=5).requires_grad


# -- half precision ----------------------------------------------------------------------------------------------------


def sum_of_chunks(input, head, target, size):
    """The weight's gradient: chunks in half precision, summed in fp32."""
    count = target.numel()
    parts = zip(input.flatten(0, 1).split(size), target.flatten().split(size), strict=True)
    losses = (whole(x, head, y, reduction="sum") / count for x, y in parts)
    return sum(torch.autograd.grad(loss, head.weight)[0].float() for loss in losses)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_weights_get_gradients_that_are_rounded_once(dtype):
    input, head, target = make(dtype, rows=8)
    found = trained(linear_cross_entropy, input, head, target, torch.tensor(1.0), chunk_size=4)
    expected = trained(whole, input, head, target, torch.tensor(1.0))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], sum_of_chunks(input, head, target, 4).to(dtype))
    torch.testing.assert_close(found[3], expected[3], rtol=2**-7, atol=2**-12)


def test_autocast_casts_as_without_chunks():
    """The head computes in bf16, the loss in fp32; weights in fp32 get the sum of the chunks' gradients as it is."""
    input, head, target = make(torch.float32, rows=8)
    with torch.autocast("cpu", torch.bfloat16):
        found = trained(linear_cross_entropy, input, head, target, torch.tensor(1.0), chunk_size=4)
        expected = trained(whole, input, head, target, torch.tensor(1.0))
        total = sum_of_chunks(input, head, target, 4)
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[2], total, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[3], expected[3], rtol=2**-7, atol=2**-12)


def test_small_gradients_survive_by_the_loss_scale():
    """They are computed of the scaled loss, in backward: those of 20,000 tokens' mean are 0 in fp16 otherwise."""
    input, head, target = make(torch.float16, rows=200, length=100)
    with torch.no_grad():
        head.weight.mul_(1e-3)
    found = trained(linear_cross_entropy, input, head, target, torch.tensor(2.0**15), chunk_size=4000)[1].double()
    exact = copy.deepcopy(head).double()
    expected = trained(whole, input.detach().double().requires_grad_(), exact, target, torch.tensor(1.0).double())[1]
    assert expected.abs().max() < torch.finfo(torch.float16).smallest_normal
    assert (found / 2**15 - expected).norm() < 0.01 * expected.norm()


class Bigrams(nn.Module):
    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head, self.loss = nn.Embedding(CLASSES, FEATURES), nn.Linear(FEATURES, CLASSES), loss

    def forward(self, ids, targets):
        return self.loss(self.words(ids), self.head, targets)


@pytest.mark.parametrize(
    ("key", "mode"),
    [("bf16", {"mode": "torch"}), ("fp16", {"mode": "apex", "opt_level": "O1"}), ("bf16", {"mode": "naive"})],
)
def test_trains_in_each_mode_as_without_chunks(key, mode):
    """Three updates, within half precision's rounding of a gradient. The head computes in it, in backward, too."""

    def weights(loss):
        model, dtypes = Bigrams(loss), []
        model.head.register_forward_hook(lambda head, args, logits: dtypes.append(logits.dtype))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with halfmesh.initialize(model, optimizer, config={key: mode}, device="cpu") as engine:
            ids = torch.arange(40).view(2, 20) % CLASSES
            for _ in range(3):
                engine.backward(engine(ids, ids.roll(1, 1)))
                engine.step()
                engine.zero_grad()
            return [value.detach().float() for value in engine.model.parameters()], dtypes

    (expected, once), (found, often) = weights(whole), weights(partial(linear_cross_entropy, chunk_size=7))
    assert len(once) == 3
    assert often == [once[0]] * 3 * 2 * 6  # updates, forward and backward, chunks
    for first, one, other in zip(Bigrams(whole).parameters(), found, expected, strict=True):
        assert (one - other).norm() < 2**-6 * (other - first).norm()
        assert (other - first).norm() > 0.01


# -- heads -------------------------------------------------------------------------------------------------------------


def test_hooks_of_the_weight_run_once():
    input, head, target = make(torch.bfloat16)
    seen = []
    head.weight.register_hook(lambda grad: seen.append(grad.dtype))
    head.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.dtype))
    linear_cross_entropy(input, head, target, chunk_size=5).backward()
    assert seen == [torch.bfloat16] * 2


def test_a_head_that_fsdp_gathers_by_itself_gets_all_tokens_at_once():
    """Other data ranks may have more or fewer tokens, and have to gather as often."""
    input, head, target = make()
    head.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    calls = []
    head.register_forward_pre_hook(lambda head, args: calls.append(len(args[0])))
    linear_cross_entropy(input, head, target, chunk_size=5)
    assert calls == [21]


def test_a_second_backward_adds_the_same():
    input, head, target = make(torch.bfloat16)
    loss = linear_cross_entropy(input, head, target, chunk_size=5)
    loss.backward(retain_graph=True)
    once = head.weight.grad.clone()
    torch.autograd.grad(loss, input, retain_graph=True)
    loss.backward()
    assert torch.equal(head.weight.grad, 2 * once)


def test_a_weight_that_is_computed_is_not_cast_before():
    """autocast casts what is computed of fp32 weights."""
    input, head, target = make(torch.float32)

    class Scaled(nn.Module):
        def forward(self, weight):
            return 2 * weight

    parametrize.register_parametrization(head, "weight", Scaled())
    logits = []
    head.register_forward_hook(lambda head, args, output: logits.append((head.weight, output.dtype)))
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(input, head, target, chunk_size=5).backward()
    assert all((weight.dtype, dtype) == (torch.float32, torch.bfloat16) for weight, dtype in logits)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_heads(dtype):
    """A tied weight, a module of several layers with dropout, hooks, and a function."""
    input, head, target = make(dtype)
    tied = nn.Embedding(CLASSES, FEATURES, dtype=dtype)
    head.weight = tied.weight
    several = nn.Sequential(nn.Linear(FEATURES, FEATURES, dtype=dtype), nn.Dropout(0.5), head)
    several.register_forward_hook(lambda module, args, logits: 2 * logits)

    def scaled(x):
        return 3 * torch.tanh(head(x) / 3)

    for each in (head, several, scaled):
        results = []
        for function in (linear_cross_entropy, whole):
            torch.manual_seed(1)
            tied.zero_grad()
            function(input, each, target, chunk_size=21).backward()
            results.append(tied.weight.grad)
        assert torch.equal(*results)
        torch.manual_seed(1)
        tied.zero_grad()
        loss = linear_cross_entropy(input, each, target, chunk_size=5)
        torch.manual_seed(2)  # backward draws the numbers of forward again
        loss.backward()
        assert tied.weight.grad.isfinite().all()
        assert each is several or (tied.weight.grad - results[1]).norm() < 0.02 * results[1].norm()


def test_dropout_of_a_head_is_the_same_in_backward():
    input, head, target = make()
    head = nn.Sequential(nn.Dropout(0.5), head)
    torch.manual_seed(1)
    torch.autograd.gradcheck(
        lambda x: (torch.manual_seed(1), linear_cross_entropy(x, head, target, chunk_size=5))[1], input
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_code_breaks_its_graph(dtype):
    input, head, target = make(dtype)

    def loss(x):
        return 3 * linear_cross_entropy(2 * x, head, target, chunk_size=5)

    both = (
        torch.autograd.grad(f(input), [input, head.weight]) for f in (loss, torch.compile(loss, backend="aot_eager"))
    )
    assert all(map(torch.equal, *both))


# -- memory ------------------------------------------------------------------------------------------------------------


def peak(function, dtype, tokens=2048, classes=4096, **options):
    """The most bytes at once of forward and backward, above what was there before."""
    head, target = nn.Linear(16, classes, dtype=dtype), torch.zeros(tokens, dtype=torch.int64)
    input = torch.randn(tokens, 16, dtype=dtype, requires_grad=True)
    with Tracker() as tracker:
        function(input, head, target, **options).backward()
        return tracker.peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_that_of_a_chunk(dtype):
    """16 chunks: each needs a 16th. Besides there are gradients of the weight, here a 128th of the logits."""
    whole_peak = peak(whole, dtype)
    assert whole_peak > 2 * 2048 * 4096 * 4
    assert peak(linear_cross_entropy, dtype, chunk_size=128) < whole_peak / 12


def test_size_of_a_chunk():
    """So many tokens that its logits are as large as the input, rounded up to a power of 2, and 1,024 at least."""
    x = torch.empty(65536, 1024, device="meta")
    sizes = [_chunk_size(x, nn.Linear(1024, classes, device="meta")) for classes in (8 * 1024, 10 * 1024, 200 * 1024)]
    assert sizes == [8192, 8192, 1024]
    assert _chunk_size(x, nn.Sequential()) == 1024


# -- what is rejected --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": torch.zeros(CLASSES, FEATURES)}, "the module that makes the logits, not its weight"),
        ({"target": torch.zeros(7, 3, dtype=torch.int64)}, "got [3, 7, 8] and [7, 3]"),
        ({"target": torch.zeros(3, 7, CLASSES)}, "got [3, 7, 8] and [3, 7, 20]"),
        ({"reduction": "avg"}, "reduction='avg' is not 'mean', 'sum' or 'none'"),
        ({"chunk_size": 0}, "chunk_size=0 must be a number of tokens"),
    ],
)
def test_rejected(change, words):
    input, head, target = make()
    with pytest.raises(InputError, match=re.escape(words)):
        linear_cross_entropy(**{"input": input, "head": head, "target": target, **change})
