"""The key `compile` with several ranks: cells train to parity with compiled code in them, and it is seen to run."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from halfmesh._torch import is_compiled
from tests.support import compiling

from .cells import Cell, Pipe
from .parity import find_problems
from .training import Outcome, digest, make_engine, run_cell, train
from .workloads import UPDATES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@dataclass(frozen=True)
class CompiledCell(Cell):
    """A cell with the key `compile`."""

    scope: str = "auto"
    backend: str = compiling.NAME

    def config(self, **options: Any) -> dict[str, Any]:
        return super().config(**options) | {"compile": {"scope": self.scope, "backend": self.backend}}

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.scope}"


PIPE = Pipe(2, "1f1b", 4)
CELLS = [
    CompiledCell("naive_bf16", "llama", data=2, gradient_accumulation=2, clip_grad_norm=True),
    CompiledCell("torch_fp16", "mlp", data=2),  # without blocks
    CompiledCell("apex_o2", "vit", data=2),
    CompiledCell("naive_bf16", "gpt", data=2, strategy="zero1"),
    CompiledCell("none", "gpt", data=2, strategy="fsdp", gradient_accumulation=2),
    CompiledCell("none", "gpt", data=2, strategy="fsdp", pipeline=Pipe(2, "1f1b", 2)),
    CompiledCell("torch_fp16", "llama", tensor=2, scope="model"),
    CompiledCell("torch_fp16", "gpt", pipeline=PIPE, clip_grad_norm=True),
    CompiledCell("naive_fp16", "gpt", tensor=2, sequence_parallel=True, gradient_accumulation=2),
    CompiledCell("naive_fp16", "gpt", tensor=2, data=2, pipeline=Pipe(2, "1f1b", 2), gradient_accumulation=2),
]


class Graphs(nullcontext[None]):
    """In place of MatmulDtypes, under which nothing is compiled, and before 2.15 nothing any more after it."""

    def __init__(self, compiled: compiling.Compiled) -> None:
        super().__init__()
        self._compiled = compiled

    @property
    def dtypes(self) -> set[torch.dtype]:
        return self._compiled.dtypes


def train_compiled(rank: int, world_size: int, cell: CompiledCell) -> tuple[Outcome, compiling.Compiled, list[str]]:
    """What the rank saw, what was compiled, and why graphs ended."""
    with compiling.watched() as compiled:
        outcome = train(rank, world_size, cell, Graphs(compiled))
        return outcome, compiled, compiled.breaks


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trains_to_parity(cell):
    result = run_cell(cell, train_compiled, cell, timeout=120)
    assert not find_problems(cell, [outcome for outcome, *_ in result])
    for _, compiled, breaks in result:
        microbatches = UPDATES * cell.gradient_accumulation * cell.pipeline.microbatches
        assert compiled.forwards >= microbatches
        assert compiled.backwards >= microbatches
        assert bool(breaks) == (cell.tensor > 1), "graphs end where a tensor group meets, and nowhere else"
        assert all("torch.compiler.disable" in reason for reason in breaks), "and only where halfmesh says so"


def with_dropout(rank: int, world_size: int, cell: Cell) -> tuple[str, dict[str, torch.Tensor]]:
    """The weights, and a digest of them, after a few updates of a model that drops activations everywhere."""
    with compiling.watched() as compiled:
        engine = make_engine(cell, rank)
        for module in engine.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.3
            if hasattr(module, "dropout"):
                module.dropout = 0.3
        for x, y in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        assert isinstance(cell, CompiledCell) == (compiled.forwards > 0)
        engine.close(restore=True)
        weights = {name: value.clone() for name, value in engine.model.state_dict().items()}
        return digest(weights), weights


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2, "sequence_parallel": True}, {"pipeline": PIPE}],
    ids=lambda layout: "-".join(layout),
)
def test_dropout_drops_the_same(layout):
    """Random numbers are drawn in the same order, from the sequences in common and from each rank's own."""
    cells = Cell("none", "gpt", **layout), CompiledCell("none", "gpt", **layout)
    plain, compiled = (run_cell(cell, with_dropout, cell, timeout=120) for cell in cells)
    for result in (plain, compiled):
        assert len({text for text, _ in result}) == 1, "the ranks end with the same weights"
    torch.testing.assert_close(compiled[0][1], plain[0][1], rtol=0, atol=1e-5)


def average(rank: int, world_size: int, cell: CompiledCell) -> bool:
    with compiling.watched():
        engine = make_engine(cell, rank)
        clone = copy.deepcopy(engine.model)
        blocks = [is_compiled(block) for block in engine.model.blocks]
        assert blocks == [engine.context.pp_rank == 0, engine.context.pp_rank == 1], "each rank compiles what it calls"
        assert not any(is_compiled(module) for module in clone.modules())
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        pairs = zip(engine.model.parameters(), clone.parameters(), strict=True)
        assert not any(torch.equal(own, other) for own, other in pairs if own.dim() > 1)
        engine.close(restore=True)
        return not any(is_compiled(module) for module in engine.model.modules())


def test_copies_of_a_divided_model():
    cell = CompiledCell("naive_bf16", "gpt", tensor=2, pipeline=PIPE)
    assert run_cell(cell, average, cell) == [True] * 4
