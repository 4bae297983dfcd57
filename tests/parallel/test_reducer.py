"""Gradients and buffers of data ranks are averaged: overflows, errors, and what is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from halfmesh.config.load import load_config
from halfmesh.engine.parallelize import reduce_options
from halfmesh.parallel.buckets import can_average
from halfmesh.parallel.reducer import Reducer
from halfmesh.utils.torch_private import REDUCE_SCATTER
from tests.support.models import full_weights, make_engine, said
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed
TINY = {"parallel": {"data": {"bucket_mb": 1e-6}}}  # one bucket for each parameter


def sgd(params: Any) -> torch.optim.Optimizer:
    """One without a gradient stays as it is, one with a gradient of zero decays."""
    return torch.optim.SGD(params, lr=1.0, weight_decay=0.1)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


def half_precision(rank: int, world_size: int) -> dict[str, list[float]]:
    """fp16 gradients of 40000: their fp16 sum is inf."""
    found = {}
    for dtype in ("float32", "float16", "bfloat16"):
        config = {"fp16": {"mode": "naive", "initial_scale": 1.0}, "parallel": {"data": {"reduce_dtype": dtype}}}
        engine = make_engine(config, model=Scaled(), optimizer=sgd)
        engine.backward(engine(here(torch.full((4,), 40000.0))).float().sum())
        engine.step()
        found[dtype] = full_weights(engine)["weight"].tolist()
    return found


def test_half_precision_gradients_do_not_overflow():
    expected = {"float32": [-40000.0] * 4, "float16": [-40000.0] * 4, "bfloat16": [-39936.0] * 4}
    assert run_ranks(half_precision, 2) == [expected] * 2


class Codebook(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("constant", torch.ones(2))
        self.register_buffer("codes", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.codes.add_(x.mean(0))
        return super().forward(x) * self.constant


def buffers(rank: int, world_size: int) -> tuple[list[float], int, str]:
    norm = nn.BatchNorm1d(2)
    engine = make_engine(model=nn.Sequential(norm, Codebook()))
    with redirect_stderr(StringIO()) as told:
        for _ in range(3):
            engine.backward(engine(here(torch.full((4, 2), 10.0 * rank))).sum())
            engine.step()
    return norm.running_mean.tolist(), int(norm.num_batches_tracked), told.getvalue()


def test_batchnorm_statistics_are_averaged_and_other_buffers_that_change_are_named_once():
    first, second = run_ranks(buffers, 2)
    assert first[:2] == second[:2]
    assert first[0] == pytest.approx([5 * (1 - 0.9**3)] * 2)  # towards the mean of 0 and 10
    assert first[2].count("the buffers 1.codes change during training on each data rank, so they may") == 1
    assert ("constant" in first[2], second[2]) == (False, "")


class Heads(nn.Module):
    """Layers, and two heads, of which a batch may use one."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(8, 8) for _ in range(depth)])
        self.heads = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = self.body(x)
        return torch.stack([self.heads[index](x) for index in used]).sum()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """This process is rank 0 of two that send nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
@pytest.mark.parametrize("used", [[(0, 1)], [(0,)], [(0,), (1,)]])
def test_buckets_are_sent_in_backward_also_where_a_batch_does_not_use_all(strategy, used, two_ranks, monkeypatch):
    """A bucket has a layer. The last one can be sent only after the last gradient, with whatever hooks are on it."""
    sent, during = [], []
    send, finish = Reducer._send, Reducer.finish
    monkeypatch.setattr(Reducer, "_send", lambda reducer, bucket: (sent.append(bucket), send(reducer, bucket))[1])
    monkeypatch.setattr(Reducer, "finish", lambda reducer: (during.append(len(sent)), finish(reducer))[1])
    data = {"strategy": strategy, "bucket_mb": 72 * 4 / 2**20}
    engine = make_engine({"parallel": {"data": data}}, model=Heads())
    for heads in (used * 4)[:4]:
        sent.clear()
        engine.backward(engine(torch.randn(2, 8), heads))
        engine.zero_grad()
        assert len(sent) == 22
    engine.close()
    # The first update shows that a head may be left out; where the heads take turns the second shows the other.
    assert during[len(used) :] == [21] * (4 - len(used))
    assert during[0] == (21 if used == [(0, 1)] else 0)


class Hidden(torch.autograd.Function):
    """A layer whose parameters get their gradients from a backward within the backward, as reversible ones do."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return None, x.grad


