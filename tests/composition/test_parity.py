"""Every allowed cell trains to parity with one process: the mode in the layout, and the layout in float64.

The cells of `few()`, and of `covering()`, which are slow; with COMPOSITION=full in the environment all of `thorough()`.
"""

from __future__ import annotations

import os

import pytest

from tests.support.ranks import ranks_on

from .cells import Cell, Pipe, covering, few, thorough
from .parity import find_problems

pytestmark = pytest.mark.distributed


def what_of(cell: Cell) -> str:
    """What is proven of it: its layout in float64 and its mode; of most the layout, or the mode if it has one.
    A `reduce_dtype` says nothing in float64."""
    if cell in few() or (cell.mode == "none" and cell.reduce_dtype != "float32"):
        return "both"
    return "structure" if cell.mode == "none" else "format"


CELLS = thorough() if os.environ.get("COMPOSITION") == "full" else covering()
MARKS = {True: (), False: pytest.mark.slow}
# Each with a seed, of model and samples. (With seed 0 two experts tie in bf16, and top-k may order them either way.)
SEEDED = [
    pytest.param(cell, 1 if cell.expert > 1 else number % 3, id=str(cell), marks=MARKS[cell in few()])
    for number, cell in enumerate(CELLS)
]
SEQUENCE = {"tensor": 2, "data": 2, "sequence_parallel": True}
TIED = {"tensor": 2, "pipeline": Pipe(2, "1f1b", 2)}  # a weight that both stages hold
NORMS = [(Cell("none", "gpt", **TIED), kind) for kind in ("1", "3", "inf")]
NORMS += [(Cell("none", "llama", **SEQUENCE), "3")]
OFFLOADED = "parallel.data.cpu_offload=true"
OTHERS = [
    (Cell("naive_bf16", "gpt", tensor=2, data=2, clip_grad_norm=True, strategy="fsdp"), OFFLOADED),
    (Cell("torch_fp16", "mlp", data=2, pipeline=Pipe(2, "1f1b", 2), strategy="fsdp"), OFFLOADED),
    (Cell("torch_fp8", "llama", 2, 2, gradient_accumulation=2, strategy="fsdp"), "fp8.recipe=tensorwise"),
]


@pytest.mark.promise("simple and interleaved schedules, parameters shared by stages")
@pytest.mark.promise(
    "pipelines take the naive mode only", "lifted: any mode but `apex`", of="Colossal-AI", page="pipeline.md"
)
@pytest.mark.promise(
    "fp16 does not go with ZeRO", "lifted: zero1 and fsdp equal one process", of="Colossal-AI", page="sharding.md"
)
@pytest.mark.parametrize(("cell", "seed"), SEEDED)
def test_trains_to_parity(cell, seed):
    assert not find_problems(cell, what_of(cell), seed)


@pytest.mark.promise("`clip_master_grads`")
@pytest.mark.parametrize(("cell", "kind"), NORMS, ids=str)
def test_norms_of_each_type(cell, kind):
    assert not find_problems(cell, "structure", 0, f"clip_grad_norm={{max_norm: 0.1, norm_type: {kind}}}")


@pytest.mark.slow
@pytest.mark.parametrize(("cell", "key"), OTHERS, ids=str)
def test_other_cells_train_to_parity(cell, key):
    if key == OFFLOADED and ranks_on() != "gloo-cpu":
        pytest.skip(f"{ranks_on()}: offloaded shards need a backend for the host, too (tests/gpu has them)")
    assert not find_problems(cell, "both", 0, key)
