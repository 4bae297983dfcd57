"""The saved state of each parameter in an optimizer's state dict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import optim

from ..errors import InputError


def saved_state(optimizer: optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The state in `optimizer.state_dict()`, by parameter, with that of optimizers inside it (as in a Lookahead over
    another optimizer).

    Raises:
        InputError: the state of an optimizer inside it would be lost.
    """
    state: Mapping[torch.Tensor, dict[str, Any]] = optimizer.state
    if type(optimizer).state_dict is not optim.Optimizer.state_dict:
        packed = optimizer.state_dict()
        state = {
            param: packed.get("state", {}).get(key, {})
            for group, names in zip(optimizer.param_groups, packed.get("param_groups", ()), strict=False)
            for param, key in zip(group["params"], names["params"], strict=True)
        }
    # torch's `load_state_dict` replaces state and groups that an inner optimizer may share.
    gives_back = type(optimizer).load_state_dict is not optim.Optimizer.load_state_dict
    outer = type(optimizer).__name__
    for inner in _find_inner(vars(optimizer), {id(optimizer)}):
        entries = {key: values for key, values in inner.state.items() if isinstance(values, Mapping) and values}
        is_there = all(values.keys() <= state.get(key, {}).keys() for key, values in entries.items())
        if entries and not (is_there and gives_back):
            name = type(inner).__name__
            why = "load_state_dict() does not give it back" if is_there else "state_dict() leaves it out"
            raise InputError(
                f"{outer} holds another optimizer, {name}, whose state would be lost: {outer}.{why}; give {outer} a "
                f"state_dict() and a load_state_dict() with the state of {name} in 'state', by parameter, or use one "
                "optimizer for all parameters (with several groups)"
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
