"""Batches through the stages of several ranks give the outputs and gradients of one process with the same microbatches.

Stages and boundaries of every kind, under each schedule; batches of several shapes and evaluations in turn.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.context import ParallelContext
from halfmesh.parallel.pipeline.boundary import Crossing, tensors_of
from halfmesh.parallel.pipeline.cut import StageCut
from halfmesh.parallel.pipeline.partition import Partition, resolve
from halfmesh.parallel.pipeline.pieces import Call
from halfmesh.parallel.pipeline.runner import Pipeline, refuse_own_loss
from halfmesh.parallel.pipeline.skeleton import Skeleton
from halfmesh.parallel.pipeline.stage import Surroundings
from halfmesh.parallel.registries import SCHEDULES
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed

CPU = torch.device("cpu")
WIDTH = 4


# -- models of four stages -------------------------------------------------------------------------------------------


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


class Apply(nn.Module):
    """A module without parameters."""

    def __init__(self, how: Callable[[Any], Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Any) -> Any:
        return self.how(x)


class Layer(nn.Module):
    """A layer, and what is done with its input and its output."""

    def __init__(self, take: Callable[[Any], Any] = lambda x: x, give: Callable[..., Any] = lambda x, y: y) -> None:
        super().__init__()
        self.layer, self.take, self.give = linear(), take, give

    def forward(self, x: Any) -> Any:
        return self.give(x, self.layer(self.take(x)))


class Skips(nn.Module):
    """Values of the first stage are used in the last one; weights and a table are used in several."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = linear(), linear(), linear(), linear()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", torch.randn(9, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.size(0)
        first = self.a(x * self.scale)
        x = self.b(first.tanh()) + self.table[:rows]
        x = self.c(x) * self.scale
        return self.d(x).view(rows, -1) + first


class TiedEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, WIDTH)
        self.b, self.c, self.norm = linear(), linear(), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed((x * 4).long() % 9)
        x = self.norm(self.c(self.b(x).tanh()))
        return nn.functional.linear(x, self.embed.weight)


def sequential(*modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(*modules)


def shared_layer() -> nn.Module:
    layer = linear()
    return sequential(layer, Layer(), linear(), layer)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "plain": (lambda: sequential(linear(), Apply(torch.tanh), linear(), linear(), linear()), "auto"),
    "batch_norm": (lambda: sequential(linear(), nn.BatchNorm1d(WIDTH), linear(), nn.BatchNorm1d(WIDTH)), "auto"),
    "frozen_first": (lambda: sequential(frozen(linear()), linear(), linear(), linear()), "auto"),
    "frozen_front": (lambda: sequential(frozen(linear()), frozen(linear()), frozen(linear()), linear()), "auto"),
    "frozen_last": (lambda: sequential(linear(), linear(), linear(), frozen(linear())), "auto"),
    "frozen_middle": (lambda: sequential(linear(), frozen(linear()), frozen(linear()), linear()), "auto"),
    "no_parameters": (lambda: sequential(linear(), Apply(torch.sin), linear(), Apply(torch.cos)), "auto"),
    "none_at_the_beginning": (lambda: sequential(Apply(torch.sin), Apply(torch.cos), linear(), linear()), "auto"),
    "in_place": (
        lambda: sequential(linear(), Apply(lambda x: x.relu_().mul(2)), Apply(lambda x: x.mul_(3)), linear()),
        "auto",
    ),
    "tuple": (
        lambda: sequential(
            Layer(give=lambda x, y: (x, y)),
            Layer(lambda pair: pair[1], lambda pair, y: (pair[0], [y, pair[1]])),
            Layer(lambda pair: pair[1][0], lambda pair, y: (pair[0] * y, pair[1])),
            Layer(lambda pair: pair[0], lambda pair, y: y + pair[1][1]),
        ),
        "auto",
    ),
    "dict": (
        lambda: sequential(
            Layer(give=lambda x, y: {"y": y, "mask": y > 0, "index": y.argmax(1), "word": "w", "unused": y * 2}),
            Layer(
                lambda tree: tree["y"] * tree["mask"], lambda tree, y: {**tree, "y": y, "none": None, "sum": y.sum()}
            ),
            Layer(lambda tree: tree["y"] * tree["sum"], lambda tree, y: {"y": y, "index": tree["index"].int()}),
            Layer(lambda tree: tree["y"], lambda tree, y: {"out": y * tree["index"][:, None], "mask": y > 0}),
        ),
        "auto",
    ),
    "integers_only": (
        lambda: sequential(Apply(lambda x: x.argmax(1)), nn.Embedding(WIDTH, WIDTH), linear(), linear()),
        "auto",
    ),
    "empty": (
        lambda: sequential(
            Layer(give=lambda x, y: (y, y[:, :0])),
            Layer(lambda pair: pair[0], lambda pair, y: (y, pair[1])),
            Layer(lambda pair: torch.cat(pair, 1)),
            linear(),
        ),
        "auto",
    ),
    "transposed": (
        lambda: sequential(
            Layer(give=lambda x, y: y[:, None].expand(-1, 3, -1).transpose(0, 1)),
            Layer(lambda x: x.transpose(0, 1).sum(1)),
            linear(),
            linear(),
        ),
        "auto",
    ),
    "strides": (
        lambda: sequential(
            Layer(give=lambda x, y: y.sum(1)[None].t()), Layer(lambda x: x.expand(-1, WIDTH)), linear(), linear()
        ),
        "auto",
    ),
    "detached": (lambda: sequential(linear(), linear(), Layer(torch.Tensor.detach), linear()), "auto"),
    "half": (
        lambda: sequential(linear(), Layer(give=lambda x, y: y.bfloat16()), Layer(torch.Tensor.float), linear()),
        "auto",
    ),
    "skips": (Skips, ("b", "c", "d")),
    "tied_embedding": (TiedEmbedding, ("b", "c", "norm")),
    "shared_layer": (shared_layer, "auto"),
}


