"""Matrix products run in the mode's dtype, in each kind of layout."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.support.models import COMPUTE_DTYPES, MatmulDtypes
from tests.support.ranks import run_ranks

from .cells import Cell, Pipe
from .training import make_engine

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

LAYOUTS = ({"tensor": 2}, {"pipeline": Pipe(2, "1f1b", 2)}, {"context": 2}, {"data": 2, "strategy": "fsdp"})
MODES = ("torch_fp16", "torch_bf16", "torch_fp8", "naive_fp16", "naive_bf16")
FLOAT8 = {torch.bfloat16, torch.float32}  # emulated in fp32; heads and small layers stay in bf16


def products(rank: int, world_size: int, cells: list[Cell]) -> list[set[torch.dtype]]:
    """Of the second update: before the first one a plan may be tried out in fp32."""
    found = []
    for cell in cells:
        engine, watch = make_engine(cell, rank), MatmulDtypes()
        for number, (x, y) in zip(range(2), engine.dataloader, strict=False):
            with watch if number else nullcontext():  # backward, too: pipelines compute in it
                engine.backward(engine.criterion(engine(x), y))
            engine.step()
        engine.close()
        found.append(watch.dtypes)
    return found


@pytest.mark.parametrize("mode", MODES)
def test_products_run_in_the_modes_dtype(mode):
    cells = [Cell(mode, "llama", **layout) for layout in LAYOUTS]
    expected = FLOAT8 if mode == "torch_fp8" else {COMPUTE_DTYPES[mode]}
    for found in run_ranks(products, 2, cells):
        assert found == [expected] * len(LAYOUTS)
