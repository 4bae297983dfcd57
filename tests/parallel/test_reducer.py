"""Gradients and buffers of data ranks are averaged: overflows, errors, and what is told."""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
    norm, texts = nn.BatchNorm1d(2), list[str]()
    engine = make_engine(model=nn.Sequential(norm, Codebook()))
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    for _ in range(3):
        engine.backward(engine(here(torch.full((4, 2), 10.0 * rank))).sum())
        engine.step()
    logging.getLogger("halfmesh").removeHandler(handler)
    return norm.running_mean.tolist(), int(norm.num_batches_tracked), "\n".join(texts)


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


class Reversed(torch.autograd.Function):
    """Runs a backward of its own, as reversible layers do: the graph does not show the parameters of `layer`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.x, ctx.layer = x, layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.layer(x), grad)
        return x.grad, None


class Reversible(Heads):
    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        x = self.body[0](x)
        return torch.stack([Reversed.apply(x, self.heads[index]) for index in used]).sum()


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_gradients_that_the_graph_does_not_show_are_waited_for(strategy, two_ranks):
    engine = make_engine({"parallel": {"data": {"strategy": strategy, "bucket_mb": 1e-6}}}, model=Reversible(1))
    for used in [(0,), (1,), (0,), (0, 1)]:
        engine.backward(engine(torch.randn(2, 8), used))
        engine.zero_grad()
    engine.close()


class LayerDrop(nn.Module):
    """Layers in reentrant activation checkpointing, of which a batch may leave out some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        for index in used:
            x = checkpoint(self.layers[index], x, use_reentrant=True)
        return x.sin().mean()


class Hidden(torch.autograd.Function):
    """A layer whose parameters get their gradients from a backward within the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class HiddenLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        x = self.layers[0](x)
        for index in used:
            x = Hidden.apply(x, self.layers[index])
        return x.square().sum()


def backward_in_backward(rank: int, world_size: int) -> tuple[bool, str]:
    """If layers that are dropped and used again train as without the last microbatch's early sends, and what is said
    where that is not possible."""
    updates = [[0, 1, 2, 3], [0, 1 + rank], [0, 1, 3], [0, 1, 2, 3], [2, 3], [0, 1, 2, 3]]
    found = []
    for config in (TINY, {}):  # in one bucket nothing is sent before the end
        torch.manual_seed(0)
        engine = make_engine(config, model=LayerDrop(), optimizer=sgd)
        for number, used in enumerate(updates):
            engine.zero_grad()
            x = here(torch.full((2, 4), 0.1 * (rank + number + 1), requires_grad=True))
            engine.backward(engine(x, used))
            engine.step()
        found.append(full_weights(engine))
    same = all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    engine = make_engine(TINY, model=HiddenLayers(), optimizer=sgd)
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
        assert "changed after it was sent" in text


def mean_in_the_sum(rank: int, world_size: int, strategy: str) -> tuple[list[Any], list[Any]]:
    """Where the backend divides, and where it does not: the operations of an update's reductions; and its weights and
    statistics."""
    asked, found = [], []
    for averages in (False, True):
        norm = nn.BatchNorm1d(4)
        engine = make_engine({"parallel": {"data": strategy}}, model=nn.Sequential(norm, Scaled()), optimizer=sgd)
        loss = engine(here(torch.arange(12.0).view(3, 4) * (rank + 1))).sum()
        with (
            patch("halfmesh.parallel.reducer.can_average", lambda flat, group, averages=averages: averages),
            patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed,
            patch.object(dist, REDUCE_SCATTER, wraps=getattr(dist, REDUCE_SCATTER)) as scattered,
        ):
            engine.backward(loss)
        of_sums = sorted(str(call.args[1]) for call in summed.mock_calls)
        asked.append([str(call.kwargs["op"]) for call in scattered.mock_calls] + of_sums)
        engine.step()
        found.append([norm.running_mean.tolist(), *(value.tolist() for value in full_weights(engine).values())])
        engine.close()
    return asked, found


@pytest.mark.parametrize("strategy", ["replicate", "zero1"])
def test_nccl_divides_while_it_sums(strategy):
    """gloo, which can, too, does as it is told here."""
    statistics = ["RedOpType.SUM"] * (1 + (strategy == "zero1"))  # and zero1's flags
    for asked, (divided, averaged) in run_ranks(mean_in_the_sum, 2, strategy):
        assert asked == [["RedOpType.SUM", *statistics], ["RedOpType.AVG", *statistics]]
        assert divided == averaged


@pytest.mark.parametrize(
    ("backend", "dtype", "ranks", "expected"),
    [
        ("nccl", torch.float32, 6, True),
        ("cpu:gloo,cuda:nccl", torch.float64, 6, True),
        ("nccl", torch.bfloat16, 8, True),
        ("nccl", torch.bfloat16, 6, False),  # it would multiply by 0.1669921875
        ("nccl", torch.float16, 3, False),
        ("gloo", torch.float32, 8, False),
        ("fake", torch.float32, 8, False),
    ],
)
def test_where_nccl_divides(backend, dtype, ranks, expected):
    with patch.object(dist, "get_backend", lambda group: backend):
        for is_cuda in (True, False):
            flat = SimpleNamespace(dtype=dtype, is_cuda=is_cuda)
            assert can_average(flat, SimpleNamespace(size=lambda: ranks)) == (expected and is_cuda)


class Twice(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        run = super().forward
        return checkpoint(run, checkpoint(run, x, use_reentrant=True), use_reentrant=True)


def broken_off(rank: int, world_size: int) -> tuple[str, list[dict[str, torch.Tensor]]]:
    """What is said of a gradient that arrives twice; the weights after an update, and after one before which a backward
    fails on all ranks, once its first buckets were sent."""
    twice = make_engine(TINY, model=Twice(2, 2))
    message = said(twice.backward, twice(here(torch.ones(1, 2, requires_grad=True))).sum())
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
    return message, found


def test_an_error_in_backward_leaves_nothing_behind():
    for message, (expected, found) in run_ranks(broken_off, 2):
        assert "changed after it was sent, by a backward inside the last one" in message
        assert "use_reentrant=False" in message
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("ranks", "given", "mib"), [(2, None, 25), (64, None, 64), (64, 25, 25)])
def test_buckets_grow_with_the_data_ranks(ranks, given, mib):
    """Under zero1 each of them gets 1 / ranks of a bucket."""
    config = load_config({"parallel": {"data": {"bucket_mb": given}}})
    assert reduce_options(config, config.parallel.dims(ranks)).bucket_bytes == mib * 2**20
