"""Ways to use a model that are not `engine(x)` with a tensor: dict and dataclass outputs, dict batches, own losses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader

import halfmesh
from tests.support.models import COMPUTE_DTYPES, MODES

from .cells import LAYOUTS, Samples
from .zoo import Batch

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
        return _wrap(self.kind, logits, loss, hidden)


def _wrap(kind: str, logits: torch.Tensor, loss: torch.Tensor | None, hidden: torch.Tensor) -> Any:
    if kind == "dict":
        return {"loss": loss, "logits": logits, "more": [hidden, None, "words", 3]}
    if kind == "tuple":
        return (logits, None, (hidden, "words")) if loss is None else (loss, logits)
    return Answer(logits, loss, (hidden, None, 3), {"hidden": hidden, "none": None}, Note("said"))


def logits_of(output: Any) -> torch.Tensor:
    if isinstance(output, dict):
        return output["logits"]
    return output[0] if isinstance(output, tuple) else output.logits


def loss_of(kind: str, output: Any) -> torch.Tensor:
    if kind == "dict":
        return output["loss"]
    return output[0] if kind == "tuple" else output.loss


def criterion(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Takes what the model returns, whole."""
    return F.cross_entropy(logits_of(output), labels)


def data() -> Batch:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(UPDATES * SAMPLES, WIDTH, generator=generator) for _ in range(2))
    return {"x": x, "y": y, "labels": (x.sum(1) > y.sum(1)).long() + 2 * (x[:, 0] > 0).long()}


PLAN = {"layers.0": "colwise_gather", "head": "rowwise_split"}


@dataclass(frozen=True)
class Use:
    """
    Attributes:
        kind: what the model returns.
        call: "positions", "names", or "own loss", for which the model is given the labels.
    """

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
    engine = halfmesh.initialize(model, optimizer, None if own else criterion, loader, use.config(), device="cpu")
    for batch in engine.dataloader:
        engine.zero_grad()
        output = _call(engine, use, batch)
        loss = loss_of(use.kind, output) if own else engine.criterion(output, batch["labels"])
        engine.backward(loss)
        engine.step()
    if layout.pipeline > 1:
        output = output.value()
    words = describe(output)
    engine.close()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}, words


def _call(engine: Any, use: Use, batch: Batch) -> Any:
    if use.call == "own loss":
        return engine(**batch)
    return engine(batch["x"], batch["y"]) if use.call == "positions" else engine(y=batch["y"], x=batch["x"])


def describe(output: Any) -> str:
    """An output's kinds and formats, without its numbers."""
    if isinstance(output, torch.Tensor):
        return str(output.dtype).removeprefix("torch.")
    if isinstance(output, dict):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in output.items()) + "}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__}({', '.join(map(describe, output))})"
    if isinstance(output, Answer):
        return f"Answer({describe(vars(output))})"
    return repr(output)


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


def difference(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    largest = max(value.abs().max().item() for value in expected.values())
    return max((weights[name] - value).abs().max().item() for name, value in expected.items()) / largest


def expected_form(use: Use) -> str:
    """What `describe` says of the output: fp32 where the model is cast, autocast's formats elsewhere."""
    autocast = use.mode.startswith("torch") or use.mode == "apex_o1"
    logits = str(COMPUTE_DTYPES[use.mode] if autocast else torch.float32).removeprefix("torch.")
    half = use.mode.startswith("torch") and use.layout != "pipeline"  # between stages, and after O1's gelu, it is fp32
    hidden = logits if half else "float32"
    loss = "float32" if use.call == "own loss" else "None"
    if use.kind == "dict":
        return f"{{loss: {loss}, logits: {logits}, more: list({hidden}, None, 'words', 3)}}"
    if use.kind == "answer":
        more = f"parts: tuple({hidden}, None, 3), extra: {{hidden: {hidden}, none: None}}"
        return f"Answer({{logits: {logits}, loss: {loss}, {more}, note: Note(words='said', empty=None)}})"
    return f"tuple(float32, {logits})" if loss == "float32" else f"tuple({logits}, None, tuple({hidden}, 'words'))"
