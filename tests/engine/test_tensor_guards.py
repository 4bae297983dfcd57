"""What would be silently wrong with divided layers is refused, or cannot happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.engine.test_tensor_parallel import PLAN, Divisible, make, tensor_config
from tests.support.models import adamw, make_data
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def step(engine: halfmesh.Engine) -> None:
    x, y = make_data(64)
    engine.backward(engine.criterion(engine(x), y))
    engine.step()


def refusal(call: Any) -> str:
    try:
        call()
    except InputError as error:
        return str(error)
    return "nothing was refused"


class PerHead(Divisible):
    """A whole layer on each half of the features, which no plan speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.gelu(self.up(x)).unflatten(-1, (-1, 8))
        return self.head(self.norm(self.down(self.each(heads).flatten(-2))))


def refusals(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    engine = make(tensor_config(), optimizer=adamw)
    step(engine)
    found["second engine"] = refusal(lambda: make({}, model=engine.model))
    model = Divisible()
    optimizer = adamw(model.parameters())
    nn.functional.cross_entropy(model(make_data(8)[0]), make_data(8)[1]).backward()
    optimizer.step()
    found["whole state"] = refusal(lambda: engine.optimizer.load_state_dict(optimizer.state_dict()))
    found["undeclared"] = refusal(lambda: step(make(tensor_config(), model=PerHead())))
    divided = {"parallel": {"tensor": {"size": 2, "plan": {**PLAN, "head": "colwise"}}}}
    found["divided output"] = refusal(lambda: step(make(divided)))
    return found


def test_refusals():
    for found in run_ranks(refusals, 2):
        assert "up, down, head are divided over the tensor group of another engine" in found["second engine"]
        assert "has 'exp_avg' of shape (16, 8) for a parameter of which this rank holds (8, 8)" in found["whole state"]
        assert "the gradients of each.weight, each.bias differ" in found["undeclared"]
        assert "the model's output differs between the ranks" in found["divided output"]
        assert "'colwise_gather'" in found["divided output"]


class Dropping(Divisible):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(nn.functional.dropout(self.norm(self.down(self.up(x))), 0.5, self.training))


def draws(rank: int, world_size: int) -> tuple[list[torch.Tensor], bool, bool]:
    """Rank 1 draws numbers of its own, and one run is stopped and resumed."""
    engine = make(tensor_config(), model=Dropping())
    step(engine)
    saved = engine.state_dict()
    saved = {**saved, "model": {name: value.clone() for name, value in saved["model"].items()}}
    before = torch.get_rng_state()
    if rank == 1:
        torch.manual_seed(5), torch.rand(3)
    mine = torch.get_rng_state()
    step(engine)
    untouched = torch.equal(torch.get_rng_state(), mine)
    weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
    resumed = make(tensor_config(), model=Dropping(3), optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9))
    torch.set_rng_state(before)
    resumed.load_state_dict(saved | {"update": resumed.state_dict()["update"]})
    same = torch.equal(resumed._division.random.state, saved["random"]["model"])
    return [weights["norm.weight"], weights["down.bias"]], untouched, same


def test_dropout_agrees_whatever_a_rank_draws():
    first, second = run_ranks(draws, 2)
    torch.testing.assert_close(first[0], second[0], rtol=0, atol=0)
    assert first[1:] == second[1:] == (True, True)
