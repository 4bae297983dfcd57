"""Every allowed cell trains to parity with one process: the mode in the layout, and the layout in float64.

The cells of `few()`, and of `covering()`, which are slow; with COMPOSITION=full in the environment all of `thorough()`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest

from tests.support.ranks import ranks_on

from .cells import Cell, Pipe, covering, few, thorough
from .parity import find_problems

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class With(Cell):
    """A cell with other keys, too."""

    cpu_offload: bool = False
    recipe: str = ""
    norm_type: float = 2.0

    def config(self, **options: Any) -> dict[str, Any]:
        config = super().config(**options, **({"recipe": self.recipe} if self.recipe else {}))
        config["parallel"]["data"]["cpu_offload"] = self.cpu_offload
        if self.norm_type != 2:
            config["clip_grad_norm"] = {"max_norm": 0.1, "norm_type": self.norm_type}
        return config

    def __str__(self) -> str:
        words = [super().__str__(), *["cpu_offload"] * self.cpu_offload, *[self.recipe] * bool(self.recipe)]
        return "-".join([*words, *[f"norm{self.norm_type:g}"] * (self.norm_type != 2)])


def what_of(cell: Cell) -> str:
    """What is proven of it: its layout in float64 and its mode; of the many cells with a mode that alone."""
    return "both" if cell.mode == "none" or cell in few() else "format"


CELLS = thorough() if os.environ.get("COMPOSITION") == "full" else covering()
MARKS = {True: (), False: pytest.mark.slow}
# Each with a seed, of model and samples. (With seed 0 two experts tie in bf16, and top-k may order them either way.)
SEEDED = [
    pytest.param(cell, 1 if cell.expert > 1 else number % 3, id=str(cell), marks=MARKS[cell in few()])
    for number, cell in enumerate(CELLS)
]
SEQUENCE = {"tensor": 2, "data": 2, "sequence_parallel": True}
TIED = {"tensor": 2, "pipeline": Pipe(2, "1f1b", 2)}  # a weight that both stages hold
NORMS = [With("none", "gpt", **TIED, norm_type=kind) for kind in (1.0, 3.0, inf)]
NORMS += [With("none", "llama", **SEQUENCE, norm_type=3.0)]
OTHERS = [
    With("naive_bf16", "gpt", tensor=2, data=2, clip_grad_norm=True, strategy="fsdp", cpu_offload=True),
    With("torch_fp16", "mlp", data=2, pipeline=Pipe(2, "1f1b", 2), strategy="fsdp", cpu_offload=True),
    With("torch_fp8", "llama", 2, 2, gradient_accumulation=2, strategy="fsdp", recipe="tensorwise"),
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
@pytest.mark.parametrize("cell", NORMS, ids=str)
def test_norms_of_each_type(cell):
    assert not find_problems(cell, "structure")


@pytest.mark.slow
@pytest.mark.parametrize("cell", OTHERS, ids=str)
def test_other_cells_train_to_parity(cell):
    if isinstance(cell, With) and cell.cpu_offload and ranks_on() != "gloo-cpu":
        pytest.skip(f"{ranks_on()}: offloaded shards need a backend for the host, too (tests/gpu has them)")
    assert not find_problems(cell)
