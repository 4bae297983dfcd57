"""What an optimizer's state dict holds of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import optim

from ..errors import InputError


def saved_state(optimizer: optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The state that `optimizer.state_dict()` holds, by parameter; it also holds that of the optimizers inside it, as
    that of a Lookahead over another one does.

    Raises:
        InputError: the state of an optimizer inside it is not there, and would be lost.
    """
    state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    if type(optimizer).state_dict is not optim.Optimizer.state_dict:
        packed = optimizer.state_dict()
        state = {
            param: packed.get("state", {}).get(key, {})
            for group, names in zip(optimizer.param_groups, packed.get("param_groups", ()), strict=False)
            for param, key in zip(group["params"], names["params"], strict=True)
        }
    for inner in _find_inner(vars(optimizer), {id(optimizer)}):
        entries = [(key, values) for key, values in inner.state.items() if isinstance(values, Mapping)]
        if any(values.keys() - state.get(key, {}).keys() for key, values in entries):
            outer, name = type(optimizer).__name__, type(inner).__name__
            raise InputError(
                f"{outer} holds another optimizer, {name}, and {outer}.state_dict() leaves out its state, which would "
                f"be lost; give {outer} a state_dict() and load_state_dict() with the state of {name} in 'state', by "
                "parameter, or use one optimizer for all parameters (with several groups)"
            )
    return state


def _find_inner(held: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """The optimizers in the container `held`, in containers in it, and inside of these optimizers."""
    for value in held.values() if isinstance(held, Mapping) else held:
        if id(value) in seen:
            continue
        seen.add(id(value))
        if hasattr(value, "param_groups") and isinstance(getattr(value, "state", None), Mapping):
            yield value
            yield from _find_inner({**vars(value), "state": (), "param_groups": ()}, seen)
        elif isinstance(value, (list, tuple, set, Mapping)):
            yield from _find_inner(value, seen)
