"""What ranks of a real run hold, to compare plans with."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import optim

import halfmesh
from tests.support import llama
from tests.support.ranks import here, rank_device
from tests.support.real_memory import RealTracker


def measure(rank: int, world_size: int, config: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes between two updates and at most within one, and elements of the parameters, of a run of `llama.small`."""
    torch.manual_seed(0)
    model, (inputs, targets), criterion = here(llama.small())
    tracker = RealTracker([inputs])
    with tracker:
        gc.collect()
        model, _, criterion = llama.small()
        engine = halfmesh.initialize(model, optim.AdamW, criterion, config=config, device=rank_device())
        for step in range(3):
            engine.zero_grad()
            if step == 2:
                kept = tracker.peak = tracker.settled()
            for _ in range(engine.config.gradient_accumulation):
                loss = engine.criterion(engine(inputs), targets)
                engine.backward(loss)
                del loss
                engine.step()
            assert engine.global_step == step + 1
    numel = sum(param.numel() for param in engine.model.parameters())
    engine.close()
    return kept, tracker.peak, numel
