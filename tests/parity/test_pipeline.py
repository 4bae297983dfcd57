"""Pipelines: what stages hold, what crosses from stage to stage, arguments of all kinds, gradients that are computed
apart, and how losses are joined."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from halfmesh.utils.tensors import tensors_of
from tests.support.models import CLASSES, FEATURES, make_data, summed_loss
from tests.support.pipeline_parts import Deep, pipe
from tests.support.proofs import Row, rows
from tests.support.versions import SPLIT_SCHEDULES

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

WIDTH = 4


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


def one_of(y: torch.Tensor) -> torch.Tensor:
    """1 whatever the rows are, with a gradient for each of them."""
    return (y / y.detach()).mean()


def boundaries() -> nn.Module:
    """Eight stages, between which something else crosses each time: tuples, a list, a dict with all kinds of values and
    a number, nothing of a row, rows that are not first, and half precision."""
    return nn.Sequential(
        Layer(give=lambda x, y: (x, y)),
        Layer(lambda pair: pair[1], lambda pair, y: (pair[0], [y, pair[1] * (2 + pair[0].requires_grad)])),
        Layer(
            lambda pair: pair[1][0],
            lambda pair, y: {"y": pair[1][1] * y, "mask": y > 0, "index": y.argmax(1), "word": "w", "none": None},
        ),
        Layer(
            lambda tree: tree["y"] * tree["mask"], lambda tree, y: {"y": y, "index": tree["index"], "sum": one_of(y)}
        ),
        Layer(lambda tree: tree["y"] * tree["sum"] + tree["index"].int()[:, None], lambda tree, y: (y, y[:, :0])),
        Layer(lambda pair: torch.cat(pair, 1), lambda pair, y: y[:, None].expand(-1, 3, -1).transpose(0, 1)),
        Layer(lambda x: x.transpose(0, 1).sum(1), lambda x, y: y.bfloat16()),
        Layer(lambda x: x.double(), lambda x, y: {"out": y, "mask": y > 0}),
    )


def integers() -> nn.Module:
    """Integers alone cross first, and then what needs no gradient of the stages before."""
    first = (Apply(lambda x: x.argmax(1)), nn.Embedding(WIDTH, WIDTH), linear())
    return nn.Sequential(*first, Layer(torch.Tensor.detach), frozen(linear()), Apply(torch.cos), linear())


def in_place() -> nn.Module:
    return nn.Sequential(linear(), Apply(lambda x: x.relu_().mul(2)), Apply(lambda x: x.mul_(3)), linear())


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
        x = self.b(first.tanh()) + self.table[:1].expand(rows, -1)
        x = self.c(x) * self.scale
        return self.d(x).view(rows, -1) + first


class Scaled(nn.Module):
    """A layer with scales that other layers have, too; one of them may get no gradient here."""

    def __init__(self, *scales: nn.Parameter, idle: nn.Parameter | None = None) -> None:
        super().__init__()
        self.layer, self.scales, self.idle = linear(), nn.ParameterList(scales), idle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        for scale in self.scales:
            x = x * scale
        return x if self.idle is None else x + self.idle.detach()


def shared() -> nn.Module:
    """Parameters of stages 0 and 3, of all four, of 1 and 2; and one of 0 and 3 that learns in stage 0 only."""
    ends, everywhere, inner, once = (nn.Parameter(torch.rand(WIDTH) + 0.5) for _ in range(4))
    first, last = Scaled(ends, everywhere, once), Scaled(ends, everywhere, idle=once)
    last.layer.weight = first.layer.weight
    return nn.Sequential(first, Scaled(everywhere, inner), Scaled(everywhere, inner), last)


class OneActivation(nn.Module):
    """Modules without parameters are called by every stage; which call of the model a stage's first one is differs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.act, self.drop = linear(), linear(), linear(), nn.Tanh(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.c(self.drop(self.act(self.b(self.drop(self.act(self.a(x))))))))


