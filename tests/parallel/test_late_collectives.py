"""Collectives that end as late as they may, as NCCL's do: results come with `wait`, and no buffer is touched before.
zero1 gathers new weights beside the next forward: what uses a weight first waits for it, and for no other."""

from __future__ import annotations

import copy
import io
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from halfmesh.parallel.tensor.colwise import SharedInput
from halfmesh.utils.torch_private import ALL_GATHER, REDUCE_SCATTER
from tests.support.models import MODES, adamw

LAYOUTS = {
    "replicate": {"strategy": "replicate"},
    "half_sums": {"strategy": "replicate", "reduce_dtype": "bfloat16"},
    "zero1": {"strategy": "zero1"},
    "few_in_flight": {"strategy": "zero1", "max_inflight": 1},
}
NOW = {"strategy": "zero1", "bucket_mb": 0.0003}
"""A bucket for each layer."""
LATE = NOW | {"overlap_param_gather": True}
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

    for name, collective in ("all_reduce", all_reduce), (REDUCE_SCATTER, reduce_scatter), (ALL_GATHER, all_gather):
        monkeypatch.setattr(dist, name, collective)
    yield late
    dist.destroy_process_group()
    Late.sizes.clear()


def build(data, make=lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]), **config):
    torch.manual_seed(0)
    config = {"clip_grad_norm": 0.5, "parallel": {"data": data}} | config
    return halfmesh.initialize(make(), adamw, nn.CrossEntropyLoss(), config=config, device="cpu")


def step(engine):
    engine.zero_grad()
    engine.backward(engine.criterion(engine(X), Y))
    engine.step()


def with_norms():
    layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())]
    return nn.Sequential(*layers)


def train(data, config):
    engine = build({"bucket_mb": 0.0005, **data}, with_norms, **config)
    for _ in range(3):
        step(engine)
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


@pytest.fixture
def late(two_ranks):
    two_ranks.append(True)


class Told(nn.Linear):
    """Tells, in forward, how many gathers are still in flight."""

    def forward(self, x):
        self.left = len(Late.sizes)
        return super().forward(x)


def test_a_module_waits_for_its_weights_only(late):
    engine = build(LATE, lambda: nn.Sequential(*[Told(8, 8) for _ in range(4)]), **MODES["naive_bf16"])
    step(engine)
    assert len(Late.sizes) == 4, "the update has waited for none"
    engine.zero_grad()
    assert len(Late.sizes) == 4
    output = engine(X)
    assert [layer.left for layer in engine.model] == [3, 2, 1, 0]
    engine.backward(engine.criterion(output, Y))
    engine.step()
    engine.train()
    assert not Late.sizes, "all"


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    assert b"_rebuild_parameter_with_state" not in file.getvalue(), "they are saved as ordinary ones are"
    file.seek(0)
    return torch.load(file, weights_only=False)


def hooked(model, kept):
    found = []
    handle = model[0].register_forward_pre_hook(lambda *_: found.append(kept[-1].sum()), prepend=True)
    model(X)
    handle.remove()
    return found[0]


READS = {
    "a norm": lambda model, kept: sum(param.norm() for param in kept),
    "a copy of the model": lambda model, kept: copy.deepcopy(model)(X),
    "a file": lambda model, kept: saved(model)(X),
    "a call of a module": lambda model, kept: model[2](X),
    "a hook": hooked,
}


@pytest.mark.parametrize("name", READS)
def test_all_that_reads_weights_reads_new_ones(name, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        kept = list(engine.model.parameters())
        step(engine)
        step(engine)
        assert len(Late.sizes) == 4 * (data is LATE)
        found.append(READS[name](engine.model, kept).detach().clone())
        engine.train()
        assert {type(param) for param in kept} == {nn.Parameter}
    assert torch.equal(*found)


@pytest.mark.parametrize("call", ["train", "state_dict", "full_state_dict", "averaged_model"])
def test_calls_of_the_engine_wait_for_all(call, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        memory = [param.data for param in engine.model.parameters()]  # of which torch does not tell
        step(engine)
        getattr(engine, call)(*[0.5] * (call == "averaged_model"))
        assert not Late.sizes
        found.append(torch.stack([value.sum() for value in memory]))
    assert torch.equal(*found)


def fill(engine):
    with torch.no_grad():
        engine.model[1].weight.fill_(0.5)


WRITES = {
    "a parameter": fill,
    "its data": lambda engine: setattr(engine.model[0].weight, "data", torch.full((8, 8), 0.5)),
    "a state": lambda engine: engine.load_state_dict(copy.deepcopy(engine.state_dict())),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_is_not_overwritten_by_weights_that_come_late(name, late):
    found = []
    for data in (NOW, LATE):
        engine = build(data)
        step(engine)
        WRITES[name](engine)
        step(engine)
        step(engine)
        found.append(torch.cat([param.detach().flatten() for param in engine.train().model.parameters()]))
    assert torch.equal(*found)


class Unseen(nn.Module):
    """Computes with the weight of a module that it does not call, as a CUDA graph or C++ extension might."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch._C.DisableTorchFunctionSubclass():
            return F.linear(self.layer(x), self.other.weight)


def test_a_gradient_of_weights_that_nothing_has_waited_for_is_rejected(late):
    engine = build(LATE, Unseen)
    step(engine)
    assert engine.model(X).isnan().any(), "what comes is nan until then"
    with pytest.raises(InputError, match=r"'other.weight' has a gradient, but nothing waited for its new weights"):
        step(engine)
    engine.zero_grad()
    engine.train()
    step(engine.train())
