"""The random numbers of a rank: its own, and those of the model that several ranks compute together."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..parallel.context import ParallelContext
from ..parallel.random import model_seed
from .checkpoint import random_state, set_random_state
from .samplers import OwnRandomness

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
    """Go on with `rank_random` of the same rank. (Another one's would repeat its dropout here: nothing happens.)"""
    if state["rank"] != context.rank:
        return
    set_random_state(state, context.device)
    if division.random is not None:
        division.random.state = state["model"].cpu()
        division.host_random.state = state["host"]


def seed_anew(seed: int, context: ParallelContext, division: Division) -> None:
    """Begin sequences of this rank's own from `seed`, as initialize does from the config's."""
    torch.manual_seed(seed + context.dp_rank)
    random.seed(seed + context.dp_rank)
    np.random.seed((seed + context.dp_rank) % 2**32)
    if division.random is not None:
        own = model_seed(seed, context)
        division.random.state = torch.Generator(context.device).manual_seed(own).get_state()
        division.host_random = OwnRandomness(own)
