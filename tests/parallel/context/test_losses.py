"""Criteria of sharded sequences: losses and weights are those of one process, or the criterion is rejected."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rejection
from tests.support.whole import close_whole

from .runs import make_engine, make_gpt, tokens

pytestmark = pytest.mark.distributed


SMALL = partial(make_gpt, depth=1, width=8, num_heads=2)


def uneven():
    """The ranks' tokens do not count alike."""
    ids, target = tokens()
    target[0, :11], target[1, 4:6] = -100, -100
    return ids, target


def entropy(output, target, **options):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), **options)


def weights():
    return here(torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.5)


def by_outputs(output, target):
    return entropy(output, target, reduction="sum") / output.shape[:2].numel()


def summed(output, target):
    return entropy(output, target, reduction="sum"), (target != -100).sum()


def entropy_without_ones(output, target):
    return F.cross_entropy(
        output.flatten(0, 1), target.flatten().masked_fill(target.flatten() == -100, -1), ignore_index=-1
    )


def flat(engine, ids, target):
    return engine.criterion(engine(ids).flatten(0, 1), target.flatten())


def plain(engine, ids, target):
    return engine.criterion(engine(ids), target)


def summed_where(output, target, mask):
    losses = entropy(output, target.clamp_min(0), reduction="none").view_as(target)
    return (losses * mask).sum(), mask.sum()


def with_a_prompt(engine, ids, target):
    mask = here(torch.ones(target.shape))
    mask[:, :10] = 0
    return engine.criterion(engine(ids), target, mask)


RIGHT = {
    "uneven": (entropy, plain, "mean"),
    "class weights": (lambda o, t: entropy(o, t, weight=weights(), label_smoothing=0.1), plain, "mean"),
    "another index that does not count": (entropy_without_ones, plain, "mean"),
    "log-likelihood": (lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten()), plain, "mean"),
    "a sum by a count of outputs": (by_outputs, plain, "mean"),
    "a sum": (lambda o, t: entropy(o, t, reduction="sum") / 20, plain, "sum"),
    "weighted": (summed, plain, "weighted"),
    "a prompt that does not count": (summed_where, with_a_prompt, "weighted"),
    "flat tensors": (F.cross_entropy, flat, "mean"),
}


def half_entropy(output, target):
    return entropy(output, target, weight=weights().bfloat16())


def update_each(rank, world_size):
    """For each criterion the loss and the norms of the weights after an update."""
    found = {}
    for name, (loss_of, step, reduction) in RIGHT.items():
        engine = make_engine(SMALL, world_size, loss_of, loss_reduction=reduction)
        loss = step(engine, *uneven())
        engine.backward(loss)
        engine.step()
        total = torch.stack([torch.as_tensor(x).double() for x in loss]) if isinstance(loss, tuple) else loss
        found[name] = total.detach().double(), torch.cat([w.flatten() for w in close_whole(engine).values()])
    engine = make_engine(SMALL, world_size, half_entropy, bf16={"mode": "torch"})
    return found, float(plain(engine, *uneven()).detach())


def test_losses_are_those_of_one_process():
    expected, expected_half = update_each(0, 1)
    for found, half in run_ranks(update_each, 2):
        assert half == pytest.approx(expected_half, rel=2e-2), "tried with weights in half precision"
        for name, (loss, new) in expected.items():
            torch.testing.assert_close(found[name][0], loss, rtol=1e-5, atol=1e-6, msg=name)
            torch.testing.assert_close(found[name][1], new, rtol=0, atol=2e-6, msg=name)


def masked_mean(output, target):
    mask = target != -100
    return (entropy(output, target, reduction="none") * mask.flatten()).sum() / mask.sum()


class Late:
    """A term sets in with the third call."""

    calls = 0

    def __call__(self, output, target):
        self.calls += 1
        late = output.mean((0, 1)).square().sum() if self.calls > 2 else 0.0
        return entropy(output, target) + late


def flattened_before(engine, ids, target):
    return engine.criterion(engine(ids).transpose(0, 1).flatten(0, 1), target.t().flatten())


def shifted_before(engine, ids, target):
    return engine.criterion(engine(ids)[:, :-1], target[:, 1:])


def mixed_before(engine, ids, target):
    output = engine(ids)
    return engine.criterion(output - output.mean(1, keepdim=True), target)


WRONG = {
    "a mean by a mask": (masked_mean, plain, "loss_reduction='weighted'"),
    "late": (Late(), plain, "neither"),
    "time-major before": (F.cross_entropy, flattened_before, "without a sequence dim"),
    "shifted before": (entropy, shifted_before, "Shift targets of whole sequences"),
    "mixed before": (entropy, mixed_before, "unchanged, and targets [batch, sequence, ...]; compute inside"),
}


def reject_each(rank, world_size):
    said = {}
    for name, (loss_of, step, _) in WRONG.items():
        engine = make_engine(SMALL, world_size, loss_of)

        def train(engine=engine, step=step):
            for _ in range(3):
                engine.backward(step(engine, *uneven()))
                engine.step()

        said[name] = rejection(train), engine.global_step, getattr(loss_of, "calls", 0)
    return said


def test_what_is_no_mean_over_tokens_is_rejected_before_it_trains():
    for said in run_ranks(reject_each, 2):
        for name, (_, _, words) in WRONG.items():
            assert said[name][0].startswith("InputError"), name
            assert words in said[name][0], name
        assert said["late"][1:] == (2, 3), "the trial leaves no trace"
        assert {steps for name, (_, steps, _) in said.items() if name != "late"} == {0}
