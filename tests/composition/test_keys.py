"""The keys `activation_checkpoint`, `activation_offload` and `compile` with several ranks: the same weights as without
them, with dropout, too, which verify switches off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from halfmesh.engine import offload
from halfmesh.engine.recompute import Checkpointed
from tests.support import compiling
from tests.support.models import COMPUTE_DTYPES, TOLERANCES
from tests.support.whole import close_whole

from .cells import Cell, Pipe
from .parity import digest, make_engine, run_cell, train

pytestmark = pytest.mark.distributed
UPDATES, DROPOUT = 3, 0.3


@dataclass(frozen=True)
class KeyCell(Cell):
    """A cell with the keys."""

    checkpoint: Any = False
    offload: bool = False
    compiled: str = ""  # the scope

    def config(self) -> dict[str, Any]:
        form = {"patterns": list(self.checkpoint)} if isinstance(self.checkpoint, tuple) else self.checkpoint
        keys = {"activation_checkpoint": form, "activation_offload": self.offload}
        if self.compiled:
            keys["compile"] = {"scope": self.compiled, "backend": compiling.NAME}
        return super().config() | keys


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


def run(rank: int, world_size: int, *cells: KeyCell) -> list[tuple[dict[str, torch.Tensor], int, int, Any, list[str]]]:
    """Of each: the weights after some updates; how many modules were changed and tensors moved; what was compiled, and
    why graphs ended."""
    found = []
    for cell in cells:
        with counted() as moved, compiling.watched() if cell.compiled else nullcontext() as compiled:
            # Compiled attention that drops multiplies in float32, on a CPU: the dtypes of fp16 are seen without.
            engine = make_engine(cell, rank, 0.0 if "fp16" in cell.mode else DROPOUT)
            changed = sum(isinstance(module.forward, Checkpointed) for module in engine.model.modules())
            train(engine, UPDATES)
            weights = close_whole(engine)
            assert not any("forward" in vars(module) for module in engine.model.modules())
            found.append((weights, changed, len(moved), compiled, compiled.breaks if compiled else []))
    return found


PARTS = ("blocks.*.mlp", "blocks.0.attention", "blocks.1.norm?")
LAYOUTS = [
    KeyCell("none", "gpt", tensor=2, sequence_parallel=True),
    KeyCell("none", "gpt", pipeline=Pipe(2, "1f1b", 4)),
    pytest.param(KeyCell("naive_bf16", "gpt", data=2, strategy="fsdp"), marks=pytest.mark.slow),
]


@pytest.mark.promise(
    "activation checkpointing and offloading", "the same weights, less memory", of="SageMaker", page="memory.md"
)
@pytest.mark.parametrize("cell", LAYOUTS, ids=str)
def test_the_same_bits(cell):
    forms = [("full", False), ("selective", False), (PARTS, False), (False, True), ("full", True)]
    forms = forms[:3] if cell.strategy == "fsdp" else forms
    cells = [cell, *(replace(cell, checkpoint=checkpoint, offload=offload) for checkpoint, offload in forms)]
    for first, *others in run_cell(cell, run, *cells, timeout=120):
        for given, (weights, changed, moved, *_) in zip(cells[1:], others, strict=True):
            assert digest(weights) == digest(first[0]), given
            assert (bool(changed), bool(moved)) == (bool(given.checkpoint), given.offload), given


COMPILED = [
    KeyCell("none", "gpt", data=2, strategy="fsdp", pipeline=Pipe(2, "1f1b", 2), compiled="auto"),
    KeyCell("naive_fp16", "gpt", tensor=2, gradient_accumulation=2, checkpoint="full", compiled="blocks"),
]


@pytest.mark.slow
@pytest.mark.promise("torch.compile", "`compile=True`, the same weights", of="PyTorch", page="compile.md")
@pytest.mark.parametrize("cell", COMPILED, ids=str)
def test_compiled_code_trains_as_without(cell):
    result = run_cell(cell, run, replace(cell, compiled=""), cell, timeout=120)
    (expected, *_), (first, *_) = result[0]
    largest = max(value.abs().max().item() for value in expected.values())
    for _, (weights, *_, compiled, breaks) in result:
        torch.testing.assert_close(weights, first, rtol=0, atol=0)
        torch.testing.assert_close(weights, expected, rtol=0, atol=TOLERANCES[cell.mode] * largest)
        microbatches = UPDATES * cell.gradient_accumulation * cell.pipeline.microbatches
        assert compiled.forwards >= microbatches * (2 if cell.checkpoint else 1)
        assert compiled.backwards >= microbatches
        assert compiled.dtypes == {COMPUTE_DTYPES[cell.mode]}
        assert bool(breaks) == (cell.tensor > 1), "graphs end where a tensor group meets, and nowhere else"
        assert all("torch.compiler.disable" in reason for reason in breaks), "and only where halfmesh says so"
