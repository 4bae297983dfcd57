"""Data ranks: parameters of every shape, weights that are shared, and layers that all ranks use, some or none."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

from tests.parallel.sharding.runs import FEATURES, Net, Odd
from tests.support.pipeline_parts import pipe
from tests.support.proofs import FormatAlone, Row, rows

pytestmark = pytest.mark.distributed

CLASSES = 4


def batches(features: int, count: int = 4) -> list[Any]:
    return [(torch.randn(4, features), torch.randint(CLASSES, (4,))) for _ in range(count)]


def odd() -> Any:
    return Odd(), batches(FEATURES), nn.CrossEntropyLoss()


def of_two_groups(kind: Callable[..., optim.Optimizer], params: Any, **options: Any) -> optim.Optimizer:
    """Weight decay for weights only."""
    weights, others = ([param for param in params if (param.dim() > 1) == is_weight] for is_weight in (True, False))
    return kind([{"params": weights, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], **options)


ADAMW = partial(of_two_groups, partial(optim.AdamW, lr=0.01, amsgrad=True))
ADAGRAD = partial(of_two_groups, partial(optim.Adagrad, lr=0.01))
"""It has state from the beginning."""


def tied() -> Any:
    """Blocks share a weight with each other, another with the rest, and one is a view of a larger tensor."""
    model = Net()
    model.blocks[0].one.weight = model.blocks[2].one.weight
    model.end.weight = model.blocks[1].one.weight
    model.begin.weight = nn.Parameter(torch.randn(8, 2 * FEATURES)[:, :FEATURES])
    return model, batches(FEATURES), partial(F.cross_entropy, reduction="sum")


def branching(used: tuple[bool, ...]) -> Any:
    """Which layers a batch uses."""
    given = zip(batches(FEATURES), used, strict=True)
    return Net(), [({"x": x, "which": which}, y) for (x, y), which in given], nn.CrossEntropyLoss()


def large_numbers() -> Any:
    """In bf16 they would be all the same."""
    given = [({"x": x, "places": torch.arange(3000.0, 3004.0)}, y) for x, y in batches(FEATURES)]
    return Net(), given, nn.CrossEntropyLoss()


class Weighted(nn.Module):
    """A loss with learned weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.project = nn.Parameter(torch.zeros(1)), nn.Linear(4, 4)

    def forward(self, output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.project(output), labels) * torch.exp(-self.scale[0]) + self.scale.sum()


class HeadLoss(nn.Module):
    """A loss that applies the model's last layer, by its weight."""

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, self.head.weight, self.head.bias), labels)


class Model(nn.Module):
    def __init__(self, applies_head: bool) -> None:
        super().__init__()
        self.body, self.head, self.loss = nn.Linear(8, 4), nn.Linear(4, 4), Weighted()
        self.applies_head = applies_head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) if self.applies_head else hidden


def with_criterion(kind: str) -> Any:
    """A criterion with weights of the model."""
    model = Model(applies_head=kind != "has a part")
    criteria = {
        "part of the model": model.loss,
        "has a part": HeadLoss(model.head),
        "function": lambda output, labels: F.cross_entropy(model.loss.project(output), labels),  # of the root's weights
    }
    return model, batches(8), criteria[kind]


def nested() -> Any:
    """A pipeline calls the layers of its blocks one by one. Of the first stage nothing is trained."""
    blocks = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
    blocks[:2].requires_grad_(False)
    return nn.Sequential(blocks, nn.Linear(8, CLASSES)), batches(8), nn.CrossEntropyLoss()


def narrow() -> Any:
    """A frozen base in bf16, as of a model that only its adapters train."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])
    for block in model:
        block[0].to(torch.bfloat16).requires_grad_(False)
    return model.append(nn.Linear(8, CLASSES)), batches(8), nn.CrossEntropyLoss()


def data(options: Any) -> dict[str, Any]:
    return {"parallel": {"data": options}}


FSDP, ZERO1 = data("fsdp"), data({"strategy": "zero1", "bucket_mb": 0.0005})
LATE = data({"strategy": "zero1", "bucket_mb": 0.0005, "overlap_param_gather": True})
HYBRID, APART = ({"strategy": "fsdp", name: value} for name, value in (("hybrid", 2), ("separate_reduce_group", True)))
TWICE = {"gradient_accumulation": 2}
CYCLES = TWICE | {"clip_grad_norm": 0.05}
BF16, AUTOCAST = ({"bf16": {"mode": mode}} for mode in ("naive", "torch"))
SUMS = {"loss_reduction": "sum"}
ALIKE, OTHERS = (True, True, False, False), (True, False, False, True)
"""Whether both ranks use the same layers in an update."""


def sgd(params: Any) -> optim.Optimizer:
    """A parameter without a gradient stays as it is, one with a gradient of zero decays."""
    return optim.SGD(params, lr=0.1, weight_decay=0.1)


class Branches(nn.Module):
    """Layers beside each other, of which the first is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.layers[0].requires_grad_(False)

    def forward(self, x: torch.Tensor, used: int) -> torch.Tensor:
        return sum(layer(x) for layer in self.layers[:used])


