"""Attention and losses of sharded sequences: values and gradients are those of whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfmesh.errors import InputError
from halfmesh.parallel.batch_shard.calls import _LOSSES, _Mode
from halfmesh.parallel.batch_shard.shard import TOKENS, BatchShard
from halfmesh.parallel.context.axis import ContextParallel
from tests.support.ranks import here, run_ranks

ROWS, LENGTH, SIZE = 2, 8, 4
CLASSES = 5

pytestmark = pytest.mark.distributed


def functions(rows=ROWS):
    """The mode of an axis, and which part of a batch this rank has."""
    mode = _Mode({**_LOSSES, **ContextParallel.functions})
    mode.shard = BatchShard("context", torch.distributed.group.WORLD, TOKENS, rows, LENGTH)
    return mode


def masks():
    torch.manual_seed(1)
    padding = torch.ones(ROWS, 1, 1, LENGTH, dtype=torch.bool)
    padding[0, ..., -3:], padding[1, ..., :1] = False, False
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    causal[:, 0] = True
    found = {
        "none": {},
        "causal": {"is_causal": True},
        "padding": {"attn_mask": padding},
        "causal and padding": {"attn_mask": (padding & causal) | torch.eye(LENGTH, dtype=torch.bool)},
        "a bias of each head": {"attn_mask": torch.randn(1, SIZE, LENGTH, LENGTH)},
        "scale": {"scale": 0.3},
    }
    return here(found)


def attention_gaps(rank, world_size, heads, kv_heads):
    gaps = {}
    for name, options in masks().items():
        mask = options.get("attn_mask")
        if mask is not None and mask.dim() == 4 and mask.shape[1] not in (1, heads):
            continue
        torch.manual_seed(0)
        wholes = [here(torch.randn(ROWS, n, LENGTH, SIZE)).requires_grad_() for n in (heads, kv_heads, kv_heads)]
        direction = here(torch.randn(ROWS, heads, LENGTH, SIZE))
        expected = F.scaled_dot_product_attention(*wholes, enable_gqa=heads != kv_heads, **options)
        expected.backward(direction)
        mode = functions()
        cut = mode.shard.cut
        own = [cut(whole.detach(), 2).clone().requires_grad_() for whole in wholes]
        with mode:
            found = F.scaled_dot_product_attention(*own, enable_gqa=heads != kv_heads, **options)
            found.backward(cut(direction, 2))
        pairs = [
            (found, cut(expected, 2)),
            *((x.grad, cut(whole.grad, 2)) for x, whole in zip(own, wholes, strict=True)),
        ]
        gaps[name] = max(float((a - b).abs().max()) for a, b in pairs)
    return gaps


@pytest.mark.parametrize(
    ("ranks", "heads", "kv_heads"),
    [
        pytest.param(2, 4, 4, id="heads are exchanged"),
        pytest.param(2, 4, 2, id="with fewer key-value heads"),
        pytest.param(4, 4, 2, id="keys are gathered, as there are fewer key-value heads than ranks"),
        pytest.param(4, 2, 2, id="keys are gathered, as there are fewer heads than ranks"),
        pytest.param(2, 1, 1, id="one head"),
    ],
)
def test_attention(ranks, heads, kv_heads):
    for gaps in run_ranks(attention_gaps, ranks, heads, kv_heads):
        assert len(gaps) >= 5
        assert max(gaps.values()) < 2e-6, gaps


def wrong_attention(rank, world_size):
    x = here(torch.randn(ROWS, 4, LENGTH // world_size, SIZE))
    mask = here(torch.ones(LENGTH // world_size, LENGTH // world_size, dtype=torch.bool))
    calls = {
        "a query": lambda: F.scaled_dot_product_attention(x[:, :, :1], x, x),
        "no heads": lambda: F.scaled_dot_product_attention(x[:, 0], x[:, 0], x[:, 0]),
        "a mask of own tokens": lambda: F.scaled_dot_product_attention(x, x, x, attn_mask=mask),
    }
    said = {}
    for name, call in calls.items():
        with functions(), pytest.raises(InputError) as caught:
            call()
        said[name] = str(caught.value)
    return said


def test_other_attention_is_refused():
    said = run_ranks(wrong_attention, 2)[0]
    assert "they have to be [batch, heads, tokens, features] of this rank's" in said["a query"]
    assert "they have to be [batch, heads, tokens, features] of this rank's" in said["no heads"]
    assert "a mask has to be [..., 8, 8] or [..., 1, 8]" in said["a mask of own tokens"]


def loss_cases():
    torch.manual_seed(2)
    logits, target = torch.randn(ROWS, LENGTH, CLASSES), torch.randint(CLASSES, (ROWS, LENGTH))
    uneven = target.clone()
    uneven[0, :6], uneven[1, 4:] = -100, -100
    none_here = target.clone()
    none_here[:, : LENGTH // 2] = -100  # no token of the first rank counts
    weight = torch.rand(CLASSES) + 0.5
    cases = {"even": (target, {}), "uneven": (uneven, {}), "none here": (none_here, {})}
    cases |= {"weights": (uneven, {"weight": weight}), "smoothing": (uneven, {"label_smoothing": 0.1})}
    cases |= {"both": (uneven, {"weight": weight, "label_smoothing": 0.1}), "sum": (uneven, {"reduction": "sum"})}
    return here((logits, cases | {"index": (target, {"ignore_index": 1})}))


def loss_gaps(rank, world_size, whole_targets):
    logits, cases = loss_cases()
    gaps = {}

    def compare(name, loss, target):
        whole = logits.clone().requires_grad_()
        expected = loss(whole, target)
        expected.backward()
        mode = functions()
        cut = mode.shard.cut
        own = cut(logits).clone().requires_grad_()
        with mode:
            found = loss(own, target if whole_targets else cut(target))
            found.backward()
        assert found.dtype == expected.dtype
        off = float(((found - expected) / expected.abs().clamp_min(1)).abs())
        # The mean over the ranks is the loss's gradient.
        gaps[name] = max(off, float((own.grad / world_size - cut(whole.grad)).abs().max()))

    for name, (target, options) in cases.items():
        compare(name, lambda x, y, o=options: F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1), **o), target)
    target = cases["uneven"][0]
    compare("classes second", lambda x, y: F.cross_entropy(x.transpose(1, 2), y), target)
    compare("module", lambda x, y: torch.nn.CrossEntropyLoss()(x.reshape(-1, CLASSES), y.reshape(-1)), target)
    compare("nll", lambda x, y: F.nll_loss(x.log_softmax(-1).reshape(-1, CLASSES), y.reshape(-1)), target)
    for name, loss in {"mse": F.mse_loss, "l1": F.l1_loss, "smooth l1": F.smooth_l1_loss}.items():
        compare(name, loss, here(torch.randn(ROWS, LENGTH, CLASSES, generator=torch.Generator().manual_seed(3))))
        compare(f"{name} sum", lambda x, y, loss=loss: loss(x, y, reduction="sum"), torch.zeros_like(logits))
    return gaps


@pytest.mark.parametrize("whole_targets", [True, False], ids=["targets of whole sequences", "of this rank's tokens"])
def test_losses(whole_targets):
    for gaps in run_ranks(loss_gaps, 2, whole_targets):
        assert max(gaps.values()) < 2e-6, gaps


def wrong_losses(rank, world_size):
    logits = here(torch.randn(ROWS, LENGTH // world_size, CLASSES))
    target = here(torch.randint(CLASSES, (ROWS, LENGTH)))
    said = []
    for x, y in ((logits[:, :-1], target[:, 1:]), (logits[:, :-1], target[:, : LENGTH // world_size][:, 1:])):
        with functions(), pytest.raises(InputError) as caught:
            F.cross_entropy(x.reshape(-1, CLASSES), y.reshape(-1))
        said.append(str(caught.value))
    with functions(), pytest.raises(InputError) as caught:
        F.cross_entropy(logits.reshape(-1, CLASSES), logits.reshape(-1, CLASSES).softmax(-1))
    return [*said, str(caught.value)]


def test_targets_that_were_shifted_too_late_are_refused():
    """Each rank would leave out the token before the next rank's."""
    *shifted, probabilities = run_ranks(wrong_losses, 2)[0]
    for words in shifted:
        assert "Shift the targets of whole sequences, before the call" in words
    assert "not probabilities" in probabilities
