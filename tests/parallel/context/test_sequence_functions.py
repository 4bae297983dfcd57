"""Losses of sharded sequences: values and gradients are those of whole ones."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from halfmesh.errors import InputError
from halfmesh.parallel.batch_shard.calls import _LOSSES, _Mode
from halfmesh.parallel.batch_shard.shard import TOKENS, BatchShard
from halfmesh.parallel.context.axis import ContextParallel
from tests.support.ranks import here, run_ranks

ROWS, LENGTH = 2, 8
CLASSES = 5

pytestmark = pytest.mark.distributed


def functions():
    """The mode of an axis, and which part of a batch this rank has."""
    mode = _Mode({**_LOSSES, **ContextParallel.functions})
    mode.shard = BatchShard("context", torch.distributed.group.WORLD, TOKENS, ROWS, LENGTH)
    return mode


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
