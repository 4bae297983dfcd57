"""The keys `activation_checkpoint` and `activation_offload` with several ranks: the same bits as without them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halfmesh.engine import offload
from halfmesh.engine.recompute import Checkpointed
from tests.support import compiling
from tests.support.whole import close_whole

from .cells import Cell, Pipe
from .training import digest, make_engine, run_cell

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class ActivationCell(Cell):
    """A cell with the keys, and with `compile`."""

    checkpoint: Any = False
    offload: bool = False
    compiled: bool = False

    def config(self, **options: Any) -> dict[str, Any]:
        form = {"patterns": list(self.checkpoint)} if isinstance(self.checkpoint, tuple) else self.checkpoint
        form = {"every": form} if type(form) is int else form
        keys = {"activation_checkpoint": form, "activation_offload": self.offload}
        if self.compiled:
            keys["compile"] = {"scope": "blocks", "backend": compiling.NAME}
        return super().config(**options) | keys

    @property
    def forms(self) -> tuple[Any, bool]:
        return self.checkpoint, self.offload


def cells(mode: str, model: str, *forms: Any, **layout: Any) -> list[ActivationCell]:
    """One for each form (a value of `activation_checkpoint`, or that and of `activation_offload`), and one without."""
    pairs = [form if isinstance(form, list) else [form, False] for form in (False, *forms)]
    return [ActivationCell(mode, model, checkpoint=form, offload=offload, **layout) for form, offload in pairs]


PARTS = ("blocks.*.mlp", "blocks.0.attention", "blocks.1.norm?")
LLAMA_PARTS = ("model.layers.*.mlp", "*.input_layernorm")
SP = {"tensor": 2, "sequence_parallel": True}
OFF = [False, True]  # offload alone
GROUPS = {
    "data": cells("none", "gpt", "full", "selective", 2, PARTS, ["full", True], OFF, data=2),
    "data, O1": cells("apex_o1", "gpt", "full", "selective", data=2),
    "tensor": cells("none", "gpt", "full", "selective", 2, PARTS, ["full", True], OFF, tensor=2),
    "tensor, llama": cells("naive_bf16", "llama", "full", "selective", LLAMA_PARTS, tensor=2),
    "sequence": cells("none", "gpt", "full", "selective", PARTS, OFF, **SP),
    "sequence, vit": cells("naive_fp16", "vit", "full", **SP, gradient_accumulation=2),
    "1f1b": cells("none", "gpt", "full", "selective", PARTS, ["full", True], OFF, pipeline=Pipe(2, "1f1b", 4)),
    "interleaved": cells("torch_bf16", "gpt", "full", "selective", OFF, pipeline=Pipe(2, "interleaved", 4, 2)),
    "all": cells("torch_bf16", "gpt", "full", OFF, tensor=2, pipeline=Pipe(2, "1f1b", 2), data=2),
    "zero1": cells("naive_bf16", "gpt", "full", OFF, data=2, strategy="zero1"),
    "fsdp": cells("none", "gpt", "full", "selective", 2, PARTS, ["full", True], data=2, strategy="fsdp"),
    "fsdp, tensor": cells("torch_bf16", "gpt", "full", data=2, strategy="fsdp", **SP),
    "fsdp, 1f1b": cells("naive_bf16", "gpt", "full", PARTS, data=2, strategy="fsdp", pipeline=Pipe(2, "1f1b", 2)),
    "compiled, data": cells("none", "gpt", "full", 2, OFF, data=2, compiled=True),
    "compiled, tensor": cells("naive_bf16", "gpt", "full", tensor=2, compiled=True),
}
DEFAULT = ("tensor", "1f1b")  # the others are slow


@contextmanager
def counted() -> Iterator[list[torch.Tensor]]:
    """What is moved to the host within, however small."""
    moved: list[torch.Tensor] = []

    inner = offload._OnHost.__init__

    def init(self: offload._OnHost, host: torch.Tensor, *more: Any) -> None:
        inner(self, host, *more)
        moved.append(host)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload._OnHost, "__init__", init)
        patch.setattr(offload, "SMALLEST", 1)
        yield moved


def run(rank: int, world_size: int, cell: ActivationCell) -> tuple[str, int, int, int]:
    """A digest of the weights after some updates with dropout; how many modules were changed, tensors moved, and
    compiled forwards run."""
    with counted() as moved:
        text, changed, ran = train(cell, rank)
        return text, changed, len(moved), ran


def train(cell: ActivationCell, rank: int) -> tuple[str, int, int]:
    with compiling.watched() if cell.compiled else nullcontext() as compiled:
        engine = make_engine(cell, rank)
        for module in engine.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
            if hasattr(module, "dropout"):
                module.dropout = 0.3
        changed = [m.forward for m in engine.model.modules() if isinstance(m.forward, Checkpointed)]
        if cell.strategy != "fsdp":  # FSDP2's modules cannot be copied
            clone = copy.deepcopy(engine.model)
            assert not any(isinstance(module.forward, Checkpointed) for module in clone.modules())
        for number, (x, y) in enumerate(engine.dataloader):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
            if number == 3:
                break
        weights = close_whole(engine)
        assert not any("forward" in vars(module) for module in engine.model.modules())
        ran = 0 if compiled is None else compiled.forwards
        return digest(weights), len(changed), ran


def runs(group: str) -> dict[tuple[Any, bool], list[tuple[str, int, int, int]]]:
    """What the ranks of each cell of a group did, by the values of the keys."""
    return {cell.forms: run_cell(cell, run, cell, timeout=120) for cell in GROUPS[group]}


@pytest.mark.promise(
    "activation checkpointing and offloading, with the rest",
    "the same weights, less memory",
    of="SageMaker",
    page="memory.md",
)
@pytest.mark.parametrize(
    "group", [name if name in DEFAULT else pytest.param(name, marks=pytest.mark.slow) for name in GROUPS]
)
def test_the_same_bits(group):
    (_, expected), *others = runs(group).items()
    for (checkpoint, offloads), result in others:
        assert [text for text, *_ in result] == [text for text, *_ in expected], (checkpoint, offloads)
        assert all(bool(changed) == bool(checkpoint) for _, changed, *_ in result), (checkpoint, offloads)
        assert all(bool(moved) == offloads for _, _, moved, _ in result), (checkpoint, offloads)
        if GROUPS[group][0].compiled and checkpoint:
            pairs = zip(result, expected, strict=True)
            assert all(ran > without for (*_, ran), (*_, without) in pairs), "forwards ran twice, compiled"
    if group == "1f1b":  # each rank changes what it computes
        found = dict(others)
        assert [changed for _, changed, *_ in found["full", False]] == [1, 1]
        assert [changed for _, changed, *_ in found[PARTS, False]] == [2, 3]
        moved = [count for _, _, count, _ in found["full", True]]
        assert moved == [4 * 4] * 2, "what each of four microbatches gives to one block, in four updates"
