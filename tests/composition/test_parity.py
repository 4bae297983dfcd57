"""Every allowed cell trains to parity with one process in fp32, by torch alone.

The few cells of `covering()`; with COMPOSITION=full in the environment all of `thorough()`. Those on 8 ranks have
a file of their own, so that two workers share the work.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.support.ranks import ranks_on

from . import training
from .cells import Cell, Pipe, covering, thorough
from .parity import find_problems
from .reference import reference
from .training import train

pytestmark = pytest.mark.distributed


@dataclass(frozen=True)
class Offloaded(Cell):
    """fsdp with its shards, gradients and optimizer state in host memory."""

    def config(self, **options: Any) -> dict[str, Any]:
        config = super().config(**options)
        config["parallel"]["data"]["cpu_offload"] = True
        return config

    def __str__(self) -> str:
        return f"{super().__str__()}-cpu_offload"


@dataclass(frozen=True)
class Tensorwise(Cell):
    """fp8 with tensorwise scales, whose weights fsdp gathers in float8."""

    def config(self, **options: Any) -> dict[str, Any]:
        return super().config(**options, recipe="tensorwise")

    def __str__(self) -> str:
        return f"{super().__str__()}-tensorwise"


CELLS = sorted(thorough() if os.environ.get("COMPOSITION") == "full" else covering(), key=lambda c: c.world_size)
OTHERS = [
    Cell("none", "gpt2", pipeline=Pipe(2, "1f1b", 2)),
    Cell("naive_fp16", "gpt2", pipeline=Pipe(2, "interleaved", 4, 2)),
    Cell("torch_bf16", "gpt2", data=2, pipeline=Pipe(2, "gpipe", 4)),
    Offloaded("naive_bf16", "gpt", tensor=2, data=2, clip_grad_norm=True, strategy="fsdp"),
    Offloaded("torch_fp16", "mlp", data=2, pipeline=Pipe(2, "1f1b", 2), strategy="fsdp"),
    Tensorwise("torch_fp8", "llama", 2, 2, gradient_accumulation=2, clip_grad_norm=True, strategy="fsdp"),
    Tensorwise("torch_fp8", "vit", data=2, pipeline=Pipe(2, "interleaved", 4, 2), strategy="fsdp"),
]
PARTIAL = [  # not every parameter has a gradient, on every rank or on some
    Cell("none", "branching", tensor=2, data=2, clip_grad_norm=True),
    Cell("naive_fp16", "branching", tensor=2, data=2, clip_grad_norm=True),
    Cell("none", "branching", tensor=2, data=2, gradient_accumulation=2, reduce_dtype="bfloat16"),
    Cell("torch_fp16", "frozen_gpt", 2, 2, sequence_parallel=True, clip_grad_norm=True),
    Cell("naive_bf16", "frozen_gpt", tensor=2, data=2, gradient_accumulation=2),
    Cell("naive_fp16", "frozen_vit", tensor=2, data=2, sequence_parallel=True),
    Cell("naive_fp16", "frozen_gpt", data=2, clip_grad_norm=True, pipeline=Pipe(2, "1f1b", 4)),
    Cell("naive_fp16", "frozen_vit", tensor=2, sequence_parallel=True, pipeline=Pipe(2, "interleaved", 2, 2)),
    Cell("torch_bf16", "frozen_gpt", pipeline=Pipe(4, "gpipe", 2)),  # the first stages have nothing to train
]


@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.world_size < 8], ids=str)
def test_trains_to_parity(cell):
    assert not find_problems(cell, run_cell(cell))


def run_cell(cell: Cell) -> Any:
    """What the ranks of `cell` did, where it can run."""
    if isinstance(cell, Offloaded) and ranks_on() != "gloo-cpu":
        pytest.skip(f"{ranks_on()}: offloaded shards need a backend for the host, too (tests/gpu has them)")
    return training.run_cell(cell, train, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", OTHERS, ids=str)
def test_other_cells_train_to_parity(cell):
    assert not find_problems(cell, run_cell(cell))


@pytest.mark.slow
@pytest.mark.parametrize("cell", PARTIAL, ids=str)
def test_parameters_without_gradients_stay_and_the_others_train_to_parity(cell):
    results = run_cell(cell)
    assert not find_problems(cell, results)
    expected = reference(cell.model, cell.clip_grad_norm, cell.scaled)
    for name, param in expected.model.named_parameters():
        assert torch.equal(results[0].weights[name], expected.start[name]) == (param.grad is None), name