class LayerDrop(nn.Module):
    """A batch may leave out some layers."""

    def __init__(self, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.first, self.layers = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.call = call

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.first(x)
        for index in used:
            x = self.call(self.layers[index], x)
        return x.sin().mean()


def backward_in_backward(rank: int, world_size: int) -> tuple[bool, str]:
    """If layers that are dropped and used again train as without the last microbatch's early sends, and what is said
    where that is not possible."""
    updates = [[0, 1, 2, 3], [0, 1 + rank], [0, 1, 3], [0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    found = []
    for config in (TINY, {}):  # in one bucket nothing is sent before the end
        for call in (partial(checkpoint, use_reentrant=True), Hidden.apply):
            torch.manual_seed(0)
            engine = make_engine(config, model=LayerDrop(call), optimizer=sgd)
            for number, used in enumerate(updates):
                engine.zero_grad()
                engine.backward(engine(here(torch.full((2, 4), 0.1 * (rank + number + 1))), used))
                engine.step()
            found += full_weights(engine).values()
    same = all(map(torch.equal, found[: len(found) // 2], found[len(found) // 2 :]))
    engine = make_engine(TINY, model=LayerDrop(Hidden.apply), optimizer=sgd)
    for used in ([], []):  # the graphs show all, so that the hidden ones are no longer waited for
        engine.zero_grad()
        engine.backward(engine(here(torch.ones(2, 4)), used))
        engine.step()
    engine.zero_grad()
    return same, said(engine.backward, engine(here(torch.ones(2, 4)), [1, 2, 3]))


def test_a_backward_within_the_backward_is_waited_for_or_rejected():
    for same, text in run_ranks(backward_in_backward, 2):
        assert same
        assert "the gradient of 'layers." in text
        assert "changed after it was sent, by a backward inside the last one" in text
        assert "use_reentrant=False" in text


def mean_in_the_sum(rank: int, world_size: int, strategy: str) -> tuple[list[str], list[Any]]:
    """Where the backend does not divide, and where it does: what a reduction asks for, and the weights after it."""
    asked, found = [], []
    name = REDUCE_SCATTER if strategy == "zero1" else "all_reduce"
    for averages in (False, True):
        engine = make_engine({"parallel": {"data": strategy}}, model=Scaled(), optimizer=sgd)
        loss = engine(here(torch.arange(12.0).view(3, 4) * (rank + 1))).sum()
        with (
            patch("halfmesh.parallel.reducer.can_average", lambda flat, group, averages=averages: averages),
            patch.object(dist, name, wraps=getattr(dist, name)) as reduced,
        ):
            engine.backward(loss)
        call = reduced.mock_calls[0]
        asked.append(str(call.kwargs["op"] if strategy == "zero1" else call.args[1]))
        engine.step()
        found.append(full_weights(engine)["weight"].tolist())
        engine.close()
    return asked, found


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_nccl_divides_while_it_sums(strategy):
    """gloo, which can, too, does as it is told here."""
    for asked, (divided, averaged) in run_ranks(mean_in_the_sum, 2, strategy):
        assert asked == ["RedOpType.SUM", "RedOpType.AVG"]
        assert divided == averaged


@pytest.mark.parametrize(
    ("backend", "dtype", "ranks", "expected"),
    [
        ("cpu:gloo,cuda:nccl", torch.float32, 6, True),
        ("nccl", torch.bfloat16, 8, True),
        ("nccl", torch.bfloat16, 6, False),  # it would multiply by 0.1669921875
        ("gloo", torch.float32, 8, False),
    ],
)
def test_where_nccl_divides(backend, dtype, ranks, expected):
    with patch.object(dist, "get_backend", lambda group: backend):
        for is_cuda in (True, False):
            flat = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
            assert can_average(flat, SimpleNamespace(size=lambda: ranks)) == (expected and is_cuda)


def broken_off(rank: int, world_size: int) -> list[dict[str, torch.Tensor]]:
    """The weights after an update, and after one before which a backward fails on all ranks, once its first buckets
    were sent."""
    found, x = [], here(torch.full((2, 4), float(rank + 1)))

    def fail(_: torch.Tensor) -> None:
        raise LookupError("no gradient")

    for fails in (False, True):
        torch.manual_seed(0)
        engine = make_engine(TINY, model=nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), optimizer=sgd)
        if fails:
            handle = engine.model[0].weight.register_hook(fail)
            with pytest.raises(LookupError):
                engine.backward(engine(x).sum() * 1e6)
            handle.remove()
            engine.zero_grad()
        engine.backward(engine(x).sum())
        engine.step()
        found.append(full_weights(engine))
    return found


def test_an_error_in_backward_leaves_nothing_behind():
    for expected, found in run_ranks(broken_off, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "given", "mib"), [(2, None, 25), (64, None, 64), (64, 25, 25)])
def test_buckets_grow_with_the_data_ranks(ranks, given, mib):
    config = load_config({"parallel": {"data": {"bucket_mb": given}}})
    assert reduce_options(config, config.parallel.dims(ranks)).bucket_bytes == mib * 2**20
