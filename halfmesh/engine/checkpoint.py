"""Parts of an engine's state that are neither the update's nor the loop's."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..amp.holdings import Holdings
from ..errors import InputError

KEYS = ("model", "update", "lr_scheduler", "global_step", "dataloader", "random")


class LoadHook:
    """Takes what is loaded into the model to the masters too, or the next step would undo it.

    A copy of the model (deepcopy for an average of its weights, torch.save) gets a hook without masters to reach.
    """

    def __init__(self, adopt: Callable[[Mapping[str, torch.Tensor], str], None] | None) -> None:
        self._adopt = adopt

    def __call__(self, module: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *_: Any) -> None:
        if self._adopt is not None:
            self._adopt(state, prefix)

    def __deepcopy__(self, memo: Any) -> LoadHook:
        return LoadHook(None)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[None]]:
        return LoadHook, (None,)


class AssignCheck:
    """After `model.load_state_dict(..., assign=True)` the optimizer would step parameters that nobody uses."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        theirs = {id(param) for param in module.parameters()}
        if not all(id(param) in theirs for param in self._params):
            raise InputError(
                "load_state_dict(..., assign=True) has replaced the model's parameters, which the optimizer does not "
                "know; load without assign, or load before initialize"
            )

    def __deepcopy__(self, memo: Any) -> AssignCheck:
        return AssignCheck([])

    def __reduce__(self) -> tuple[type[AssignCheck], tuple[list[nn.Parameter]]]:
        return AssignCheck, ([],)


def watch_loads(model: nn.Module, holdings: Holdings) -> list[RemovableHandle]:
    """Keep `holdings` true when somebody loads weights into `model`."""
    trained = [shard.param for shard in holdings.trained]
    return [
        model.register_load_state_dict_pre_hook(LoadHook(holdings.adopt)),
        model.register_load_state_dict_post_hook(AssignCheck(trained)),
    ]


def full_precision_state(model: nn.Module, masters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """`model.state_dict()` with each half-precision parameter replaced by its fp32 value in `masters`."""
    state = model.state_dict()
    first_name = {param: name for name, param in reversed(list(model.named_parameters()))}
    for name, param in model.named_parameters(remove_duplicate=False):  # tied ones under each of their names
        if name in state and first_name[param] in masters:
            state[name] = masters[first_name[param]]
    return state


def refuse_unfit(state: Mapping[str, Any], has_scaler: bool) -> None:
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
    saved = state["update"]["scaler"] is not None
    if saved != has_scaler:
        words = {True: "with a loss scale", False: "without a loss scale"}
        raise InputError(
            f"the state was saved {words[saved]}, but this engine trains {words[has_scaler]}; initialize with the "
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
