"""Dict, tuple and dataclass outputs, several inputs, dict batches and own losses: as in one process, in their form."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import halfmesh
from tests.support.models import MODES, said
from tests.support.proofs import FormatAlone, Row, rows
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.distributed
SAMPLES, WIDTH = 8, 8
PARALLEL = {
    "replicate": {"data": "replicate"},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"layers.0": "colwise_gather", "head": "rowwise_split"}}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ("layers.1",), "keep_outputs": True}},
}


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


def get(output: Any, name: str) -> torch.Tensor:
    """The logits, or the loss, of an output."""
    if isinstance(output, dict):
        return output[name]
    return output[0] if isinstance(output, tuple) else getattr(output, name)


def criterion(output: Any, labels: torch.Tensor) -> torch.Tensor:
    """Takes what the model returns, whole."""
    return F.cross_entropy(get(output, "logits"), labels)


def own_loss(output: Any, labels: torch.Tensor) -> torch.Tensor:
    return get(output, "loss")


def build(kind: str, call: str) -> Any:
    """`call`: by "positions", by "names", or with labels for its "own loss"."""
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(SAMPLES, WIDTH, generator=generator) for _ in range(2))
    labels = (x.sum(1) > y.sum(1)).long() + 2 * (x[:, 0] > 0).long()
    inputs = {"positions": (x, y), "names": {"y": y, "x": x}, "own loss": {"x": x, "y": y, "labels": labels}}[call]
    return Twofold(kind), (inputs, labels), own_loss if call == "own loss" else criterion


USES = [
    ("dict", "own loss", "replicate", "none"),
    ("tuple", "own loss", "tensor", "torch_bf16"),
    ("answer", "own loss", "zero1", "naive_fp16"),
    ("answer", "positions", "pipeline", "torch_fp16"),
    ("tuple", "positions", "pipeline", "none"),
    ("answer", "names", "tensor", "none"),
    ("dict", "names", "fsdp", "naive_bf16"),
    ("dict", "own loss", "replicate", "apex_o2"),
]


def row(kind: str, call: str, layout: str, mode: str) -> Row:
    config = MODES[mode] | {"parallel": PARALLEL[layout]}
    work = {} if mode == "none" else {"work": FormatAlone}
    return Row(f"{kind}, {call}, {layout}, {mode}", partial(build, kind, call), config, **work)


@rows(*(row(*use) for use in USES))
def test_trains_as_one_process(row):
    row.prove()


# --- what the engine returns ----------------------------------------------------------------------------------------


def describe(output: Any) -> str:
    """An output's kinds and formats, without its numbers."""
    if isinstance(output, torch.Tensor):
        return str(output.dtype).removeprefix("torch.")
    if isinstance(output, dict):
        return "{" + ", ".join(f"{key}: {describe(value)}" for key, value in output.items()) + "}"
    if isinstance(output, (list, tuple)):
        return f"{type(output).__name__}({', '.join(map(describe, output))})"
    return f"Answer({describe(vars(output))})" if isinstance(output, Answer) else repr(output)


def call(model: Any, inputs: Any) -> Any:
    return model(*inputs) if isinstance(inputs, tuple) else model(**inputs)


def forms(rank: int, world_size: int, uses: Any) -> list[str]:
    """What the engine returns in each use, in words, after an update."""
    found = []
    for kind, way, layout, mode in uses:
        model, (inputs, labels), loss_of = here(build(kind, way))
        config = MODES[mode] | {"parallel": PARALLEL[layout]}
        given = model, optim.SGD(model.parameters(), lr=0.03), loss_of, None, config
        with halfmesh.initialize(*given, device=rank_device()) as engine:
            output = call(engine, inputs)
            engine.backward(engine.criterion(output, labels))
            engine.step()
            found.append(describe(output.value() if layout == "pipeline" else output))
    return found


def test_outputs_have_the_form_that_the_model_gives_them():
    for found in run_ranks(forms, 2, USES):
        for words, (kind, way, _, mode) in zip(found, USES, strict=True):
            model, (inputs, _), _ = build(kind, way)
            if mode.startswith("torch"):  # autocast has formats of its own
                words = re.sub("bfloat16|float16", "float32", words)
            assert words == describe(call(model, inputs)), (kind, way, mode)


def rejected(rank: int, world_size: int) -> str:
    model, (inputs, _), _ = here(build("dict", "own loss"))
    given = model, optim.SGD(model.parameters(), lr=0.03), None, None, {"parallel": PARALLEL["pipeline"]}
    with halfmesh.initialize(*given, device=rank_device()) as engine:
        return said(lambda: engine.backward(engine(**inputs)["loss"]))


@pytest.mark.sends
def test_an_own_loss_is_rejected_under_a_pipeline():
    for message in run_ranks(rejected, 2):
        assert "the model's own loss (output.loss) is only on the last stage. Give initialize a criterion" in message
