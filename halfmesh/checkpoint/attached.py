"""State of the loop's own objects, which is saved with the engine's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..errors import InputError


class Stateful(Protocol):
    """What has state of its own, of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


class AttachedState:
    """What `Engine.attach` was given, by name; and what was loaded for names that nobody has attached yet."""

    def __init__(self) -> None:
        self._holders: dict[str, Stateful] = {}
        self._unclaimed: dict[str, Any] = {}

    def attach(self, name: str, holder: Stateful) -> None:
        """`Engine.attach`."""
        if name in self._holders:
            raise InputError(
                f"engine.attach({name!r}, ...): the name is taken by a {type(self._holders[name]).__name__}; give "
                "another one, or call engine.detach first"
            )
        if name in self._unclaimed:
            holder.load_state_dict(self._unclaimed[name])
            del self._unclaimed[name]
        self._holders[name] = holder

    def detach(self, name: str, keep: bool) -> None:
        """`Engine.detach`."""
        if name not in self._holders:
            names = ", ".join(self._holders) or "-"
            raise InputError(f"engine.detach({name!r}): nothing of that name is attached, only: {names}")
        holder = self._holders.pop(name)
        if keep:
            self._unclaimed[name] = copy.deepcopy(dict(holder.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        """By name; what nobody has attached is saved, too."""
        return self._unclaimed | {name: dict(holder.state_dict()) for name, holder in self._holders.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields what stays as it is, because the state of it was not saved."""
        self._unclaimed = dict(state)
        for name, holder in self._holders.items():
            if name in self._unclaimed:
                holder.load_state_dict(self._unclaimed.pop(name))
            else:
                yield f"it has no state of {name!r} (engine.attach), which stays as it is"
