"""Several losses, models and groups under O0 to O3: each loss its own scale, one verdict for the step."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

import halfmesh
from tests.amp.apex_runs import (
    CLASSES,
    FEATURES,
    LEVELS,
    Apex,
    assert_same,
    linear,
    make_batches,
    make_pair,
    scaler_states,
    set_scalers,
    skipped,
)

SCALES = (2.0**10, 2.0**13)  # unlike each other: taking the wrong one cannot go unseen
BATCHES = make_batches(3)
WEIGHTS = {"fp16": "first.weight", "fp32": "norm.weight"}  # in O2 the second one stays in fp32


class Part(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))

    def patched(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.last, torch.tanh(self.norm(linear(self.first, x))))


class Parts(nn.Module):
    """Two models, each with a loss of its own, and a third one that both losses use."""

    def __init__(self) -> None:
        super().__init__()
        self.m0, self.m1, self.both = Part(0), Part(1), Part(2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.m0(x) + self.both(x), self.m1(x) + self.both(x)

    def patched(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.m0.patched(x) + self.both.patched(x), self.m1.patched(x) + self.both.patched(x)


def sgd(model: nn.Module) -> optim.Optimizer:
    """As many groups as models, with rates of their own."""
    groups = [{"params": list(part.parameters()), "lr": 0.1 / 2**i} for i, part in enumerate(model.children())]
    return optim.SGD(groups, momentum=0.5)


def make_runs(model: nn.Module, optimizer: Any, opt_level: str, num_losses: int) -> tuple[halfmesh.Engine, Apex]:
    """An engine and the reference, with dynamic scales that are already somewhere."""
    config = {"fused": False}  # the gradients that the optimizer finds are unscaled
    runs = make_pair(model, optimizer, opt_level, config, loss_scale="dynamic", num_losses=num_losses)
    set_scalers(*runs, [(scale, 0) for scale in SCALES[:num_losses]])
    return runs


def with_inf(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    grad.view(-1)[0] = math.inf
    return grad


def run_losses(run: Any, loss_ids: tuple[int, int], bad: Any) -> list[tuple[bool | None, tuple[float, ...]]]:
    """One backward for each of two losses, and a step. Returns for each step whether it was skipped, and the scales.

    Args:
        bad: (step, loss, weight): inf in one element of one gradient, of one backward of one step.
    """
    history = []
    for step, (x, y) in enumerate(BATCHES):
        for which, output in enumerate(run(x)):
            loss = F.cross_entropy(output.float(), y) * (1.0, 3.0)[which]
            hooks = []
            if bad is not None and bad[:2] == (step, which):
                part = (run.model.m0, run.model.m1)[which]
                hooks = [part.get_parameter(WEIGHTS[bad[2]]).register_hook(with_inf)]
            run.backward(loss, loss_id=loss_ids[which])
            for hook in hooks:
                hook.remove()
        history.append((skipped(run.step()), run.loss_scales))
    return history


@pytest.mark.promise("APEX's levels and overrides")
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_two_losses_one_optimizer(opt_level, num_losses):
    """inf in either backward of either of the first two of three steps: one is skipped, and two are made."""
    loss_ids = (0, num_losses - 1)
    for bad in (None, *itertools.product((0, 1), (0, 1), WEIGHTS)):
        engine, reference = make_runs(Parts(), sgd, opt_level, num_losses)
        history = run_losses(engine, loss_ids, bad)
        assert history == run_losses(reference, loss_ids, bad), bad
        assert_same(engine, reference)
        assert [was for was, _ in history] == [bad is not None and step == bad[0] for step in range(3)]
        lowered = {loss_ids[bad[1]]} if bad else set()
        assert history[-1][1] == tuple(SCALES[i] / (2 if i in lowered else 1) for i in range(num_losses))


class Weight(nn.Module):
    """One number: its gradients are what the input says, to the last bit in any precision."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


@pytest.mark.parametrize("scales", [(16.0,), (16.0, 2.0**14)])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_gradients_are_added_up_in_fp32(opt_level, scales):
    """1024 + 1/16 is no fp16 number. With scales of its own each loss is unscaled before it is added to the other."""
    engine, reference = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1.0), opt_level, len(scales))
    set_scalers(engine, reference, [(scale, 0) for scale in scales])
    seen = []
    [param] = engine.optimizer.param_groups[0]["params"]
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.item()))
    for loss_id, slope in ((0, 1024.0), (len(scales) - 1, 0.0625)):
        engine.backward(engine(torch.tensor([slope])).sum(), loss_id=loss_id)
    assert not engine.step().skipped
    assert seen == [1024.0625]


def test_a_loss_without_backward_keeps_its_scale():
    """Nor does the step count for its growth."""
    engine, reference = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1e-3), "O2", 2)
    for loss_id, slope in ((0, 1.0), (1, 1.0), (0, 1e38), (0, 1.0), (1, math.nan)):
        for run in (engine, reference):
            run.backward(run(torch.ones(1)).sum() * slope, loss_id=loss_id)
            run.step()
        saved = scaler_states(engine.state_dict())
        assert [(s["scale"], s["growth_tracker"]) for s in saved] == [(s.scale, s.unskipped) for s in reference.scalers]
