"""A model and its optimizer, divided in place and given back."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from tests.support.models import CLASSES, FEATURES, MODES, make_data, make_engine, make_loader, sgd
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, make_shards, refusal

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}


class Net(nn.Module):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor, scale: Any = None) -> torch.Tensor:
        x = self.norm(self.down(nn.functional.gelu(self.up(x))))
        return self.head(x if scale is None else x * scale["by"])


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    x, y = make_data(32)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x[batch : batch + 8]), y[batch : batch + 8]).backward()
    optimizer.step()


def make_optimizer(model: Net, kind: str = "adam") -> torch.optim.Optimizer:
    groups = [
        {"params": [*model.up.parameters(), *model.norm.parameters()], "lr": 0.01},
        {"params": [*model.down.parameters(), *model.head.parameters()], "lr": 0.02},
    ]
    return torch.optim.Adam(groups) if kind == "adam" else torch.optim.SGD(groups, momentum=0.9)


def optimizer_state(rank: int, world_size: int, kind: str) -> dict[str, Any]:
    """State of three steps is cut, used for two steps, and joined; beside it an optimizer that is left alone."""
    model, whole = Net(), Net()
    optimizer, expected = make_optimizer(model, kind), make_optimizer(whole, kind)
    for batch in range(3):
        step(model, optimizer, batch)
        step(whole, expected, batch)
    params, groups = list(model.parameters()), optimizer.param_groups
    counters = {p: s["step"] for p, s in optimizer.state.items() if "step" in s}
    lists = [group["params"] for group in groups]
    before = {p: dict(s) for p, s in optimizer.state.items()}
    tensor = divide(model, PLAN, optimizer=optimizer)
    found = {
        "same parameters": all(a is b for a, b in zip(params, model.parameters(), strict=True)),
        "same groups": optimizer.param_groups is groups
        and all(g["params"] is i for g, i in zip(groups, lists, strict=True)),
        "same keys": optimizer.state.keys() == before.keys(),
        "no gradient": all(p.grad is None for p in tensor.splits),
        "whole untouched": all(
            optimizer.state[p][n] is v for p in params if p not in tensor.splits for n, v in before[p].items()
        ),
        "counters untouched": all(optimizer.state[p]["step"] is c for p, c in counters.items()),
        "cut": all(
            torch.equal(optimizer.state[p][n], split.cut(value, rank, world_size))
            for p, split in tensor.splits.items()
            for n, value in before[p].items()
            if n != "step"
        ),
    }
    for batch in range(3, 5):
        step(model, optimizer, batch)
        step(whole, expected, batch)
    parts = {p: p.detach().clone() for p in tensor.splits}
    state = {p: dict(optimizer.state[p]) for p in tensor.splits}
    tensor.close()
    found["joined bitwise"] = all(
        torch.equal(split.cut(p.detach(), rank, world_size), parts[p]) for p, split in tensor.splits.items()
    )
    found["state joined bitwise"] = all(
        torch.equal(split.cut(optimizer.state[p][n], rank, world_size), value)
        for p, split in tensor.splits.items()
        for n, value in state[p].items()
        if n != "step"
    )
    found["still the same"] = all(a is b for a, b in zip(params, model.parameters(), strict=True))
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for name, value in expected.state[b].items():
            torch.testing.assert_close(optimizer.state[a][name], value, rtol=1e-5, atol=1e-6)
    for batch in range(5, 7):  # and on in one process
        step(model, optimizer, batch)
        step(whole, expected, batch)
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    return found


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_an_optimizer_with_state(kind):
    for found in run_ranks(optimizer_state, 2, kind):
        assert all(found.values()), found


def loads(rank: int, world_size: int) -> dict[str, Any]:
    """Whole and local state dicts into an engine of each mode."""
    found = {}
    for mode in ("none", "torch_fp16", "torch_bf16", "naive_fp16", "naive_bf16"):
        engine = make_engine({**MODES[mode], "parallel": {"tensor": {"size": 2, "plan": PLAN}}}, model=Net())
        whole = Net(seed=3).state_dict()
        kept = {name: value.clone() for name, value in whole.items()}
        engine.model.load_state_dict(whole)
        found[mode, "not changed"] = all(torch.equal(whole[name], value) for name, value in kept.items())
        local = {name: value.clone() for name, value in engine.model.state_dict().items()}
        names = dict(engine.model.named_parameters())
        splits = {name: engine._division.tensor.splits.get(names[name]) for name in local}
        found[mode, "local"] = all(
            torch.equal(local[n], whole[n] if split is None else split.cut(whole[n], rank, 2))
            for n, split in splits.items()
        )
        engine.model.load_state_dict(Net(seed=4).state_dict())
        engine.model.load_state_dict(local)
        again = engine.model.state_dict()
        found[mode, "again"] = all(torch.equal(again[name], value) for name, value in local.items())
        found[mode, "assign"] = refusal(lambda e=engine, s=whole: e.model.load_state_dict(s, assign=True))
        wrong = {**whole, "up.weight": torch.zeros(5, FEATURES)}
        found[mode, "wrong"] = refusal(lambda e=engine, s=wrong: e.model.load_state_dict(s))
        engine.model.down.load_state_dict({"weight": whole["down.weight"], "bias": whole["down.bias"]})  # one layer
        engine.close()
        found[mode, "closed"] = torch.equal(engine.model.down.weight, whole["down.weight"])
    model = Net().requires_grad_(False)
    model.norm.requires_grad_(True)
    divide(model, PLAN)
    found["frozen", "assign"] = refusal(lambda: model.load_state_dict(Net().state_dict(), assign=True))
    return found


def test_state_dicts_of_the_whole_model_and_of_parts():
    for found in run_ranks(loads, 2):
        for (mode, what), value in found.items():
            if what == "assign":
                assert value.startswith("InputError: load_state_dict(..., assign=True) would replace"), mode
            elif what == "wrong":
                assert "size mismatch for up.weight" in value, mode
            else:
                assert value, (mode, what)


def unequal_inputs(rank: int, world_size: int) -> list[str]:
    engine = make_engine({"parallel": {"tensor": {"size": 2, "plan": PLAN}}}, model=Net())
    x = torch.ones(3, FEATURES)
    other = x + rank
    same = {"by": torch.ones(12)}
    found = []
    for mode in (True, False):
        for args, kwargs in (((other,), {}), ((x,), {"scale": {"by": torch.ones(12) + rank}}), ((x[: 2 + rank],), {})):
            fresh = make_engine({"parallel": {"tensor": {"size": 2, "plan": PLAN}}}, model=Net()).train(mode)
            found.append(refusal(lambda f=fresh, a=args, k=kwargs: f(*a, **k)))
    engine(x, scale=same)
    calls, plain = [], dist.all_gather_object
    dist.all_gather_object = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    found.append(refusal(lambda: engine(x)))  # equal ones
    found.append(str(len(calls)))
    found.append(refusal(lambda: engine.eval()(other)))
    engine(x)
    found.append(str(len(calls)))
    sparse = make_engine({"parallel": {"tensor": {"size": 2, "plan": PLAN}}}, model=Net())
    found.append(refusal(lambda: sparse(x, scale={"by": torch.ones(12), "not compared": torch.eye(2).to_sparse()})))
    return found


def test_ranks_of_a_tensor_group_have_to_see_the_same_batch():
    message = (
        "InputError: the 2 ranks of a tensor group were given different inputs, but they compute one batch together; "
        "iterate engine.dataloader, or shard a loader of your own by engine.context.dp_rank of engine.context.dp_size"
    )
    for found in run_ranks(unequal_inputs, 2):
        assert found[:6] == [message] * 6
        assert found[6:] == ["no error", "0", message, "2", "no error"]  # 2: inputs that differ, and outputs


def leave_by_error(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 0 leaves by an error, alone."""
    model, calls = Net(), []
    engine = make_engine({"parallel": {"tensor": {"size": 2, "plan": PLAN}}}, model=model)
    engine(torch.ones(3, FEATURES))
    if rank == 1:
        return {}
    for name in ("all_reduce", "all_gather", "all_gather_into_tensor", "broadcast", "all_gather_object"):
        setattr(dist, name, lambda *_, name=name, **__: calls.append(name))
    try:
        with engine:
            raise RuntimeError("lost")
    except RuntimeError as error:
        return {"error": str(error), "calls": calls, "kind": type(model.up).__name__}


