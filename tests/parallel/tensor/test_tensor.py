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
from tests.support.models import CLASSES, FEATURES, MODES, make_data, make_engine, make_loader, sgd
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.tensor_parity import refusal
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


def optimizer_state(rank: int, world_size: int) -> dict[str, bool]:
    """Three updates in one process, two divided, two in one process again, with the full state dict; beside it an
    optimizer left alone."""
    found = {}
    for make in (torch.optim.Adam, lambda params: torch.optim.SGD(params, momentum=0.9)):
        model, whole = Net(), Net()
        optimizer, expected = make(groups(model)), make(groups(whole))
        for batch in range(3):
            step(model, optimizer, batch)
            step(whole, expected, batch)
        params = list(model.parameters())
        before = copy.deepcopy([optimizer.state[p] for p in params])
        engine = make_engine(CONFIG, model=model, optimizer=optimizer)
        kind = type(optimizer).__name__
        found[kind, "the same objects"] = all(a is b for a, b in zip(params, model.parameters(), strict=True))
        found[kind, "state is cut"] = all(
            torch.equal(optimizer.state[p][key].cpu(), part(name, value, rank) if value.dim() else value)
            for (name, p), state in zip(model.named_parameters(), before, strict=True)
            for key, value in state.items()
        )
        x, y = here(make_data(32))
        for batch in range(3, 5):
            rows = slice(batch, batch + 8)
            engine.backward(engine.criterion(engine(x[rows]), y[rows]))
            engine.step()
            step(whole, expected, batch)
        full = engine.full_state_dict(optimizer=True, rank0_only=False)
        engine.close()
        model = Net()
        optimizer = make(groups(model))
        load_full(full, model, optimizer)
        for batch in range(5, 7):
            step(model, optimizer, batch)
            step(whole, expected, batch)
        for a, b in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            for name, value in expected.state[b].items():
                torch.testing.assert_close(optimizer.state[a][name], value, rtol=1e-5, atol=1e-6)
    return found


def test_an_optimizer_with_state_is_divided_and_its_full_state_loads():
    for found in run_ranks(optimizer_state, 2):
        assert len(found) == 4
        assert all(found.values()), found


def loads(rank: int, world_size: int) -> dict[Any, Any]:
    """Whole and local state dicts into an engine of each mode."""
    found: dict[Any, Any] = {}
    for mode in ("none", "torch_fp16", "naive_fp16", "naive_bf16"):
        engine = make_engine({**MODES[mode], **CONFIG}, model=Net())
        whole = Net(seed=3).state_dict()
        kept = {name: value.clone() for name, value in whole.items()}
        engine.model.load_state_dict(whole)
        found[mode, "not changed"] = all(torch.equal(whole[name], value) for name, value in kept.items())
        local = {name: value.clone() for name, value in engine.model.state_dict().items()}
        parts = {name: part(name, value, rank).to(local[name]) for name, value in whole.items()}
        found[mode, "local"] = all(torch.equal(local[name], value) for name, value in parts.items())
        engine.model.load_state_dict(Net(seed=4).state_dict())
        engine.model.load_state_dict(local)
        again = engine.model.state_dict()
        found[mode, "again"] = all(torch.equal(again[name], value) for name, value in local.items())
        found[mode, "assign"] = refusal(lambda e=engine: e.model.load_state_dict(Net().state_dict(), assign=True))
        engine.model.load_state_dict(whole)
        found[mode, "full"] = torch.equal(close_whole(engine)["down.weight"], whole["down.weight"])  # in full precision
    return found


def test_state_dicts_of_the_whole_model_and_of_parts():
    for found in run_ranks(loads, 2):
        for (mode, what), value in found.items():
            if what == "assign":
                assert value.startswith("InputError: load_state_dict(..., assign=True) would replace"), mode
            else:
                assert value, (mode, what)


def unequal_inputs(rank: int, world_size: int) -> list[str]:
    x, by = here((torch.ones(3, FEATURES), torch.ones(12)))
    found = []
    for mode in (True, False):
        for args, kwargs in (((x + rank,), {}), ((x,), {"scale": {"by": by + rank}}), ((x[: 2 + rank],), {})):
            engine = make_engine(CONFIG, model=Net()).train(mode)
            found.append(refusal(lambda e=engine, a=args, k=kwargs: e(*a, **k)))
    engine = make_engine(CONFIG, model=Net())
    engine(x, scale={"by": by})
    found.append(refusal(lambda: engine(x)))  # not compared any more
    found.append(refusal(lambda: engine.eval()(x + rank)))
    return found


def test_ranks_of_a_tensor_group_have_to_see_the_same_batch():
    message = "InputError: the 2 ranks of a tensor group were given different inputs, but they compute one batch"
    for found in run_ranks(unequal_inputs, 2):
        assert found.pop(6) == "no error"
        assert len(found) == 7
        assert all(words.startswith(message) for words in found)


def leave_by_error(rank: int, world_size: int) -> Any:
    """Rank 0 leaves by an error, alone."""
    calls = []
    engine = make_engine(CONFIG, model=Net())
    engine(here(torch.ones(3, FEATURES)))
    if rank == 1:
        return None
    for name in ("all_reduce", "all_gather", ALL_GATHER, "broadcast", "all_gather_object"):
        setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    with pytest.raises(RuntimeError, match="lost"), engine:
        raise RuntimeError("lost")
    return calls


def test_an_error_on_one_rank_does_not_wait_for_the_others():
    assert run_ranks(leave_by_error, 2, timeout=20, fresh=True) == [[], None]


def copies(rank: int, world_size: int) -> dict[str, Any]:
    """A deep copy of a divided model works beside it; a pickle of it is refused."""
    model, x = Net(), here(make_data(8)[0])
    engine = make_engine(CONFIG, model=model)
    clone = copy.deepcopy(model)
    found: dict[str, Any] = {"pickle": refusal(lambda: pickle.dumps(model)), "same": torch.equal(clone(x), engine(x))}
    clone.up.weight.data.zero_()
    found["apart"] = bool((model.up.weight != 0).any())
    clone.load_state_dict(Net().state_dict())
    found["loads"] = torch.equal(clone.up.weight, model.up.weight)
    return found


def test_copies_of_a_divided_model():
    for found in run_ranks(copies, 2):
        assert "a sharded model cannot be pickled; save engine" in found.pop("pickle")
        assert all(found.values()), found


def oracle(rank: int, world_size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """torch's own parallelize_module beside an engine: losses, and weights after 5 steps of SGD."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES))
    ours = copy.deepcopy(theirs)
    mesh = init_device_mesh(rank_device().type, (2,))
    parallelize_module(here(theirs), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer, loader = sgd(theirs.parameters()), make_loader(40)
    plan = {"0": "colwise", "2": "rowwise"}
    engine = make_engine({"parallel": {"tensor": {"size": 2, "plan": plan}}}, model=ours, loader=loader)
    pairs = []
    for x, y in map(here, loader):
        loss = nn.functional.cross_entropy(theirs(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = engine.criterion(engine(x), y)
        engine.backward(mine)
        engine.step()
        pairs.append((mine.detach(), loss.detach()))
    weights = here(close_whole(engine))
    return pairs + [(weights[name], param.full_tensor().detach()) for name, param in theirs.named_parameters()]


def test_torchs_own_tensor_parallelism_agrees():
    for pairs in run_ranks(oracle, 2):
        assert len(pairs) == 5 + 4
        for mine, theirs in pairs:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
