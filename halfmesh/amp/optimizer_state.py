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
    for inner in _find_inner(vars(optimizer).values(), {id(optimizer)}):
        entries = [(key, values) for key, values in inner.state.items() if isinstance(values, Mapping)]
        if any(values.keys() - state.get(key, {}).keys() for key, values in entries):
            outer, name = type(optimizer).__name__, type(inner).__name__
            raise InputError(
                f"{outer} holds another optimizer, {name}, and {outer}.state_dict() leaves out its state, which would "
                f"be lost; give {outer} a state_dict() and load_state_dict() with the state of {name} in 'state', by "
                "parameter, or use one optimizer for all parameters (with several groups)"
            )
    return state


def _find_inner(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """The optimizers among `values`, in containers among them, and inside of these optimizers."""
    for value in values:
        is_optimizer = isinstance(getattr(value, "state", None), Mapping) and hasattr(value, "param_groups")
        if id(value) in seen or not (is_optimizer or isinstance(value, (list, tuple, set, Mapping))):
            continue
        seen.add(id(value))
        if is_optimizer:
            yield value
            value = {key: held for key, held in vars(value).items() if key not in ("state", "param_groups")}
        yield from _find_inner(value.values() if isinstance(value, Mapping) else value, seen)
