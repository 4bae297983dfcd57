"""Criteria of sharded sequences: losses and weights are those of one process, or the criterion is rejected."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import halfmesh
from halfmesh.parallel.context.loss import TokensMode
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


def time_major(output, target):
    return F.cross_entropy(output.transpose(0, 1).flatten(0, 1), target.t().flatten())


def by_outputs(output, target):
    return entropy(output, target, reduction="sum") / output.shape[:2].numel()


def by_hand(output, target):
    return -output.log_softmax(-1).gather(-1, target.clamp_min(0)[..., None]).mean()


def with_z_loss(output, target):
    return entropy(output, target) + 0.1 * output.logsumexp(-1).square().mean()


def summed(output, target):
    return entropy(output, target, reduction="sum"), (target != -100).sum()


def flat(engine, ids, target):
    return engine.criterion(engine(ids).flatten(0, 1), target.flatten())


def of_a_function(engine, ids, target):
    """What is made of the loss outside of the criterion."""
    return engine.criterion(engine(ids), target).square() + 0.1


def plain(engine, ids, target):
    return engine.criterion(engine(ids), target)


def counting_on(engine, ids, target):
    """The first targets of a rank could be those of a mask."""
    return engine.criterion(engine(ids), (torch.arange(target.shape[1], device=ids.device) % 8).expand_as(target))


def in_evaluation_mode(engine, ids, target):
    """As in fine-tuning without dropout: every rank has all outputs, and the loss of all."""
    engine.eval()
    return engine.criterion(engine(ids), target)


def penalised(engine, ids, target):
    return plain(engine, ids, target) + 0.01 * sum(param.square().sum() for param in engine.model.parameters())


def summed_where(output, target, mask):
    losses = entropy(output, target.clamp_min(0), reduction="none").view_as(target)
    return (losses * mask).sum(), mask.sum()


def with_a_prompt(engine, ids, target):
    mask = here(torch.ones(target.shape))
    mask[:, :10] = 0
    return engine.criterion(engine(ids), target, mask)


def with_an_unset_variable():
    def loss(output, target):
        return teacher(output) if output.shape[0] == 0 else entropy(output, target)

    if not loss.__closure__:
        teacher = torch.nn.Identity()
    return loss


def of_probabilities(output, target):
    return F.cross_entropy(output.flatten(0, 1), output.detach().roll(1, -1).softmax(-1).flatten(0, 1))


RIGHT = {
    "uneven": (entropy, plain, "mean"),
    "targets 0 and 1 first": (entropy, counting_on, "mean"),
    "class weights": (lambda o, t: entropy(o, t, weight=weights(), label_smoothing=0.1), plain, "mean"),
    "a module": (lambda o, t: torch.nn.CrossEntropyLoss()(o.transpose(1, 2), t), plain, "mean"),
    "log-likelihood": (lambda o, t: F.nll_loss(o.log_softmax(-1).flatten(0, 1), t.flatten()), plain, "mean"),
    "probabilities": (of_probabilities, plain, "mean"),
    "time-major": (time_major, plain, "mean"),
    "a sum by a count of outputs": (by_outputs, plain, "mean"),
    "a sum": (lambda o, t: entropy(o, t, reduction="sum") / 20, plain, "mean"),
    "a mean, summed": (entropy, plain, "sum"),
    "weighted": (summed, plain, "weighted"),
    "a prompt that does not count": (summed_where, with_a_prompt, "weighted"),
    "by hand": (by_hand, plain, "mean"),
    "in evaluation mode": (entropy, in_evaluation_mode, "mean"),
    "a penalty, summed": (lambda o, t: entropy(o, t, reduction="sum") / 20, penalised, "sum"),
    "z-loss": (with_z_loss, plain, "mean"),
    "mse": (lambda o, t: F.mse_loss(o, o.detach().roll(1, -1)), plain, "mean"),
    "a closure of an unset variable": (with_an_unset_variable(), plain, "mean"),
    "flat tensors": (F.cross_entropy, flat, "mean"),
    "a function of the loss": (entropy, of_a_function, "mean"),
}


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
    return found


def test_losses_are_those_of_one_process():
    expected = update_each(0, 1)
    for found in run_ranks(update_each, 2):
        for name, (loss, new) in expected.items():
            torch.testing.assert_close(
                found[name][0], loss, rtol=1e-5, atol=1e-6, msg=f"{name}: {found[name][0]}, {loss}"
            )
            torch.testing.assert_close(found[name][1], new, rtol=0, atol=2e-6, msg=name)


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_mask = [
            x.dtype == torch.bool for x in (args[1] if func._schema.name == "aten::index" else ()) if x is not None
        ]
        self.seen.append("index by a mask" if any(is_mask) else func._schema.name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("ignored", [-100, 255, 0, 2])
@pytest.mark.parametrize("weighted", [False, True])
def test_targets_are_counted_without_a_wait_for_the_device(ignored, weighted):
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(32, 5, generator=generator), torch.randint(5, (32,), generator=generator)
    target[::3] = ignored
    weight = torch.rand(5, generator=generator) + 0.5 if weighted else None
    if weighted and 0 <= ignored < 5:
        weight[ignored] = torch.inf  # does not count
    expected = F.cross_entropy(output, target, weight, ignore_index=ignored)
    with Operators() as operators, TokensMode(None, lambda count: count):
        found = F.cross_entropy(output, target, weight, ignore_index=ignored)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert not {"index by a mask", "aten::nonzero", "aten::_local_scalar_dense"} & set(operators.seen)


def centred(output, target):
    return entropy(output - output.mean(1, keepdim=True), target)


def masked_mean(output, target):
    mask = target != -100
    return (entropy(output, target, reduction="none") * mask.flatten()).sum() / mask.sum()


def of_two(first, second, target):
    return entropy(second, target) + 1e-4 * first.square().sum()


def of_two_lengths(engine, ids, target):
    return engine.criterion(engine(ids[:, :8]), engine(ids), target)


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
    "centred": (centred, plain, "neither"),
    "a mean by a mask": (masked_mean, plain, "loss_reduction='weighted'"),
    "late": (Late(), plain, "neither"),
    "time-major before": (F.cross_entropy, flattened_before, "without a sequence dim"),
    "shifted before": (entropy, shifted_before, "Shift targets of whole sequences"),
    "two lengths": (of_two, of_two_lengths, "outputs of different sequence lengths; pad them"),
    "mixed before": (entropy, mixed_before, "do other computations inside the criterion"),
}


def reject_each(rank, world_size):
    said = {}
    for name, (loss_of, step, _) in WRONG.items():
        engine = make_engine(SMALL, world_size, loss_of)

        def train(engine=engine, step=step):
            for _ in range(3):
                engine.backward(step(engine, *uneven()))
                engine.step()

        said[name] = rejection(train), engine.global_step
    return said


def test_what_is_no_mean_over_tokens_is_rejected_before_it_trains():
    for said in run_ranks(reject_each, 2):
        for name, (_, _, words) in WRONG.items():
            assert said[name][0].startswith("InputError"), name
            assert words in said[name][0], name
        assert said["late"][1] == 2
        assert {steps for name, (_, steps) in said.items() if name != "late"} == {0}


def half_entropy(output, target):
    return entropy(output, target, weight=weights().bfloat16())


def half_head(output, target):
    return entropy(F.linear(output, here(torch.eye(256, dtype=torch.bfloat16))), target)


def half_squared(output, target):
    return half_entropy(output, target) + output.mean((0, 1)).square().sum()


def half_losses(rank, world_size):
    found = []
    for loss_of in (half_entropy, half_head, half_squared):
        engine = make_engine(SMALL, world_size, loss_of, bf16={"mode": "torch"})
        try:
            found.append(float(plain(engine, *uneven()).detach()))
        except halfmesh.InputError as error:
            found.append(str(error))
    return found


def test_criteria_with_weights_in_half_precision_are_tried_in_it():
    expected = half_losses(0, 1)
    for *found, wrong in run_ranks(half_losses, 2):
        assert found == pytest.approx(expected[:2], rel=2e-2)
        assert "neither" in wrong


def calls_of_criterion(rank, world_size):
    late = Late()
    engine = make_engine(make_gpt, world_size, late)
    engine.backward(plain(engine, *uneven()))
    return late.calls


def test_the_trial_of_the_criterion_leaves_no_trace():
    assert run_ranks(calls_of_criterion, 2) == [1, 1]
