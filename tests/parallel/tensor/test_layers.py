"""Sharded layers: what they send for one input, inputs that they reject, and gradients of layers that stay whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parity.test_tensor import PROJECTIONS, SEQUENCE, Projections, sequences
from tests.support.models import CLASSES, FEATURES, make_data, make_engine
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import divide, random, rejection

pytestmark = pytest.mark.distributed


def sums(call: Callable[[], Any]) -> int:
    """How many all-reduces `call` starts."""
    with pytest.MonkeyPatch.context() as patch:
        calls, plain = [], dist.all_reduce
        patch.setattr(dist, "all_reduce", lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs))
        call()
    return len(calls)


def shared_inputs(rank: int, world_size: int) -> list[int]:
    engine, x = divide(Projections().double(), PROJECTIONS), random(3, 4)
    outputs: list[torch.Tensor] = []
    engine.backward(engine(x).sum())  # the first tries the plan out, too
    counts = [sums(lambda: outputs.append(engine(x))), sums(lambda: engine.backward(outputs[0].sum()))]
    both = engine(x) + engine(x)
    counts.append(sums(lambda: engine.backward(both.sum())))
    engine.model.before.requires_grad_(False)
    frozen_below = engine(x)
    return [*counts, sums(lambda: engine.backward(frozen_below.sum()))]


def test_layers_that_share_an_input_share_one_sum():
    assert run_ranks(shared_inputs, 2) == [[1, 1, 2, 0]] * 2


def wrong_inputs(rank: int, world_size: int) -> dict[str, str]:
    x, found = random(3, 4, dtype=torch.float32), {}
    found["sequence"] = rejection(lambda: divide(sequences(), SEQUENCE, True)(random(2, 5, 4).float()))
    plan = {name: style for name, style in SEQUENCE.items() if name != "1.*.norm"}
    engine = divide(sequences(), plan, True)
    output = engine(random(2, 6, 4).float())
    found["norms"] = rejection(lambda: engine.backward(output.square().sum()))
    attention = divide(nn.MultiheadAttention(4, 2), {"": "attention", "out_proj": "rowwise"})
    found["a hint alone"] = rejection(lambda: attention(x, x, x, is_causal=True, need_weights=False))
    return found


def test_inputs_that_cannot_be_right_are_rejected_on_every_rank():
    words = {
        "sequence": "tensor=2 does not divide the sequence length 5; pad it",
        "norms": "the gradients of 1.0.norm.weight, 1.0.norm.bias, 1.1.norm.weight, 1.1.norm.bias",
        "a hint alone": "is_causal=True is only a hint about attn_mask",
    }
    for found in run_ranks(wrong_inputs, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case


# -- gradients of layers that stay whole -------------------------------------------------------------------------------


class Net(nn.Module):
    """Sharded features go through a PReLU, whose one weight every rank has."""

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


PAIR = {"up": "colwise", "down": "rowwise"}


def start(plan: dict[str, str], model: nn.Module, **config: Any) -> Any:
    return make_engine({"parallel": {"tensor": {"size": 2, "plan": plan}}, **config}, model=model)


def train(engine: Any, steps: int = 1) -> None:
    x, y = here(make_data(8 * steps))
    for a, b in zip(x.split(8), y.split(8), strict=True):
        engine.backward(engine.criterion(engine(a), b))
        engine.step()


def wrong_plans(rank: int, world_size: int) -> dict[str, str]:
    engine = start(PAIR, Net())
    before = engine.model.act.weight.detach().clone()
    found = {"at once": rejection(lambda: train(engine))}
    assert torch.equal(engine.model.act.weight, before)
    engine = start(PAIR, Net(zero=True))  # at first its gradient is zero, as the next layer starts at zero
    train(engine)
    found["zero at first"] = rejection(lambda: train(engine))
    overflow = {"fp16": {"mode": "naive", "initial_scale": 2.0**32, "hysteresis": 1}, "max_consecutive_skips": 99}
    engine = start(PAIR, Net(), **overflow)  # which says nothing of it
    train(engine)
    found["overflow at first"] = rejection(lambda: train(engine, 40))
    found["summed"] = rejection(lambda: train(start({**PAIR, "act": "partial", "norm": "partial"}, Net())))
    return found


def test_a_wrong_plan_is_rejected_with_the_first_gradient():
    for found in run_ranks(wrong_plans, 2):
        assert "the plan sums the gradients of norm.weight, norm.bias, but they are the same" in found.pop("summed")
        for case, message in found.items():
            assert "InputError: the gradients of act.weight differ between the ranks of a tensor group" in message, case