def branches() -> Any:
    """The first and the second rank use other layers, in each microbatch; in the third update no rank uses the last."""
    used = [4, 3, 4, 2, 3, 4, 2, 2, 3, 3, 2, 3]
    return Branches(), [(torch.randn(2, 4), count) for count in used]


def images() -> Any:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(36, 2)
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    return model, torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last)


TINY = {"bucket_mb": 1e-6}
"""A bucket for each parameter."""


def staged(data: str) -> dict[str, Any]:
    return {"parallel": {**pipe()["parallel"], "data": data}}


@pytest.mark.promise("fp16 does not go with ZeRO")
@rows(
    Row("odd, zero1", odd, ZERO1, optimizer=ADAMW, updates=3),
    Row("odd, fsdp", odd, FSDP, optimizer=ADAMW, updates=3),
    Row("odd, zero1, cycles", odd, ZERO1 | CYCLES, optimizer=ADAGRAD),
    Row("odd, fsdp, cycles", odd, FSDP | CYCLES, optimizer=ADAGRAD),
    Row("odd, fsdp, 3 ranks", odd, FSDP, ranks=3, slow=True),
    Row("tied, zero1", tied, ZERO1 | SUMS),
    Row("tied, fsdp", tied, FSDP | SUMS),
    Row("frozen weights in bf16, zero1", narrow, ZERO1 | AUTOCAST),
    Row("frozen weights in bf16, fsdp", narrow, FSDP | AUTOCAST),
    Row("odd, weights that come late", odd, LATE, optimizer=ADAMW, updates=3),
    Row("tied, weights that come late", tied, LATE | SUMS | AUTOCAST),
    Row("ranks use other layers, weights that come late", partial(branching, OTHERS), LATE, accumulated=True),
    Row("now one layer, now another, fsdp", partial(branching, ALIKE), FSDP, accumulated=True),
    Row("ranks use other layers, zero1", partial(branching, OTHERS), ZERO1, accumulated=True),
    Row("ranks use other layers, fsdp", partial(branching, OTHERS), FSDP, accumulated=True),
    Row("large numbers go in, fsdp", large_numbers, FSDP | BF16, work=FormatAlone),
    Row("part of the model", partial(with_criterion, "part of the model"), FSDP),
    Row("has a part", partial(with_criterion, "has a part"), FSDP),
    Row("function", partial(with_criterion, "function"), FSDP),
    Row("sums in a group of their own, fsdp", odd, data(APART) | CYCLES, optimizer=ADAMW),
    *(
        Row(f"some ranks use it, {name}", branches, data(kind) | TWICE, optimizer=sgd, updates=3, accumulated=True)
        for name, kind in {"one bucket": {}, "buckets": TINY, "zero1": {"strategy": "zero1", **TINY}}.items()
    ),
    Row("channels last, zero1", images, data({"strategy": "zero1", "bucket_mb": 1e-3}), 3, sgd),
    Row("hybrid", odd, data(HYBRID), ranks=4),
)
def test_trains_as_one_process(row):
    row.prove()


@pytest.mark.on_cpu("offloaded shards need a backend for the host, too")
@rows(Row("odd", odd, data({"strategy": "fsdp", "cpu_offload": True}) | CYCLES, optimizer=ADAMW))
def test_parts_in_host_memory(row):
    row.prove()


@pytest.mark.sends
@rows(Row("zero1", nested, staged("zero1"), ranks=4), Row("fsdp", nested, staged("fsdp"), ranks=4))
def test_a_stage_of_which_nothing_is_trained(row):
    row.prove()
