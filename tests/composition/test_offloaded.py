"""fsdp with its parts in host memory, together with the other kinds of parallelism: parity, as in each cell."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from tests.support.ranks import run_jobs

from .cells import Cell, Pipe
from .parity import find_problems
from .training import train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Offloaded(Cell):
    """One in which parts, gradients and state are in host memory."""

    def config(self, **options: Any) -> dict[str, Any]:
        config = super().config(**options)
        config["parallel"]["data"]["cpu_offload"] = True
        return config


CELLS = (
    Offloaded("naive_bf16", "gpt", tensor=2, data=2, clip_grad_norm=True, strategy="fsdp"),
    Offloaded("torch_fp16", "mlp", data=2, pipeline=Pipe(2, "1f1b", 2), strategy="fsdp"),
)


@pytest.fixture(scope="module")
def results():
    return dict(zip(CELLS, run_jobs([partial(train, cell=cell) for cell in CELLS], 4), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_parity(cell, results):
    assert cell.config()["parallel"]["data"]["cpu_offload"]
    assert not find_problems(cell, results[cell])
