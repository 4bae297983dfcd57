"""Dict and dataclass outputs, several inputs, dict batches and own losses: as one process, in each layout and mode."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

import halfmesh
from tests.support.models import MODES, TOLERANCES, said
from tests.support.ranks import rank_device
from tests.support.versions import TORCH
from tests.support.whole import close_whole

from .cells import LAYOUTS, Samples

pytestmark = pytest.mark.distributed
UPDATES, SAMPLES, WIDTH = 5, 8, 8


@dataclass
class Note:
    """What a model says beside its numbers."""

    words: str
    empty: None = None


@dataclass
class Answer:
    """An output of the user's own."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    parts: tuple[Any, ...] = ()
    extra: dict[str, Any] = field(default_factory=dict)
    note: Note | None = None


class Twofold(nn.Module):
    """Takes two inputs, by position or name, and optional labels; returns what `kind` says."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.left, self.right = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        hidden = self.left(x) + self.right(y)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        if self.kind == "dict":
            return {"loss": loss, "logits": logits, "more": [hidden, None, "words", 3]}
        if self.kind == "tuple":
            return (logits, None, (hidden, "words")) if loss is None else (loss, logits)
        return Answer(logits, loss, (hidden, None, 3), {"hidden": hidden, "none": None}, Note("said"))


def get(kind: str, output: Any, name: str) -> torch.Tensor:
    """The logits, or the loss, of an output."""
    if kind == "dict":
        return output[name]
    return output[0] if kind == "tuple" else getattr(output, name)


def criterion(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Takes what the model returns, whole."""
    kind = {dict: "dict", tuple: "tuple"}.get(type(output), "answer")
    return F.cross_entropy(get(kind, output, "logits"), labels)


def data() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(UPDATES * SAMPLES, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y, "labels": (x.sum(1) > y.sum(1)).long() + 2 * (x[:, 0] > 0).long()}


PLAN = {"layers.0": "colwise_gather", "head": "rowwise_split"}


@dataclass(frozen=True)
class Use:
    """What the model returns; how it is called: by "positions", by "names", or with labels for its "own loss"."""

    kind: str
    call: str
    layout: str
    mode: str = "none"

    def __str__(self) -> str:
        return f"{self.kind}, {self.call}, {self.layout}, {self.mode}"

    def config(self) -> dict[str, Any]:
        layout = LAYOUTS[self.layout]
        parallel: dict[str, Any] = {"data": layout.strategy}
        if layout.tensor > 1:
            parallel["tensor"] = {"size": 2, "plan": PLAN}
        if layout.pipeline > 1:
            parallel["pipeline"] = {"size": 2, "microbatches": 2, "partition": ("layers.1",), "keep_outputs": True}
        return MODES[self.mode] | {"parallel": parallel}


def train(rank: int, world_size: int, use: Use) -> tuple[dict[str, torch.Tensor], str]:
    """The weights in the end, and the last output in words."""
    model = Twofold(use.kind)
    layout = LAYOUTS[use.layout]
    loader = DataLoader(Samples(data()), SAMPLES // layout.data)
    optimizer = optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    own = use.call == "own loss"
    given = model, optimizer, None if own else criterion, loader, use.config()
    engine = halfmesh.initialize(*given, device=rank_device())
    for batch in engine.dataloader:
        engine.zero_grad()
        if own:
            output = engine(**batch)
        elif use.call == "positions":
            output = engine(batch["x"], batch["y"])
        else:
            output = engine(y=batch["y"], x=batch["x"])
        engine.backward(get(use.kind, output, "loss") if own else engine.criterion(output, batch["labels"]))
        engine.step()
    words = describe(output.value() if layout.pipeline > 1 else output)
    return close_whole(engine), words


def describe(output: Any) -> str:
    """An output's kinds and formats, without its numbers."""
    if isinstance(output, torch.Tensor):
        return str(output.dtype).removeprefix("torch.")
    if isinstance(output, dict):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in output.items()) + "}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__}({', '.join(map(describe, output))})"
    return f"Answer({describe(vars(output))})" if isinstance(output, Answer) else repr(output)


def plain_form(use: Use) -> str:
    """What `describe` says of the model's own output."""
    batch = {name: value[:SAMPLES] for name, value in data().items()}
    if use.call != "own loss":
        del batch["labels"]
    return describe(Twofold(use.kind)(**batch))


def reference() -> dict[str, torch.Tensor]:
    """Plain torch in one process, in fp32. (What the model returns makes no difference.)"""
    model, samples = Twofold("tuple"), data()
    optimizer = optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for update in range(UPDATES):
        part = slice(update * SAMPLES, (update + 1) * SAMPLES)
        optimizer.zero_grad()
        F.cross_entropy(model(samples["x"][part], samples["y"][part])[0], samples["labels"][part]).backward()
        optimizer.step()
    return model.state_dict()


QUICK = [
    Use("dict", "own loss", "data"),
    Use("tuple", "own loss", "tensor", "torch_bf16"),
    Use("answer", "own loss", "zero1", "naive_fp16"),
    Use("answer", "positions", "pipeline", "torch_fp16"),
    Use("dict", "names", "fsdp", "naive_bf16"),
]
SLOW = [
    *(Use(kind, "own loss", layout) for layout in ("fsdp", "tensor") for kind in ("dict", "tuple", "answer")),
    *(Use("answer", "names", layout) for layout in ("data", "fsdp", "tensor", "pipeline")),
    Use("dict", "positions", "pipeline"),
    Use("tuple", "positions", "pipeline"),
    *(Use("dict", "own loss", "one", mode) for mode in ("torch_fp16", "apex_o1", "apex_o2")),
    Use("answer", "own loss", "fsdp", "naive_fp16"),
]


@pytest.mark.parametrize("use", [*QUICK, *(pytest.param(use, marks=pytest.mark.slow) for use in SLOW)], ids=str)
def test_weights_and_outputs_are_those_of_one_process(use):
    if use.kind == "answer" and use.layout == "fsdp" and TORCH < (2, 13):
        pytest.skip("this version of torch cannot look into a dataclass")
    expected = reference()
    largest = max(value.abs().max().item() for value in expected.values())
    for weights, words in LAYOUTS[use.layout].run(train, use):
        apart = max((weights[name] - value).abs().max().item() for name, value in expected.items()) / largest
        assert apart < TOLERANCES[use.mode]
        if use.mode.startswith(("torch", "apex_o1")):  # autocast has formats of its own
            words = re.sub("bfloat16|float16", "float32", words)
        assert words == plain_form(use)


def refused(rank: int, world_size: int, use: Use) -> str:
    return said(train, rank, world_size, use)


OWN = "the model's own loss (output.loss) is on the last stage only. Give a criterion to initialize"


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_an_own_loss_is_refused_under_a_pipeline(kind):
    assert all(OWN in message for message in LAYOUTS["pipeline"].run(refused, Use(kind, "own loss", "pipeline")))
