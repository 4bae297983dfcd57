"""How far a step and a config walk through the house: files entered, and calls made, of a small model's update."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import sgd
from tests.support.ranks import here, rank_device, run_ranks

HOUSE = str(Path(halfmesh.__file__).parent)
CONFIG = {"fp16": {"mode": "naive"}, "gradient_accumulation": 2, "clip_grad_norm": 1.0}
PIPELINE = {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["4"]}}}


def walk(work) -> Counter[str]:
    """Calls of functions of halfmesh by file, while `work` is done. (Comprehensions are no calls since Python 3.12.)"""
    calls: Counter[str] = Counter()

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HOUSE) and not code.co_name.startswith("<"):
            calls[code.co_filename.removeprefix(HOUSE + "/")] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return calls


def make_engine(config):
    model = nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())))  # ten tensors
    optimizer = sgd(model.parameters())
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device=rank_device())


def update(engine, batch):
    for _ in range(engine.config.gradient_accumulation):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(batch), batch))
        engine.step()


def walks(rank, world_size, config):
    """Of initialize, and of the third update."""
    engines = []
    first = walk(lambda: engines.append(make_engine(config)))
    batch = here(torch.randn(4, 8))
    for _ in range(2):
        update(engines[0], batch)
    return first, walk(lambda: update(engines[0], batch))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("config", "limits"), [(CONFIG, (53, 16, 246)), (PIPELINE, (57, 23, 334))], ids=["naive", "pipeline"]
)
def test_a_step_walks_through_few_files(config, limits):
    """Files that `initialize` enters, files that an update enters, and its calls. The limits may only fall."""
    found = run_ranks(walks, 2, config)
    counts = [(len(start), len(step), step.total()) for start, step in found]
    most = tuple(map(max, zip(*counts, strict=True)))
    assert all(value <= limit for value, limit in zip(most, limits, strict=True)), (most, found)