def criterion(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Each sample weighs otherwise."""
    each = [t.to(target).square().flatten(1).mean(1) for t in tensors_of(output) if t.requires_grad]
    return (sum(each) * target).mean()


def build(make: Callable[[], nn.Module], *sizes: int) -> Any:
    """With batches of these sizes."""
    model = make()
    return model, [(torch.randn(size, WIDTH), torch.rand(size)) for size in sizes or (8, 12)], criterion


# -- gradients of weights, which some schedules compute apart --------------------------------------------------------


class View(nn.Module):
    """A layer on another view of its input."""

    def __init__(self, layer: nn.Module, how: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.how = layer, how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self.layer, x)


class Sides(nn.Module):
    """A layer that is used, one that is frozen, and one that no input reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.frozen, self.never = nn.Linear(16, 16), frozen(nn.Linear(16, 16)), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.frozen(torch.tanh(self.used(x)))


def strided() -> nn.Module:
    """Layers whose outputs, or their inputs' gradients, are not contiguous."""
    conv, gru = nn.Conv1d(4, 4, 3, padding=1), nn.GRU(4, 4)
    return nn.Sequential(
        nn.Sequential(nn.Linear(WIDTH, 16), Sides(), nn.Unflatten(1, (4, 4))),
        View(conv, lambda layer, x: layer(x.transpose(1, 2)).transpose(1, 2)),
        View(gru, lambda layer, x: layer(x.transpose(0, 1))[0].transpose(0, 1)),
        View(nn.Linear(4, 4), lambda layer, x: layer(x.permute(0, 2, 1)).tanh().mT),
        View(nn.Linear(1, 4), lambda layer, x: layer(x.mean(2, keepdim=True)).expand(-1, -1, 4)),
        View(nn.Linear(4, 4), lambda layer, x: layer(x[:, None].transpose(0, 1))[0].tanh()),
        nn.Sequential(nn.Flatten(), Sides(), nn.Linear(16, 4)),
    )


# -- arguments and losses ----------------------------------------------------------------------------------------------


@dataclass
class Features:
    """Of it the tensor is split, and the rest comes along."""

    x: torch.Tensor
    names: tuple[str, str] = ("a", "b")


class Named(nn.Module):
    """Several inputs and outputs of different kinds; integers and a mask pass from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, FEATURES)
        self.first, self.middle = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, ids, features, table, scale=None, *, mask=None):
        x = self.words(ids).mean(1) + features.x @ table
        rounded = (x * 10).long()
        y = self.first(x).relu() + x
        if mask is not None:
            y = y * mask[:, None]
        y = self.middle(y) + rounded % 3
        if scale is not None:
            y = y * scale
        return {"scores": self.last(y + x), "rounded": rounded, "extra": (y.detach().sum(1), 7)}


def of_scores(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output["scores"], target)


def named() -> Any:
    """Calls of several kinds and sizes, in turn."""
    x, y = make_data(8)
    ids, table, mask = torch.arange(24).view(8, 3) % 10, torch.randn(FEATURES, FEATURES), torch.tensor([1.0, 0.0] * 4)
    calls = [
        (ids, Features(x), table),
        (ids[:4], Features(x[:4]), table, torch.tensor(2.0)),
        {"ids": ids, "features": Features(x), "table": table, "mask": mask},
        {"ids": ids[:4], "features": Features(x[:4]), "table": table, "mask": mask[:4], "scale": torch.tensor(3.0)},
    ]
    sizes = 8, 4, 8, 4
    return Named(), [(call, y[:size]) for call, size in zip(calls, sizes, strict=True)], of_scores


def joined(loss: Callable[..., Any], *sizes: int) -> Any:
    """Losses of batches of these sizes, which are joined with those of microbatches and data ranks."""
    return Deep(), list(zip(*(part.split(sizes) for part in make_data(sum(sizes))), strict=True)), loss


OF_LAYERS = {"partition": ("first", "middle", "last"), "non_split": ("table",)}
summed = partial(F.cross_entropy, reduction="sum")
JOINED = pipe() | {"gradient_accumulation": 2}
EVEN, UNEVEN = (4,) * 8, (6, 2, 4, 4) * 2
FOUR = {"size": 4, "microbatches": 4, "schedule": "1f1b"}
LOOPED = {"microbatches": 4, "schedule": "interleaved", "chunks": 2}
POINTS = {"zero_bubble": ("1", "2", "3"), "zbv": ("2", "3", "4"), "dualpipev": ("3", "4", "5")}


@pytest.mark.promise(
    "simple and interleaved schedules, parameters shared by stages",
    "those, and four other schedules",
    of="SageMaker",
    page="pipeline.md",
)
@pytest.mark.promise(
    "arguments without a batch dimension, outputs on request",
    "`non_split`, `keep_outputs`, `eval_outputs`",
    of="SageMaker",
    page="pipeline.md",
)
@rows(
    Row("boundaries", partial(build, boundaries), pipe(**LOOPED | {"chunks": 4}), accumulated=True),
    Row("integers", partial(build, integers), pipe(**LOOPED, partition=("1", "3", "5"))),
    Row("in place", partial(build, in_place), pipe(schedule="gpipe", microbatches=4)),
    Row("skips", partial(build, Skips), pipe(**LOOPED, partition=("b", "c", "d"))),
    Row("one activation", partial(build, OneActivation), pipe(partition=("b",))),
    Row("shared", partial(build, shared), pipe(**FOUR), ranks=4),
    *(
        Row(f"strided, {name}", partial(build, strided), pipe(**LOOPED | {"schedule": name}, partition=POINTS[name]))
        for name in SPLIT_SCHEDULES
    ),
    Row("arguments", named, pipe(schedule="interleaved", chunks=2, **OF_LAYERS), updates=4),
    Row("sums", partial(joined, summed, *EVEN), JOINED | {"loss_reduction": "sum"}, ranks=4),
    Row("weighted", partial(joined, summed_loss, *UNEVEN), JOINED | {"loss_reduction": "weighted"}, ranks=4),
)
def test_trains_as_one_process(row):
    row.prove()