# -- one process, and a pipeline -------------------------------------------------------------------------------------


@dataclass
class Layout:
    size: int
    chunks: int
    schedule: str


LAYOUTS = {
    "1f1b": Layout(4, 1, "1f1b"),
    "gpipe": Layout(4, 1, "gpipe"),
    "interleaved": Layout(2, 2, "interleaved"),
}


def make_batch(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def loss_of(output: Any, index: int, count: int) -> torch.Tensor:
    total = sum(t.double().square().mean() for t in tensors_of(output) if t.requires_grad)
    return total * (index + 1) / count


@dataclass
class Built:
    model: nn.Module
    pipeline: Pipeline
    cut: StageCut


def build(model: nn.Module, points: Any, layout: Layout) -> Built:
    context = ParallelContext(layout.size, 1, CPU)
    partition, problems = resolve(model, layout.size, layout.chunks, points)
    assert isinstance(partition, Partition), problems
    skeleton = Skeleton(model)
    cut = StageCut(model, torch.optim.SGD(model.parameters(), lr=0.1), partition, context)
    around = Surroundings(contextlib.nullcontext, contextlib.nullcontext)
    pipeline = Pipeline(model, skeleton, partition, SCHEDULES.get(layout.schedule), context, around)
    return Built(model, pipeline, cut)


def train(built: Built, x: torch.Tensor, count: int) -> list[int]:
    told: list[int] = []
    calls = [Call((part,)) for part in x.chunk(count)]
    known = built.pipeline.look_up(calls[0])
    built.pipeline.train(
        calls,
        known,
        lambda output, index: loss_of(output, index, count),
        lambda p, rest: told.append(len(p)) if rest else None,
    )
    return told


def train_whole(model: nn.Module, x: torch.Tensor, count: int) -> None:
    for index, part in enumerate(x.chunk(count)):
        loss = loss_of(model(part), index, count)
        if loss.requires_grad:
            loss.backward()


def grads_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copied: the gradients of the next batch are added to them."""
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


STEPS: list[tuple[str, int, int]] = [
    ("evaluate", 2, 1),  # as many rows as a microbatch has: what is found for it must do for training, too
    ("train", 8, 4),
    ("train", 12, 4),  # other shapes
    ("evaluate", 3, 1),
    ("train", 16, 8),
    ("evaluate last", 1, 1),
]


def job(rank: int, name: str, layout: Layout) -> dict[str, Any]:
    """All steps of one model: this rank's outputs and gradients, and those of one process."""
    torch.manual_seed(0)
    make, points = MODELS[name]
    whole = make()
    model = copy.deepcopy(whole)
    built = build(model, points, layout)
    found: dict[str, Any] = {"outputs": [], "grads": [], "expected": [], "told": []}
    for seed, (kind, rows, count) in enumerate(STEPS):
        x = make_batch(rows, seed)
        if kind == "train":
            found["told"].append(train(built, x, count))
            train_whole(whole, x, count)
            found["grads"].append(grads_of(model))
            found["expected"].append(grads_of(whole))
        else:
            # The first one in training mode: batch statistics are of that batch in any case.
            training = seed == 0
            for net in (model, whole):
                net.train(training)
            output = built.pipeline.evaluate(Call((x,)), everywhere=kind == "evaluate")
            with torch.no_grad():
                expected = whole(x)
            for net in (model, whole):
                net.train()
            found["outputs"].append((output, expected))
    expected = dict(whole.named_buffers())
    found["buffers"] = {name: (buffer, expected[name]) for name, buffer in model.named_buffers()}
    built.cut.close()
    found["whole again"] = [name for name, _ in model.named_parameters()]
    return found


# The schedules differ in the order of the work, not in what crosses: each boundary is met under one of them at least.
SOME = ["batch_norm", "dict", "in_place", "tied_embedding", "shared_layer"]
JOBS = [(name, "1f1b") for name in MODELS]
JOBS += [(name, "gpipe") for name in SOME[:3]]
JOBS += [(name, "interleaved") for name in (*SOME, "frozen_first", "no_parameters", "tuple", "skips")]


def run_jobs(rank: int, world_size: int, jobs: list[tuple[str, str]]) -> dict[Any, Any]:
    return {(name, schedule): job(rank, name, LAYOUTS[schedule]) for name, schedule in jobs}


@pytest.fixture(scope="module")
def four_ranks() -> list[Any]:
    return run_ranks(run_jobs, 4, [job for job in JOBS if LAYOUTS[job[1]].size == 4], timeout=180)


@pytest.fixture(scope="module")
def two_ranks() -> list[Any]:
    return run_ranks(run_jobs, 2, [job for job in JOBS if LAYOUTS[job[1]].size == 2], timeout=180)


@pytest.mark.parametrize(("name", "schedule"), JOBS)
def test_equal_to_one_process(name, schedule, four_ranks, two_ranks):
    ranks = [rank[name, schedule] for rank in (two_ranks if schedule == "interleaved" else four_ranks)]
    for step, expected in enumerate(ranks[0]["expected"]):
        summed: dict[str, torch.Tensor] = {}  # over the ranks: a tied parameter's gradient is on several
        for rank in ranks:
            for param, grad in rank["grads"][step].items():
                summed[param] = summed[param] + grad if param in summed else grad
        assert {n for n, g in summed.items() if g.any()} == {n for n, g in expected.items() if g.any()}, step
        for param, grad in expected.items():
            torch.testing.assert_close(summed.get(param, torch.zeros_like(grad)), grad, rtol=1e-6, atol=1e-6)
    for index, rank in enumerate(ranks):
        for number, (found, expected) in enumerate(rank["outputs"]):
            if number == len(rank["outputs"]) - 1 and index != len(ranks) - 1:
                assert found is None, "the last one was for the rank with the last stage only"
                continue
            assert type(found) is type(expected)
            for one, other in zip(tensors_of(found), tensors_of(expected), strict=True):
                torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
                assert not one.requires_grad
        for found, expected in rank["buffers"].values():
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        assert all(len(told) == 1 for told in rank["told"]), "told once in each step of its last backward"
        assert rank["whole again"] == ranks[0]["whole again"]


# -- what changes while training -------------------------------------------------------------------------------------


def unfreezes(rank: int, world_size: int) -> dict[str, Any]:
    """The first stage is frozen, and trained later; every rank calls for it what it would call in one process."""
    torch.manual_seed(0)
    whole = sequential(frozen(linear()), linear())
    model = copy.deepcopy(whole)
    built = build(model, "auto", Layout(2, 1, "1f1b"))
    x = make_batch(4, 0)
    for trained in (False, True, False):
        for net in (model, whole):
            net[0].requires_grad_(trained)
            net.zero_grad()
        train(built, x, 2)
        train_whole(whole, x, 2)
        for name, p in model.named_parameters():
            expected = dict(whole.named_parameters())[name].grad
            assert (p.grad is None) == (expected is None), (trained, name)
            if expected is not None:
                torch.testing.assert_close(p.grad, expected, rtol=1e-6, atol=1e-7)
    return {}


def test_parameters_that_are_unfrozen_later():
    run_ranks(unfreezes, 2)


def refuses(rank: int, world_size: int) -> dict[str, str]:
    """Errors on all ranks alike; and the pipeline can be used after one."""
    found = {}
    ragged = sequential(linear(), Apply(lambda x: x[: 1 + int(x.sum() > 1e9)]), linear())
    built = build(ragged, "auto", Layout(2, 1, "gpipe"))
    for name, do in {
        "asks for values": lambda: train(built, make_batch(4, 0), 2),
        "evaluated": lambda: built.pipeline.evaluate(Call((make_batch(4, 0),))),
    }.items():
        try:
            do()
        except InputError as error:
            found[name] = str(error)
    built = build(sequential(linear(), linear()), "auto", Layout(2, 1, "gpipe"))
    try:
        built.pipeline.look_up(Call((torch.randn(2, WIDTH + 1),)))
    except InputError as error:
        found["shapes"] = str(error)
    train(built, make_batch(4, 0), 2)
    found["has last"] = str(built.pipeline.has_last)
    found["last rank"] = str(built.pipeline.last_rank)
    found["output"] = str(tuple(built.pipeline.look_up(Call((make_batch(2, 0),))).crossings[-1].tensors[0].shape))
    return found


def test_refusals():
    for rank, found in enumerate(run_ranks(refuses, 2)):
        assert "the model's forward asks for the values of its activations" in found["asks for values"]
        assert found["evaluated"] == found["asks for values"]
        assert "failed where it was run on tensors without data" in found["shapes"]
        assert found["has last"] == str(rank == 1)
        assert found["last rank"] == "1"
        assert found["output"] == "(2, 4)"


@pytest.mark.parametrize("tree", [torch.zeros(3), {"loss": torch.zeros(())}, (torch.zeros(()), torch.zeros(3))])
def test_outputs_that_are_no_loss(tree):
    refuse_own_loss(Crossing(tree))


def test_a_model_that_returns_its_own_loss():
    with pytest.raises(InputError, match=r"returns its own loss.* write loss = engine.criterion\(output, target\)"):
        refuse_own_loss(Crossing(torch.zeros((), device="meta")))
