"""Collectives that end as late as they may, as NCCL's do: results come with `wait`, and no buffer is touched before."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.parallel.tensor.colwise import SharedInput
from halfmesh.utils.torch_private import ALL_GATHER, REDUCE_SCATTER
from tests.support.models import MODES, adamw

LAYOUTS = {
    "replicate": {"strategy": "replicate"},
    "half_sums": {"strategy": "replicate", "reduce_dtype": "bfloat16"},
    "zero1": {"strategy": "zero1"},
    "few_in_flight": {"strategy": "zero1", "max_inflight": 1},
}
X, Y = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(8)


class Late:
    """A collective in flight: what it writes is nan until `wait`, and what it reads may not change until then.

    Attributes:
        sizes: the bytes of those in flight that scatter or gather.
    """

    sizes: ClassVar[list[int]] = []

    def __init__(self, target: torch.Tensor, source: torch.Tensor, result: torch.Tensor) -> None:
        self._target, self._result = target, result
        self._is_over = False
        self._target.fill_(torch.nan)
        self._tensors = target, source
        self._versions = [tensor._version for tensor in self._tensors]
        self._size = max(tensor.nbytes for tensor in self._tensors) if target is not source else 0
        if self._size:
            Late.sizes.append(self._size)

    def wait(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        if self._size:
            Late.sizes.remove(self._size)
        assert [tensor._version for tensor in self._tensors] == self._versions, "a buffer was written before `wait`"
        self._target.copy_(self._result)


@pytest.fixture
def two_ranks(monkeypatch):
    """This process is rank 0 of two, of which the other has the same numbers. `late.append(True)` makes what follows
    late."""
    dist.init_process_group("fake", rank=0, world_size=2)
    late: list[bool] = []

    def begin(target: torch.Tensor, source: torch.Tensor, result: torch.Tensor, async_op: bool) -> Any:
        work = Late(target, source, result)
        if not (late and async_op):
            work.wait()
        return work

    def all_reduce(tensor, op=None, group=None, async_op=False):
        return begin(tensor, tensor, 2 * tensor, async_op)

    def reduce_scatter(output, source, op=None, group=None, async_op=False):
        return begin(output, source, 2 * source[: len(output)], async_op)

    def all_gather(output, source, group=None, async_op=False):
        return begin(output, source, source.repeat(2), async_op)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, REDUCE_SCATTER, reduce_scatter)
    monkeypatch.setattr(dist, ALL_GATHER, all_gather)
    yield late
    dist.destroy_process_group()


def train(data, config, steps=3):
    torch.manual_seed(0)
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    config = config | {"clip_grad_norm": 0.5, "parallel": {"data": {"bucket_mb": 0.0005, **data}}}
    model = nn.Sequential(*layers)
    engine = halfmesh.initialize(model, adamw, nn.CrossEntropyLoss(), config=config, device="cpu")
    for _ in range(steps):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(X), Y))
        engine.step()
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_read_or_written_before_its_time(layout, mode, two_ranks):
    expected = train(LAYOUTS[layout], MODES[mode])
    two_ranks.append(True)
    found = train(LAYOUTS[layout], MODES[mode])
    assert all(value.isfinite().all() for value in found.values())
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_a_gradient_that_others_hold_is_not_summed_in_place(two_ranks):
    """autograd gives both terms of a sum the same tensor as gradient; a clone is what that costs."""
    whole, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    held = other * 1  # before: its backward runs after that of the copy
    (SharedInput(whole * 1, dist.group.WORLD).whole + held).mul(1).sum().backward()
    assert (whole.grad.tolist(), other.grad.tolist()) == ([2.0] * 3, [1.0] * 3)
