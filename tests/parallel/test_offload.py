"""What waits on the host, and what stays where it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from halfmesh.parallel import offload
from halfmesh.parallel.offload import SMALLEST, Offload

CPU = torch.device("cpu")
WIDTH = 32


@pytest.fixture
def moved(monkeypatch):
    """What was moved."""
    found: list[torch.Tensor] = []

    class Watched(offload._OnHost):
        def __init__(self, host: torch.Tensor, *more: Any) -> None:
            super().__init__(host, *more)
            found.append(host)

    monkeypatch.setattr(offload, "_OnHost", Watched)
    return found


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.down.weight.requires_grad_(False)
        self.register_buffer("table", torch.randn(16, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x * self.table).exp().sin()) * x.mean()


def grads_of(model: nn.Module, scope: Any) -> dict[str, torch.Tensor]:
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with scope:
        loss = model(x).float().square().sum()
    loss.backward()
    return {"x": x.grad} | {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_activations_are_moved_and_weights_are_not(dtype, moved):
    expected_model, model = Model(), Model()
    with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
        expected = grads_of(expected_model, torch.enable_grad())
        assert not moved
        found = grads_of(model, Offload(CPU).everything(model))
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name
    assert {tuple(tensor.shape) for tensor in moved} == {(16, WIDTH), (16, 64)} | ({(64, WIDTH)} if dtype else set())
    if dtype:  # a cast of a frozen weight, which autograd does not know; and none of the other one
        casts = [tensor for tensor in moved if tuple(tensor.shape) == (64, WIDTH)]
        assert len(casts) == 1
        assert torch.equal(casts[0].t().float(), model.down.weight.bfloat16().float())
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    assert not any(tensor.untyped_storage().data_ptr() in own for tensor in moved), "they are copies"
    assert not any(torch.equal(tensor, model.table) for tensor in moved if tensor.shape == model.table.shape)


def test_small_tensors_stay(moved):
    size = SMALLEST // 4
    for length, count in ((size - 1, 0), (size, 1)):
        with Offload(CPU).inputs():
            torch.ones(length, requires_grad=True).exp()
        assert len(moved) == count


def test_what_stays_does_not_keep_itself_alive():
    x = torch.ones(2, requires_grad=True)
    with Offload(CPU).inputs():
        result = x.exp()  # which saves what it returns
    memory = StorageWeakRef(result.untyped_storage())
    del result
    assert memory.expired()


def test_tensors_of_another_device_stay(moved):
    """On a GPU, those that are on the host already."""
    with Offload(torch.device("meta")).inputs():
        torch.ones(10000, requires_grad=True).exp()
    assert not moved


def test_a_change_in_place_after_the_forward():
    """What was copied does not feel it; what was not is found out, as torch does without hooks."""
    large = torch.ones(1000, requires_grad=True)
    with Offload(CPU).inputs():
        result = large.exp()
        y = result * 2
    with torch.no_grad():
        result.zero_()
    y.sum().backward()
    assert torch.equal(large.grad, torch.full((1000,), 2.0).exp() * 0 + 2 * torch.e)
    small = torch.ones(2, requires_grad=True)
    with Offload(CPU).inputs():
        result = small.exp()
    with torch.no_grad():
        result.zero_()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: a tensor of shape \(2,\)"):
        result.sum().backward()


def test_strides_stay():
    x = torch.randn(40, 30, requires_grad=True)
    seen = []

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            seen.append(x.stride())
            return 2 * grad * x

    with Offload(CPU).inputs():
        y = Square.apply(x.t())
    y.sum().backward()
    assert seen == [(1, 30)]
    assert torch.equal(x.grad, 2 * x)


def test_copies_of_the_model_do_not_matter(moved):
    model = Model()
    other = copy.deepcopy(model)
    grads_of(other, Offload(CPU).everything(model))
    assert any(tensor.shape == model.table.shape and torch.equal(tensor, model.table) for tensor in moved)
