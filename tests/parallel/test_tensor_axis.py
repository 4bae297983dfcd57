"""Inputs that several divided layers share, and what copies of a divided model share."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, join_grads, make_axis, parity, random, refusal

pytestmark = pytest.mark.distributed


class Projections(nn.Module):
    """Three layers on one input."""

    def __init__(self, checkpoints: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = nn.Linear(4, 4)
        self.q, self.k, self.v = (nn.Linear(4, 8) for _ in range(3))
        self.out = nn.Linear(8, 4)
        self.checkpoints = checkpoints
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.before(x)
        return self.out(self._run(self.q, x) * self._run(self.k, x).sigmoid() + self._run(self.v, x))

    def _run(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not self.checkpoints:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.checkpoints == "reentrant")


PLAN = {"[qkv]": "colwise", "out": "rowwise"}


class Edited(nn.Module):
    """Changes its input in place between two layers that use it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8, bias=False), nn.Linear(4, 8, bias=False)
        self.first.weight.requires_grad_(False)  # else torch refuses: its input is needed for the weight's gradient
        self.out = nn.Linear(8, 4)
        self.leaf = nn.Linear(4, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        x.mul_(2.0).add_(1.0)
        return self.out(y + self.second(x))


EDITED_PLAN = {"first": "colwise", "second": "colwise", "out": "rowwise"}


def sums(call: Callable[[], None]) -> int:
    """How many all-reduces `call` starts."""
    count, plain = 0, dist.all_reduce

    def counted(*args, **kwargs):
        nonlocal count
        count += 1
        return plain(*args, **kwargs)

    dist.all_reduce = counted
    try:
        call()
    finally:
        dist.all_reduce = plain
    return count


def shared_inputs(rank: int, world_size: int) -> dict:
    x = random(3, 4)
    found = {"parity": {}}
    for kind in ("", "reentrant", "not reentrant"):
        model = Projections(checkpoints=kind)
        found["parity"][kind] = parity(model, lambda m: m(x), PLAN)
    found["parity"]["edited"] = parity(Edited(), lambda m: m(m.leaf(x)), EDITED_PLAN)

    model = Projections()
    tensor = divide(model, PLAN)
    outputs = []
    found["forward"] = sums(lambda: outputs.append(model(x)))
    found["nothing kept"] = tensor.axis._copied is None
    found["backward"] = sums(outputs[0].sum().backward)
    once = join_grads(model, tensor)
    model.zero_grad()
    # Two forwards before one backward: the inputs are two.
    found["two"] = sums((model(x) + model(x)).sum().backward)
    twice = join_grads(model, tensor)
    found["twice"] = max((twice[n] - 2 * once[n]).abs().max().item() for n in once)
    # Without gradients, then with them.
    with torch.no_grad():
        model(x)
    model.zero_grad()
    found["after no_grad"] = sums(model(x).sum().backward)
    again = join_grads(model, tensor)
    found["again"] = max((again[n] - once[n]).abs().max().item() for n in once)
    for param in model.before.parameters():
        param.requires_grad_(False)
    found["frozen below"] = sums(model(x).sum().backward)
    return found


def test_layers_that_share_an_input_share_one_sum():
    for found in run_ranks(shared_inputs, 2):
        assert (found["forward"], found["backward"]) == (1, 1)
        assert found["nothing kept"]
        assert found["two"] == 2
        assert found["after no_grad"] == 1
        assert found["frozen below"] == 0
        assert max(found["twice"], found["again"]) < 1e-14
        for cell in found["parity"].values():
            assert max(cell.output, cell.grads) < 1e-14
            assert cell.missing == []


def served(rank: int, world_size: int) -> list[bool]:
    """Which calls of `copy_in` are given what an earlier one was."""
    axis = make_axis()
    x = torch.ones(2, requires_grad=True) * 1
    first = axis.copy_in(x)
    found = [axis.copy_in(x) is first]
    with torch.no_grad():
        found.append(axis.copy_in(x) is x)
    found.append(axis.copy_in(x) is first)
    with torch.autocast("cpu", torch.bfloat16):
        found.append(axis.copy_in(x) is first)
    found.append(axis.copy_in(x * 1) is not first)
    second = axis.copy_in(x)
    found.append(second is not first)
    x.add_(1.0)
    third = axis.copy_in(x)
    found += [third is not second, torch.equal(third, x)]
    found.append(axis.copy_in(torch.ones(2)).grad_fn is None)
    axis.settle()
    found.append(axis._copied is None)
    return found


def test_what_is_served_again():
    assert run_ranks(served, 2) == [[True] * 10] * 2


def copies(rank: int, world_size: int) -> dict:
    """A deep copy of a divided model works beside it; pickling is refused."""
    model = Projections()
    tensor = divide(model, PLAN)
    x = random(3, 4)
    clone = copy.deepcopy(model)
    same = torch.equal(clone(x), model(x))
    clone.q.weight.data.zero_()
    found = {
        "same": same,
        "apart": bool((model.q.weight != 0).any()),
        "axis": clone.q.axis is model.q.axis is tensor.axis,
        "loads": None,
        "pickle": refusal(lambda: pickle.dumps(model)),
    }
    clone.load_state_dict(Projections().state_dict())  # a whole state dict
    found["loads"] = torch.equal(clone.q.weight, model.q.weight)
    tensor.close()
    with torch.no_grad():
        found["afterwards"] = torch.equal(clone.state_dict()["q.weight"], model.q.weight.chunk(2)[rank])
        found["still works"] = torch.allclose(clone(x), model(x))
    pickle.dumps(model)
    return found


def test_copies_of_a_divided_model():
    for found in run_ranks(copies, 2):
        message = found.pop("pickle")
        assert all(found.values()), found
        assert message == (
            "InputError: a model that is divided over a tensor group cannot be pickled; save engine.state_dict(), or "
            "call engine.close() first, which gives the whole model back"
        )
