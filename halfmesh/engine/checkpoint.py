"""Parts of an engine's state that are neither the update's nor the loop's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..errors import InputError

KEYS = ("model", "update", "lr_scheduler", "global_step", "dataloader", "random")


def refuse_unfit(state: Mapping[str, Any], scalers: int) -> None:
    """Raise InputError if `state` is not one of an engine like this."""
    if not isinstance(state, Mapping):
        raise InputError(
            f"engine.load_state_dict takes what engine.state_dict() gave, but a {type(state).__name__} came"
        )
    missing = [key for key in KEYS if key not in state]
    if missing:
        raise InputError(
            f"this is not the state of an engine: {', '.join(missing)} missing; pass what engine.state_dict() gave "
            "(for a model's own state use engine.model.load_state_dict)"
        )
    saved = len(state["update"]["scalers"])
    if saved != scalers:
        words = {0: "without a loss scale", 1: "with a loss scale"}
        raise InputError(
            f"the state was saved {words.get(saved, f'with {saved} loss scales')}, but this engine trains "
            f"{words.get(scalers, f'with {scalers} (num_losses)')}; initialize with the "
            "precision it was saved with, or load only its weights: engine.model.load_state_dict(state['model'])"
        )


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of every random generator that training may use on this rank."""
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, position, has_gauss, cached = legacy
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Undo the draws made since `random_state`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)
