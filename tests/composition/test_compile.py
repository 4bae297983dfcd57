"""The key `compile` with several ranks: cells train to parity with compiled code in them, and it is seen to run."""

from __future__ import annotations

import copy
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

from halfmesh.utils.torch_private import is_compiled
from tests.support import compiling
from tests.support.models import COMPUTE_DTYPES, TOLERANCES
from tests.support.whole import close_whole

from .cells import Cell, Pipe
from .training import make_engine, run_cell
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


def train(
    rank: int, world_size: int, cell: Cell, dropout: float = 0.0
) -> tuple[dict[str, torch.Tensor], compiling.Compiled, list[str]]:
    """The weights after a few updates; what was compiled, and why graphs ended."""
    with compiling.watched() as compiled:
        engine = make_engine(cell, rank)
        for module in engine.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
            if hasattr(module, "dropout"):
                module.dropout = dropout
        for x, y in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        return close_whole(engine), compiled, compiled.breaks


@pytest.mark.promise(
    "torch.compile",
    "`compile=True`, with the same weights",
    of="PyTorch",
    page="benchmarks.md",
)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trains_to_parity(cell):
    """With the same cell without the key, which verify proves."""
    plain = Cell(**{field.name: getattr(cell, field.name) for field in fields(Cell)})
    (expected, *_), *_ = run_cell(cell, train, plain)
    result = run_cell(cell, train, cell, timeout=120)
    largest = max(value.abs().max().item() for value in expected.values())
    for weights, compiled, breaks in result:
        torch.testing.assert_close(weights, result[0][0], rtol=0, atol=0)
        torch.testing.assert_close(weights, expected, rtol=0, atol=TOLERANCES[cell.mode] * largest)
        microbatches = UPDATES * cell.gradient_accumulation * cell.pipeline.microbatches
        assert compiled.forwards >= microbatches
        assert compiled.backwards >= microbatches
        assert compiled.dtypes == {COMPUTE_DTYPES[cell.mode]}
        assert bool(breaks) == (cell.tensor > 1), "graphs end where a tensor group meets, and nowhere else"
        assert all("torch.compiler.disable" in reason for reason in breaks), "and only where halfmesh says so"


@pytest.mark.parametrize("layout", [{"tensor": 2, "sequence_parallel": True}, {"pipeline": PIPE}], ids="-".join)
def test_dropout_drops_the_same(layout):
    """Random numbers are drawn in the same order, from the sequences in common and from each rank's own."""
    cells = Cell("none", "gpt", **layout), CompiledCell("none", "gpt", **layout)
    plain, compiled = (run_cell(cell, train, cell, 0.3, timeout=120) for cell in cells)
    assert not any(ran.forwards for _, ran, _ in plain)
    for weights, ran, _ in compiled:
        assert ran.forwards
        torch.testing.assert_close(weights, compiled[0][0], rtol=0, atol=0)
        torch.testing.assert_close(weights, plain[0][0], rtol=0, atol=1e-5)


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
        engine.close()
        return not any(is_compiled(module) for module in engine.model.modules())


def test_copies_of_a_divided_model():
    cell = CompiledCell("naive_bf16", "gpt", tensor=2, pipeline=PIPE)
    assert run_cell(cell, average, cell) == [True] * 4
