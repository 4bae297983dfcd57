"""Moves an optimizer's state to another parameter, device or dtype, cuts shards of it, and converts it for checkpoints;
also the state of several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from ..errors import InputError
from .joined_optimizer import JoinedOptimizer


def join_optimizers(given: Any) -> Any:
    """One optimizer in place of a list of optimizers; anything else as it is."""
    several = given if isinstance(given, (list, tuple)) else [given]
    if not all(isinstance(one, optim.Optimizer) for one in several):
        return given
    parts = [part for one in several for part in parts_of(one)]
    for part in parts:
        _complete(part)
    return JoinedOptimizer(parts) if len(parts) > 1 else next(iter(parts), given)


def _complete(optimizer: optim.Optimizer) -> None:
    """Give an optimizer that steps another one, but did not call Optimizer.__init__ (timm's Lookahead), what it lacks:
    the state of that one, whose groups it shares, and hooks, of which those on loads are that one's."""
    is_complete = hasattr(optimizer, "_optimizer_load_state_dict_post_hooks")
    if is_complete or type(optimizer).load_state_dict is optim.Optimizer.load_state_dict:
        return
    inner = inner_optimizers(optimizer)
    if len(inner) == 1 and inner[0].param_groups is optimizer.param_groups:
        optimizer.__setstate__({"state": inner[0].state})
        vars(optimizer)["register_load_state_dict_post_hook"] = inner[0].register_load_state_dict_post_hook
        inner[0].register_load_state_dict_post_hook(
            lambda loaded: vars(optimizer).update(state=loaded.state, param_groups=loaded.param_groups)
        )


def parts_of(optimizer: optim.Optimizer) -> tuple[optim.Optimizer, ...]:
    """The optimizers that were joined to `optimizer`, or itself."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def kinds_of(optimizer: optim.Optimizer) -> str:
    """The classes of an optimizer's parts, in words: "Muon and AdamW"."""
    return " and ".join(type(part).__name__ for part in parts_of(optimizer))


def steps_whole(optimizer: optim.Optimizer) -> bool:
    """Return True if `optimizer` has declared that it steps a parameter as a whole; `initialize` declares it for those
    that it has tried (`halfmesh.parallel.trial.find_unit`)."""
    return getattr(optimizer, "unit", "element") != "element"


def change_state(
    optimizer: optim.Optimizer, param: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace the values in the state of `param` that have one element per element of `param`."""
    state = optimizer.state.get(param, {})
    for name, value in state.items():
        # `step` is a counter, in torch's optimizers, and a scalar, as a parameter may be.
        if name != "step" and isinstance(value, torch.Tensor) and value.shape == param.shape:
            state[name] = change(value)


def repoint(
    optimizer: optim.Optimizer,
    new: Mapping[nn.Parameter, nn.Parameter],
    change: Callable[[nn.Parameter, torch.Tensor], torch.Tensor],
) -> None:
    """Replace parameters of `optimizer`, at the same index of the same groups, and give their state to the new ones.

    Args:
        new: the new parameter for each one that is replaced.
        change: called with a parameter and a value of its state, as in `change_state`; returns the new value.
    """
    for group in optimizer.param_groups:
        group["params"][:] = [new.get(param, param) for param in group["params"]]
    for param, other in new.items():
        if other is not param and param in optimizer.state:
            change_state(optimizer, param, partial(change, param))
            optimizer.state[other] = optimizer.state.pop(param)


def cast_state(optimizer: optim.Optimizer, dtypes: Mapping[torch.Tensor, torch.dtype]) -> None:
    """Cast the state of parameters that had another dtype before (`dtypes`), where the state also has it."""
    for param, before in dtypes.items():
        change_state(optimizer, param, partial(cast, before=before, dtype=param.dtype))


def cast(value: torch.Tensor, before: torch.dtype, dtype: torch.dtype) -> torch.Tensor:
    """`value` in `dtype` if it is in `before`: state in another dtype than its parameter's keeps that."""
    return value.to(dtype) if value.dtype == before else value


def move_state(optimizer: optim.Optimizer) -> None:
    """Move state to its parameters' devices; the step counters of unfused optimizers stay on the CPU, as in torch."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                state[name] = value.to(param.device)


def saved_state(optimizer: optim.Optimizer) -> Mapping[torch.Tensor, dict[str, Any]]:
    """The state in `optimizer.state_dict()`, by parameter, with that of optimizers inside it (as in a Lookahead over
    another optimizer).

    Raises:
        InputError: the state of an optimizer inside it would be lost.
    """
    if len(parts := parts_of(optimizer)) > 1:
        return {param: values for part in parts for param, values in saved_state(part).items()}
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
    for inner in inner_optimizers(optimizer):
        entries = {key: values for key, values in inner.state.items() if isinstance(values, Mapping) and values}
        is_there = all(values.keys() <= state.get(key, {}).keys() for key, values in entries.items())
        if entries and not (is_there and gives_back):
            why = "load_state_dict() does not restore it" if is_there else "state_dict() leaves it out"
            raise InputError(
                f"{outer} holds another optimizer, {type(inner).__name__}, whose state would be lost: {outer}.{why}; "
                "have its state in 'state', by parameter, or pass initialize a list of optimizers"
            )
    return state


def inner_optimizers(optimizer: optim.Optimizer) -> list[Any]:
    """The optimizers inside of `optimizer`, as in a Lookahead over another one."""
    return list(_find_inner(vars(optimizer), {id(optimizer)}))


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


def reject_other_state(optimizer: optim.Optimizer) -> None:
    """Raise InputError if `optimizer`, whose parameters are shards, holds state of another shape: fused optimizers
    would read beyond the shard's memory. Those that step whole parameters keep state of these."""
    for param, state in () if steps_whole(optimizer) else optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                raise InputError(
                    f"the loaded optimizer state has {name!r} of shape {tuple(value.shape)}, but this rank holds "
                    f"{tuple(param.shape)} of the parameter; load what the same rank saved in the same layout"
                )


def plain_settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The plain values of a parameter group. (Reprs of objects may have addresses, which differ between ranks.)"""
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    return [(name, value) for name, value in sorted(values.items()) if name != "params" and is_plain(value)]


def is_plain(value: Any) -> bool:
    """Return True if `value` is a number, a string or None, or a tuple or list of these: equal if their reprs are."""
    if isinstance(value, (tuple, list)):
        return all(map(is_plain, value))
    return value is None or isinstance(value, (int, float, str))
