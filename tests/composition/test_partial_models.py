"""Models in which not every parameter has a gradient, on every rank or on some, train to parity, too."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.support.ranks import run_jobs

from .cells import Cell, Pipe
from .parity import find_problems
from .reference import reference
from .training import train

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

HALF = ("torch_fp16", "torch_bf16", "naive_fp16", "naive_bf16")
CELLS = [
    *(Cell(mode, "branching", tensor=2, data=2, clip_grad_norm=True) for mode in ("none", *HALF)),
    Cell("none", "branching", tensor=2, data=2, gradient_accumulation=2, reduce_dtype="bfloat16"),
    *(Cell(mode, "frozen_gpt", 2, 2, sequence_parallel=True, clip_grad_norm=True) for mode in ("none", *HALF)),
    Cell("naive_fp16", "frozen_gpt", tensor=2, data=2, gradient_accumulation=2),
    Cell("none", "frozen_vit", tensor=2, data=2, clip_grad_norm=True),
    Cell("naive_fp16", "frozen_vit", tensor=2, data=2, sequence_parallel=True),
    *(Cell(mode, "frozen_gpt", data=2, clip_grad_norm=True, pipeline=Pipe(2, "1f1b", 4)) for mode in ("none", *HALF)),
    Cell("naive_fp16", "frozen_vit", tensor=2, sequence_parallel=True, pipeline=Pipe(2, "interleaved", 2, 2)),
    Cell("torch_bf16", "frozen_gpt", pipeline=Pipe(4, "gpipe", 2)),  # the first stages have nothing to train
]


@pytest.fixture(scope="module")
def results():
    return dict(zip(CELLS, run_jobs([partial(train, cell=cell) for cell in CELLS], 4), strict=True))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_trains_to_parity(cell, results):
    problems = find_problems(cell, results[cell])
    assert not problems, "\n".join([str(cell), *problems])
    expected = reference(cell.model, cell.clip_grad_norm, cell.scaled)
    for name, param in expected.model.named_parameters():
        stays = param.grad is None
        assert torch.equal(results[cell][0].weights[name], expected.start[name]) == stays, name
