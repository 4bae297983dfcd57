"""`engine.close()` of a sharded model frees what it held and gathers nothing; the model says that it is sharded."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import said
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.real_memory import RealTracker

pytestmark = [pytest.mark.distributed, pytest.mark.sends]

WIDTH = 64
LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ("2",)}},
}


def make(layout: str, **config: Any) -> tuple[nn.Module, torch.optim.Optimizer, halfmesh.Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config["parallel"] = LAYOUTS[layout]
    return model, optimizer, halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device=rank_device())


def train(engine: halfmesh.Engine) -> None:
    x = here(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)))
    for _ in range(2):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), x))
        engine.step()


def close_and_watch(rank: int, world_size: int) -> dict[str, tuple[int, int, int, list[str]]]:
    """For each layout bytes before, at most while closing, and when all is gone; and what was sent."""
    found = {}
    for layout in LAYOUTS:
        tracker = RealTracker()
        with tracker:
            start = tracker.settled()
            model, optimizer, engine = make(layout, bf16={"mode": "naive"})
            train(engine)
            before = tracker.settled() - start
            tracker.peak = tracker.alive
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                engine.close()
            sent = [event.key for event in profile.key_averages() if event.key.startswith(("c10d::", "gloo:", "nccl:"))]
            on_its_way = 4 if rank_device().type == "cuda" else 0  # a counter of steps, to the host
            peak = tracker.peak - start - on_its_way
            del model, optimizer, engine
            found[layout] = before, peak, tracker.settled() - start, sent
        gc.collect()
    return found


def test_closing_takes_no_memory_and_sends_nothing():
    for found in run_ranks(close_and_watch, 2, timeout=120):
        for layout, (before, peak, after, sent) in found.items():
            assert peak <= before, layout
            assert after < before / 4, layout  # what threads of gloo hold a moment longer
            assert sent == [], layout


def left_in_parts(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """What is said after a plain close of a state dict, and of the model when it is given to initialize again."""
    found = {}
    for layout in ("fsdp", "tensor", "pipeline"):
        model, optimizer, engine = make(layout)
        engine.close()
        heard: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record, heard=heard: heard.append(record.getMessage())
        logging.getLogger("halfmesh.engine.executor").addHandler(handler)
        model.state_dict()
        again = said(halfmesh.initialize, model, optimizer, nn.MSELoss(), config={}, device=rank_device())
        found[layout] = " ".join(heard), again
    return found


def test_a_model_that_stays_in_parts_says_so():
    for rank, found in enumerate(run_ranks(left_in_parts, 2, timeout=120)):
        for layout, (warned, rejected) in found.items():
            told = "engine.full_state_dict() on every rank, before the engine is closed" in warned
            assert told == (rank == 0), layout  # which speaks for all
            words = (
                "already quantized or sharded" if layout == "fsdp" else "it stays so after close; build the model again"
            )
            assert words in rejected, (layout, rejected)
