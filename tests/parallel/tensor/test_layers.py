"""Sharded layers: what they send for one input, inputs that they reject, gradients of layers that stay whole, and the
model and its optimizer that are sharded in place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.parity.test_tensor import PROJECTIONS, SEQUENCE, Projections, sequences
from tests.support.models import CLASSES, FEATURES, MODES, make_data, make_engine, step_on
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import divide, random, rejection
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


def sums(call: Callable[[], Any]) -> int:
    """How many all-reduces `call` starts."""
    with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as calls:
        call()
    return calls.call_count


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


class Net(nn.Module):
    """Sharded features go through a PReLU, whose one weight every rank has."""

    def __init__(self, zero: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.act, self.down = nn.Linear(FEATURES, 16), nn.PReLU(), nn.Linear(16, FEATURES)
        self.norm, self.head = nn.LayerNorm(FEATURES), nn.Linear(FEATURES, CLASSES)
        if zero:
            nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.down(self.act(self.up(self.norm(x)))))


PAIR = {"up": "colwise", "down": "rowwise"}
RIGHT = {**PAIR, "act": "partial", "head": "colwise_gather"}


def start(plan: dict[str, str], model: nn.Module, **config: Any) -> Any:
    return make_engine({"parallel": {"tensor": {"size": 2, "plan": plan}}, **config}, model=model)


def train(engine: Any, steps: int = 1) -> None:
    x, y = make_data(8 * steps)
    for batch in zip(x.split(8), y.split(8), strict=True):
        step_on(engine, *batch)


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
    found["summed"] = rejection(lambda: train(start({**RIGHT, "norm": "partial"}, Net())))
    model, (x, y) = Net(), make_data(8)
    model.unused = nn.Linear(2, 2)  # so that the first gradients are not the last to be compared
    engine = start(RIGHT, model)
    engine.backward(engine.criterion(engine(here(x)), here(y)))
    engine.backward(engine.model.norm.weight.square().sum())  # does not reach what is summed already
    engine.step()
    return found


def test_a_wrong_plan_is_rejected_with_the_first_gradient():
    for found in run_ranks(wrong_plans, 2):
        assert "the plan sums the gradients of norm.weight, norm.bias, but they are the same" in found.pop("summed")
        for case, message in found.items():
            assert "InputError: the gradients of act.weight differ between the ranks of a tensor group" in message, case


SPLITS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0, "head.bias": 0}


def part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank of two holds of a parameter."""
    return whole.chunk(2, SPLITS[name])[rank] if name in SPLITS else whole


def in_place(rank: int, world_size: int) -> None:
    """A model and an optimizer with state, sharded between two updates; then state dicts of the whole and of parts."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x, y = make_data(8)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step(model, optimizer)
    alone = copy.deepcopy((model, optimizer))
    params = dict(model.named_parameters())
    engine = make_engine({"parallel": {"tensor": {"size": 2, "plan": RIGHT}}}, model=model, optimizer=optimizer)
    for (name, param), state in zip(params.items(), alone[1].state.values(), strict=True):
        assert param is model.get_parameter(name), "the same objects"
        for key, value in state.items():
            assert torch.equal(optimizer.state[param][key].cpu(), part(name, value, rank) if value.dim() else value)
    step_on(engine, x, y)
    step(*alone)
    torch.testing.assert_close(close_whole(engine), dict(alone[0].state_dict()), rtol=1e-5, atol=1e-6)

    for mode in ("none", "naive_bf16"):
        engine = start(RIGHT, Net(), **MODES[mode])
        whole = Net(seed=3).state_dict()
        kept = copy.deepcopy(whole)
        engine.model.load_state_dict(whole)
        assert all(torch.equal(whole[name], value) for name, value in kept.items()), "what is loaded stays"
        local = {name: value.clone() for name, value in engine.model.state_dict().items()}
        assert all(torch.equal(local[name], part(name, value, rank).to(local[name])) for name, value in whole.items())
        engine.model.load_state_dict(Net(seed=4).state_dict())
        engine.model.load_state_dict(local)
        assert all(torch.equal(value, local[name]) for name, value in engine.model.state_dict().items())
        assigned = rejection(lambda e=engine: e.model.load_state_dict(Net().state_dict(), assign=True))
        assert assigned.startswith("InputError: load_state_dict: assign=True would replace"), assigned
        engine.model.load_state_dict(whole)
        assert torch.equal(close_whole(engine)["down.weight"], whole["down.weight"]), "in full precision"


def test_a_model_and_its_optimizer_are_sharded_in_place_and_take_states_of_the_whole():
    run_ranks(in_place, 2)
