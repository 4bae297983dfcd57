"""Joins several optimizers over disjoint parameters to one, for `initialize(model, [muon, adamw])`."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch import optim

from ..errors import InputError


def _on_each(name: str) -> Any:
    def register(self: JoinedOptimizer, *args: Any, **kwargs: Any) -> Removable:
        return Removable([getattr(part, name)(*args, **kwargs) for part in self.parts])

    return register


class Removable:
    """The handles of one hook on several optimizers."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Remove the hook from each."""
        for handle in self._handles:
            handle.remove()


class JoinedOptimizer(optim.Optimizer):
    """Several optimizers, each over separate parameters, as one. They stay the user's: rates may be set on them.

    Its groups are theirs, one after another, the same dicts; its state is a view of theirs, and its state dict has the
    form of one optimizer with all of the groups. A hook that is registered here is registered on each of them.

    Attributes:
        parts: the optimizers, in the order in which they were given.
    """

    def __init__(self, parts: Sequence[optim.Optimizer]) -> None:
        # Without Optimizer.__init__, which would create separate groups, state and hooks.
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:  # copied and pickled as its parts are
        return JoinedOptimizer, (self.parts,)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts. To add one, add it to a part."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> JoinedState:  # type: ignore[override]
        """The state of all parts, by parameter."""
        return JoinedState(self.parts)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each part."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Rejected: which of the parts should step it?"""
        raise InputError(
            f"add_param_group was called on {len(self.parts)} optimizers together; call it on the one that should "
            "step the parameters, as in engine.optimizer.parts[0].add_param_group(...)"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict as of one optimizer: "state" and "param_groups", with parameters numbered through.
        "others" has the further entries of each part's state dict."""
        state, groups, others, first = dict[int, Any](), list[dict[str, Any]](), list[dict[str, Any]](), 0
        for part in self.parts:
            saved = part.state_dict()
            own = saved.pop("state"), saved.pop("param_groups")
            state |= {key + first: value for key, value in own[0].items() if isinstance(key, int)}
            groups += [{**group, "params": [number + first for number in group["params"]]} for group in own[1]]
            others.append({**saved, "state": {key: v for key, v in own[0].items() if not isinstance(key, int)}})
            first += sum(len(group["params"]) for group in own[1])
        return {"state": state, "param_groups": groups, "others": others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore `state_dict`, part by part. Raises ValueError if it has other groups; nothing has changed then."""
        groups = state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in self.param_groups]:
            raise ValueError("loaded state dict has other parameter groups, or groups of another size")
        for part, other in zip(self.parts, state_dict.get("others", [{}] * len(self.parts)), strict=True):
            mine, groups = groups[: len(part.param_groups)], groups[len(part.param_groups) :]
            numbers = {number: at for at, number in enumerate(n for group in mine for n in group["params"])}
            state = {numbers[key]: value for key, value in state_dict["state"].items() if key in numbers}
            mine = [{**group, "params": [numbers[number] for number in group["params"]]} for group in mine]
            part.load_state_dict({**other, "state": {**other.get("state", {}), **state}, "param_groups": mine})

    register_step_pre_hook = _on_each("register_step_pre_hook")
    register_step_post_hook = _on_each("register_step_post_hook")
    register_state_dict_pre_hook = _on_each("register_state_dict_pre_hook")
    register_state_dict_post_hook = _on_each("register_state_dict_post_hook")
    register_load_state_dict_pre_hook = _on_each("register_load_state_dict_pre_hook")
    register_load_state_dict_post_hook = _on_each("register_load_state_dict_post_hook")


class JoinedState(ChainMap[Any, Any]):
    """The state of several optimizers as one mapping. New entries go to the optimizer that holds the parameter; as of
    one optimizer, the state of a parameter before its first step is an empty dict."""

    def __init__(self, parts: Sequence[optim.Optimizer]) -> None:
        super().__init__(*(part.state for part in reversed(parts)))  # it iterates over the last one first
        self._parts = parts

    def _find(self, key: Any) -> Any:
        """The state of the optimizer that has the entry `key`, or holds this parameter."""
        for part in self._parts:
            if key in part.state or any(param is key for group in part.param_groups for param in group["params"]):
                return part.state
        raise KeyError("state of a tensor that none of the optimizers holds" if torch.is_tensor(key) else key)

    def __getitem__(self, key: Any) -> Any:
        return self._find(key)[key]

    def setdefault(self, key: Any, default: Any = None) -> Any:
        return self._find(key).setdefault(key, default)

    def copy(self) -> JoinedState:
        return JoinedState(self._parts)

    __copy__ = copy

    def __setitem__(self, key: Any, value: Any) -> None:
        self._find(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._find(key)[key]

    pop, popitem, clear = MutableMapping.pop, MutableMapping.popitem, MutableMapping.clear  # type: ignore[assignment]
