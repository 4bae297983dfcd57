"""A model and its optimizer, divided in place: state that is taken along, state dicts, and inputs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.utils.torch_private import ALL_GATHER
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

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        x = self.norm(self.down(nn.functional.gelu(self.up(x))))
        return self.head(x if scale is None else x * scale["by"])


def part(name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank of two holds of a parameter."""
    return whole.chunk(2, SPLITS[name])[rank] if name in SPLITS else whole


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    x, y = make_data(32)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[batch : batch + 8]), y[batch : batch + 8]).backward()
    optimizer.step()


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [*model.up.parameters(), *model.norm.parameters()], "lr": 0.01},
        {"params": [*model.down.parameters(), *model.head.parameters()], "lr": 0.02},
    ]


def optimizer_state(rank: int, world_size: int) -> None:
    """Three updates in one process, two divided, two in one process again, with the full state dict; beside it an
    optimizer left alone."""
    model, whole = Net(), Net()
    optimizer, expected = torch.optim.Adam(groups(model)), torch.optim.Adam(groups(whole))
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
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    engine.close()
    model = Net()
    optimizer = torch.optim.Adam(groups(model))
    load_full(full, model, optimizer)
    for batch in range(5, 7):
        step(model, optimizer, batch)
        step(whole, expected, batch)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(optimizer.state[a], expected.state[b], rtol=1e-5, atol=1e-6)


def test_an_optimizer_with_state_is_divided_and_its_full_state_loads():
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
        assert assigned.startswith("InputError: load_state_dict(..., assign=True) would replace")
        engine.model.load_state_dict(whole)
        assert torch.equal(close_whole(engine)["down.weight"], whole["down.weight"]), "in full precision"


def test_state_dicts_of_the_whole_model_and_of_parts():
    run_ranks(loads, 2)


def unequal_inputs(rank: int, world_size: int) -> list[str]:
    x, by = here((torch.ones(3, FEATURES), torch.ones(12)))
    found = []
    for mode in (True, False):
        for args, kwargs in (((x + rank,), {}), ((x,), {"scale": {"by": by + rank}}), ((x[: 2 + rank],), {})):
            engine = make_engine(CONFIG, model=Net()).train(mode)
            found.append(rejection(lambda e=engine, a=args, k=kwargs: e(*a, **k)))
    engine = make_engine(CONFIG, model=Net())
    engine(x, scale={"by": by})
    found.append(rejection(lambda: engine(x)))  # not compared any more
    found.append(rejection(lambda: engine.eval()(x + rank)))
    return found


def test_ranks_of_a_tensor_group_have_to_see_the_same_batch():
    message = "InputError: the 2 ranks of a tensor group got different inputs, but they compute one batch"
    for found in run_ranks(unequal_inputs, 2):
        assert found.pop(6) == "no error"
        assert len(found) == 7
        assert all(words.startswith(message) for words in found)


def leave_by_error(rank: int, world_size: int) -> list[str]:
    """Rank 0 leaves by an error, alone."""
    calls: list[str] = []
    engine = make_engine(CONFIG, model=Net())
    engine(here(torch.ones(3, FEATURES)))
    if rank == 0:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("all_reduce", "all_gather", ALL_GATHER, "broadcast", "all_gather_object"):
                patch.setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
            with pytest.raises(RuntimeError, match="lost"), engine:
                raise RuntimeError("lost")
    return calls


def test_an_error_on_one_rank_does_not_wait_for_the_others():
    assert run_ranks(leave_by_error, 2, timeout=20) == [[], []]


def copies(rank: int, world_size: int) -> None:
    """A deep copy of a divided model works beside it; a pickle of it is rejected."""
    model, x = Net(), here(make_data(8)[0])
    engine = make_engine(CONFIG, model=model)
    clone = copy.deepcopy(model)
    assert "a sharded model cannot be pickled; save engine" in rejection(lambda: pickle.dumps(model))
    assert torch.equal(clone(x), engine(x))
    clone.up.weight.data.zero_()
    assert (model.up.weight != 0).any()
    clone.load_state_dict(Net().state_dict())
    assert torch.equal(clone.up.weight, model.up.weight)


def test_copies_of_a_divided_model():
    run_ranks(copies, 2)
