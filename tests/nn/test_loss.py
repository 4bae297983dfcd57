"""The cross entropy of logits that are computed chunk by chunk."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule

from halfmesh.dry_run.tracker import Tracker
from halfmesh.errors import InputError
from halfmesh.nn import linear_cross_entropy

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


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all options"])
def test_is_torchs_loss_of_all_logits(options, reduction):
    given = make()
    expected = trained(whole, *given, reduction=reduction, **options)
    for size in (1, 5, 100):
        found = trained(linear_cross_entropy, *given, reduction=reduction, chunk_size=size, **options)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_half_weights_get_gradients_that_are_rounded_once():
    """The weight's: chunks in half precision, summed in fp32."""
    input, head, target = make(torch.float16, rows=8)
    parts = zip(input.flatten(0, 1).split(4), target.flatten().split(4), strict=True)
    losses = (whole(x, head, y, reduction="sum") / target.numel() for x, y in parts)
    summed = sum(torch.autograd.grad(loss, head.weight)[0].float() for loss in losses)
    found = trained(linear_cross_entropy, input, head, target, torch.tensor(1.0), chunk_size=4)
    expected = trained(whole, input, head, target, torch.tensor(1.0))
    assert found[0].dtype == torch.float32
    torch.testing.assert_close(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert torch.equal(found[2], summed.half())
    torch.testing.assert_close(found[3], expected[3], rtol=2**-7, atol=2**-12)


def test_a_head_that_fsdp_gathers_by_itself_gets_all_tokens_at_once():
    """Other data ranks may have more or fewer tokens, and have to gather as often."""
    input, head, target = make()
    head.__class__ = type("FSDPLinear", (FSDPModule, nn.Linear), {})
    calls = []
    head.register_forward_pre_hook(lambda head, args: calls.append(len(args[0])))
    linear_cross_entropy(input, head, target, chunk_size=5)
    assert calls == [21]


def test_other_heads():
    """A tied weight, and a module of several layers with dropout and hooks."""
    input, head, target = make(torch.bfloat16)
    tied = nn.Embedding(CLASSES, FEATURES, dtype=torch.bfloat16)
    head.weight = tied.weight
    several = nn.Sequential(nn.Linear(FEATURES, FEATURES, dtype=torch.bfloat16), nn.Dropout(0.5), head)
    several.register_forward_hook(lambda module, args, logits: 2 * logits)

    for each in (head, several):
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


def peak(function, **options):
    """The most bytes at once of forward and backward, above what was there before."""
    head, target = nn.Linear(16, 4096, dtype=torch.bfloat16), torch.zeros(2048, dtype=torch.int64)
    input = torch.randn(2048, 16, dtype=torch.bfloat16, requires_grad=True)
    with Tracker() as tracker:
        function(input, head, target, **options).backward()
        return tracker.peak


def test_memory_is_that_of_a_chunk():
    """16 chunks: each needs a 16th. Besides there are gradients of the weight, here a 128th of the logits."""
    whole_peak = peak(whole)
    assert whole_peak > 2 * 2048 * 4096 * 4
    assert peak(linear_cross_entropy, chunk_size=128) < whole_peak / 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head": torch.zeros(CLASSES, FEATURES)}, "takes the head itself, not its weight"),
        ({"target": torch.zeros(7, 3, dtype=torch.int64)}, "got [3, 7, 8] and [7, 3]"),
        ({"reduction": "avg"}, "reduction='avg' is not 'mean', 'sum' or 'none'"),
    ],
)
def test_rejected(change, words):
    input, head, target = make()
    with pytest.raises(InputError, match=re.escape(words)):
        linear_cross_entropy(**{"input": input, "head": head, "target": target, **change})
