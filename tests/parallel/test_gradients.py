"""Gradients over a tensor group: summed where they are partial, compared where they have to be equal."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from halfmesh.parallel.gradients import CompleteGradients, TensorGradients
from tests.support.models import CLASSES, FEATURES, MODES, TOLERANCES, difference, make_data, make_engine, reference
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, make_shards, random, refusal

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
    x, y = make_data(8 * steps)
    size, place = engine.context.dp_size, engine.context.dp_rank
    for a, b in zip(x.split(8), y.split(8), strict=True):
        engine.backward(engine.criterion(engine(a.chunk(size)[place]), b.chunk(size)[place]))
        engine.step()


def partial(rank: int, world_size: int) -> dict[str, Any]:
    """Trained with a partial parameter, in each mode, with and without data ranks."""
    found = {}
    for mode in ("none", "naive_fp16") if world_size == 4 else ("none", "torch_fp16", "naive_fp16", "naive_bf16"):
        for accumulation in (1, 2):
            engine = make_engine(config(COMPLETE, **MODES[mode], gradient_accumulation=accumulation), model=Net())
            train(engine)
            engine.close()
            found[mode, accumulation] = engine.model.state_dict()
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_partial_gradients_are_summed(size):
    x, y = make_data(32)
    expected = {n: reference(list(zip(x.split(8 * n), y.split(8 * n), strict=True)), model=Net()) for n in (1, 2)}
    for found in run_ranks(partial, size):
        for (mode, accumulation), weights in found.items():
            assert difference(weights, expected[accumulation]) < TOLERANCES[mode], (mode, accumulation)
        assert all(torch.equal(found[cell]["act.weight"], run["act.weight"]) for cell, run in found.items())


def wrong_plan(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for mode in ("none", "naive_fp16"):
        engine = make_engine(config(PLAN, **MODES[mode]), model=Net())
        before = engine.model.act.weight.detach().clone()
        found[mode] = refusal(lambda e=engine: train(e, 1)), torch.equal(engine.model.act.weight, before)
    # At first its gradient is zero, because the next layer starts at zero.
    engine = make_engine(config(PLAN), model=Net(zero=True))
    train(engine, 1)
    found["zero at first"] = refusal(lambda: train(engine, 1))
    # Frozen at first.
    model = Net()
    model.act.weight.requires_grad_(False)
    engine = make_engine(config(PLAN), model=model)
    train(engine, 2)
    model.act.weight.requires_grad_(True)
    found["frozen at first"] = refusal(lambda: train(engine, 1))
    # Given to the optimizer later.
    model = Net()
    some = [p for n, p in model.named_parameters() if n != "act.weight"]
    engine = make_engine(config(PLAN), model=model, optimizer=torch.optim.SGD(some, lr=0.1))
    train(engine, 2)
    engine.optimizer.add_param_group({"params": [model.act.weight]})
    found["added later"] = refusal(lambda: train(engine, 1))
    return found


def test_a_plan_that_forgets_a_parameter_is_refused_with_its_first_gradient():
    message = (
        "InputError: the gradients of act.weight differ between the ranks of a tensor group, each of which has these "
        "parameters whole: they work on activations that are divided, and the plan does not say so; give their "
        "modules the style 'partial', which sums the gradients, or leave the layers around them whole"
    )
    for found in run_ranks(wrong_plan, 2):
        for mode in ("none", "naive_fp16"):
            assert found.pop(mode) == (message, True)
        assert set(found.values()) == {message}, found


def looks(rank: int, world_size: int) -> dict[str, list[int]]:
    """How many gathers each of 7 updates starts."""
    found = {}
    plain, calls = dist.all_gather, []
    dist.all_gather = lambda *args, **kwargs: calls.append(1) or plain(*args, **kwargs)
    frozen = Net()
    frozen.norm.requires_grad_(False)
    unused = Net()
    unused.extra = nn.Linear(2, 2)
    for name, model in (("plain", Net()), ("zero", Net(zero=True)), ("frozen", frozen), ("unused", unused)):
        engine = make_engine(config(COMPLETE), model=model)
        counts = []
        for _ in range(7):
            calls.clear()
            train(engine, 1)
            counts.append(len(calls))
        found[name] = counts
    # An overflow says nothing.
    engine = make_engine(
        config(COMPLETE, fp16={"mode": "naive", "initial_scale": 2.0**32}, max_consecutive_skips=99), model=Net()
    )
    for _ in range(3):
        train(engine, 1)
    calls.clear()
    train(engine, 1)
    found["overflow"] = [len(calls), engine.skipped_steps]
    return found


def test_how_often_gradients_are_compared():
    for found in run_ranks(looks, 2):
        assert found["plain"] == [1, 0, 0, 0, 0, 0, 0]
        assert found["zero"] == [1, 1, 0, 0, 0, 0, 0], "gradients of zero are looked at again"
        assert found["frozen"] == [1, 0, 0, 0, 0, 0, 0]
        assert found["unused"] == [1, 1, 1, 1, 1, 0, 0], "but not for ever"
        assert found["overflow"] == [1, 4]


def sparse(rank: int, world_size: int) -> bool:
    """A whole embedding with sparse gradients beside divided layers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 6), nn.Linear(6, 2))
    engine = make_engine(
        {"parallel": {"tensor": {"size": 2, "plan": {"1": "colwise", "2": "rowwise"}}}},
        model=model,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    before = model[0].weight.detach().clone()
    engine.backward(engine.criterion(engine(torch.tensor([1, 1, 5])), torch.tensor([0, 1, 1])))
    engine.step()
    changed = (model[0].weight != before).any(1)
    return changed.tolist() == [False, True, False, False, False, True]


def test_sparse_gradients_are_compared_too():
    assert run_ranks(sparse, 2) == [True, True]


def reductions(rank: int, world_size: int) -> dict[str, Any]:
    """The protocol: what takes part, when it is sent, in which dtype."""
    model = Net().to(torch.bfloat16)
    tensor = divide(model, {**COMPLETE, "*n": "sequence", "u*": "sequence"})
    shards = make_shards(model, tensor, 2)
    found: dict[str, Any] = {"partial": sorted(s.name for s in shards if s.param in tensor.partial)}
    reduction = TensorGradients(tensor, shards)
    found["covers"] = reduction.covers(shards), reduction.covers(shards[:3]), reduction.covers([])
    reduction.cover(shards[:3])
    found["covers less"] = reduction.covers(shards), reduction.covers(shards[:3])
    reduction.cover(shards)
    calls, plain = [], dist.all_reduce
    dist.all_reduce = lambda t, *args, **kwargs: calls.append((t.numel(), t.dtype)) or plain(t, *args, **kwargs)
    every = CompleteGradients([reduction])
    x = random(3, FEATURES, dtype=torch.bfloat16)
    every.open(True)
    model(x).sum().backward()
    found["during backward"] = len(calls) - 2  # of the layers
    calls.clear()
    own = model.act.weight.grad.clone()
    every.finish()
    found["sent"] = list(calls)
    main = next(s.main_grad for s in shards if s.name == "act.weight")
    gathered = tensor.axis.gathered(own)
    found["sum"] = torch.equal(main, sum(part.float() for part in gathered)), main.dtype
    found["stale"] = every.stale
    model(x).sum().backward()
    found["stale after"] = every.stale
    every.forget()
    found["stale then"] = every.stale
    every.close()
    return found


def test_one_sum_in_fp32_after_the_backward():
    for found in run_ranks(reductions, 2):
        assert found["partial"] == ["act.weight", "down.bias"], "what is cut has the whole gradient of its part"
        assert found["covers"] == (True, False, False)
        assert found["covers less"] == (False, True)
        assert found["during backward"] == 0
        assert found["sent"] == [(1 + FEATURES + 2, torch.float32)], "with a flag for each parameter"
        assert found["sum"] == (True, torch.float32)
        assert (found["stale"], found["stale after"], found["stale then"]) == (False, True, False)
