"""A model and its optimizer, sharded in place: state that is taken along, and state dicts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.support.models import CLASSES, FEATURES, MODES, make_data, make_engine
from tests.support.ranks import here, run_ranks
from tests.support.tensor_parity import rejection
from tests.support.whole import close_whole, load_full

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}
CONFIG = {"parallel": {"tensor": {"size": 2, "plan": PLAN}}}
SPLITS = {"up.weight": 0, "up.bias": 0, "down.weight": 1, "head.weight": 0, "head.bias": 0}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(nn.functional.gelu(self.up(x)))))


def part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank of two holds of a parameter."""
    return whole.chunk(2, SPLITS[name])[rank] if name in SPLITS else whole


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    x, y = make_data(32)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[batch : batch + 8]), y[batch : batch + 8]).backward()
    optimizer.step()


def optimizer_state(rank: int, world_size: int) -> None:
    """Three updates in one process, two sharded; beside it an optimizer left alone."""
    model, whole = Net(), Net()
    optimizer, expected = torch.optim.Adam(model.parameters(), lr=0.01), torch.optim.Adam(whole.parameters(), lr=0.01)
    for batch in range(3):
        step(model, optimizer, batch)
        step(whole, expected, batch)
    params = dict(model.named_parameters())
    before = copy.deepcopy([optimizer.state[param] for param in params.values()])
    engine = make_engine(CONFIG, model=model, optimizer=optimizer)
    assert all(param is model.get_parameter(name) for name, param in params.items()), "the same objects"
    for (name, param), state in zip(params.items(), before, strict=True):
        for key, value in state.items():
            assert torch.equal(optimizer.state[param][key].cpu(), part(name, value, rank) if value.dim() else value)
    x, y = here(make_data(32))
    for batch in range(3, 5):
        rows = slice(batch, batch + 8)
        engine.backward(engine.criterion(engine(x[rows]), y[rows]))
        engine.step()
        step(whole, expected, batch)
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    load_full(engine.full_state_dict(optimizer=True, rank0_only=False), model, optimizer)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[a], expected.state[b], rtol=1e-5, atol=1e-6)


def test_an_optimizer_with_state_is_sharded_and_its_full_state_loads():
    run_ranks(optimizer_state, 2)


def loads(rank: int, world_size: int) -> None:
    """Whole and local state dicts into an engine of each kind of weights."""
    for mode in ("none", "naive_bf16"):
        engine = make_engine({**MODES[mode], **CONFIG}, model=Net())
        whole = Net(seed=3).state_dict()
        kept = {name: value.clone() for name, value in whole.items()}
        engine.model.load_state_dict(whole)
        assert all(torch.equal(whole[name], value) for name, value in kept.items()), "what is loaded stays"
        local = {name: value.clone() for name, value in engine.model.state_dict().items()}
        assert all(torch.equal(local[name], part(name, value, rank).to(local[name])) for name, value in whole.items())
        engine.model.load_state_dict(Net(seed=4).state_dict())
        engine.model.load_state_dict(local)
        assert all(torch.equal(value, local[name]) for name, value in engine.model.state_dict().items())
        assigned = rejection(lambda e=engine: e.model.load_state_dict(Net().state_dict(), assign=True))
        assert assigned.startswith("InputError: load_state_dict: assign=True would replace")
        engine.model.load_state_dict(whole)
        assert torch.equal(close_whole(engine)["down.weight"], whole["down.weight"]), "in full precision"


def test_state_dicts_of_the_whole_model_and_of_parts():
    run_ranks(loads, 2)
