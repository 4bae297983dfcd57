"""Gradients over a tensor group: a plan that says wrongly which of them are parts of a sum is rejected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, MODES, make_data, make_engine
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rejection

pytestmark = pytest.mark.distributed


class Net(nn.Module):
    """Divided features go through a PReLU, whose one weight every rank has."""

    def __init__(self, zero: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.act, self.down = nn.Linear(FEATURES, 16), nn.PReLU(), nn.Linear(16, FEATURES)
        self.head = nn.Linear(FEATURES, CLASSES)
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(self.act(self.up(self.norm(x)))))


PLAN = {"up": "colwise", "down": "rowwise"}
COMPLETE = {**PLAN, "act": "partial"}


def config(plan: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "plan": plan}}, **more}


def train(engine: Any, steps: int = 4) -> None:
    x, y = here(make_data(8 * steps))
    for a, b in zip(x.split(8), y.split(8), strict=True):
        engine.backward(engine.criterion(engine(a), b))
        engine.step()


def wrong_plan(rank: int, world_size: int) -> dict[str, str]:
    found: dict[str, str] = {}
    for mode in ("none", "naive_fp16"):
        engine = make_engine(config(PLAN, **MODES[mode]), model=Net())
        before = engine.model.act.weight.detach().clone()
        found[mode] = rejection(lambda e=engine: train(e, 1))
        assert torch.equal(engine.model.act.weight, before)
    # At first its gradient is zero, because the next layer starts at zero.
    engine = make_engine(config(PLAN), model=Net(zero=True))
    train(engine, 1)
    found["zero at first"] = rejection(lambda: train(engine, 1))
    # An overflow says nothing of it.
    overflow = {"fp16": {"mode": "naive", "initial_scale": 2.0**32, "hysteresis": 1}, "max_consecutive_skips": 99}
    engine = make_engine(config(PLAN, **overflow), model=Net())
    train(engine, 1)
    assert engine.skipped_steps == 1
    found["overflow at first"] = rejection(lambda: train(engine, 40))
    # Frozen at first, or given to the optimizer later.
    model = Net()
    model.act.weight.requires_grad_(False)
    engine = make_engine(config(PLAN), model=model)
    train(engine, 2)
    model.act.weight.requires_grad_(True)
    found["frozen at first"] = rejection(lambda: train(engine, 1))
    model = Net()
    some = [p for n, p in model.named_parameters() if n != "act.weight"]
    engine = make_engine(config(PLAN), model=model, optimizer=torch.optim.SGD(some, lr=0.1))
    train(engine, 2)
    engine.optimizer.add_param_group({"params": [model.act.weight]})
    found["added later"] = rejection(lambda: train(engine, 1))
    engine = make_engine(config({**COMPLETE, "norm": "partial"}), model=Net())
    found["summed"] = rejection(lambda: train(engine, 1))
    return found


def test_a_wrong_plan_is_rejected_with_the_first_gradient():
    for found in run_ranks(wrong_plan, 2):
        message = found.pop("summed")
        assert "InputError: the plan sums the gradients of norm.weight, norm.bias over the ranks" in message
        assert len(found) == 6
        for case, message in found.items():
            assert "InputError: the gradients of act.weight differ between the ranks of a tensor group" in message, case
            assert "give their modules the style 'partial'" in message


def sparse(rank: int, world_size: int) -> list[bool]:
    """A whole embedding with sparse gradients beside divided layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 6), nn.Linear(6, 2))
    engine = make_engine(
        config({"1": "colwise", "2": "rowwise"}), model=model, optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    before = model[0].weight.detach().clone()
    ids, labels = here((torch.tensor([1, 1, 5]), torch.tensor([0, 1, 1])))
    engine.backward(engine.criterion(engine(ids), labels))
    engine.step()
    return (model[0].weight != before).any(1).tolist()


@pytest.mark.not_simulated("sparse tensors")
def test_sparse_gradients_of_whole_layers():
    assert run_ranks(sparse, 2) == [[False, True, False, False, False, True]] * 2