def test_an_error_in_flight_is_not_held_up_by_other_ranks():
    first, _ = run_ranks(leave_by_error, 2, timeout=20)
    assert first == {"error": "lost", "calls": [], "kind": "ColwiseLinear"}


def weights(rank: int, world_size: int) -> dict[str, Any]:
    model = Net()
    tensor = divide(model, PLAN)
    return {
        "divided": {shard.name: shard.weight for shard in make_shards(model, tensor, 8)},
    }


def test_each_number_counts_once():
    for found in run_ranks(weights, 2):
        whole = ("down.bias", "norm.weight", "norm.bias")
        assert found["divided"] == {name: 1 / 8 if name in whole else 1 / 4 for name in Net().state_dict()}


def oracle(rank: int, world_size: int) -> dict[str, Any]:
    """torch's own parallelize_module beside an engine: losses and weights of 5 steps of SGD."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES))
    ours = copy.deepcopy(theirs)
    parallelize_module(theirs, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    optimizer = sgd(theirs.parameters())
    loader = make_loader(40)
    config = {"parallel": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}}
    engine = halfmesh.initialize(ours, sgd, nn.functional.cross_entropy, loader, config, device="cpu")
    losses = []
    for x, y in loader:
        loss = nn.functional.cross_entropy(theirs(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = engine.criterion(engine(x), y)
        engine.backward(mine)
        engine.step()
        losses.append((mine.item(), loss.item()))
    engine.close()
    return {
        "losses": losses,
        "weights": [
            (a.detach(), b.full_tensor().detach()) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
        ],
    }


def test_torchs_own_tensor_parallelism_agrees():
    for found in run_ranks(oracle, 2):
        assert len(found["losses"]) == 5
        for mine, theirs in found["losses"]:
            assert mine == pytest.approx(theirs, abs=1e-6)
        for mine, theirs in found["weights"]:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
