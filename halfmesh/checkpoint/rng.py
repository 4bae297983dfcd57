"""The random numbers of a rank: its own, and those of the model where there are several ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ..parallel.context import ParallelContext
from ..parallel.rng import IsolatedRNG, model_seed, random_state, set_random_state

if TYPE_CHECKING:
    from ..division import Division


def rank_random(context: ParallelContext, division: Division) -> dict[str, Any]:
    """All random numbers of this rank."""
    return random_state(context.device) | {
        "rank": context.rank,
        "model": None if division.random is None else division.random.state,
        "host": division.host_random.state,
    }


def set_rank_random(state: Mapping[str, Any], context: ParallelContext, division: Division) -> None:
    """Go on with `rank_random` of the same rank. (Another rank's would repeat its dropout: nothing happens.)"""
    if state["rank"] != context.rank:
        return
    set_random_state(state, context.device)
    if division.random is not None and state["model"] is not None:  # older checkpoints of data ranks have none
        division.random.state = state["model"].cpu()
        division.host_random.state = state["host"]


def seed_anew(seed: int, context: ParallelContext, division: Division) -> None:
    """Seed the model's random numbers: on several ranks its own, as initialize does from the config's seed; in one
    process those of the GPU. (The CPU's also decide the order of the data.)"""
    own = model_seed(seed, context)
    if division.random is not None:
        division.random.state = torch.Generator(context.device).manual_seed(own).get_state()
        division.host_random = IsolatedRNG(own)
    elif context.device.type == "cuda":
        torch.cuda.manual_seed(own)
