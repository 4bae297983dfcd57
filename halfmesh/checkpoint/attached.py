"""State of the loop's own that is saved with the engine's."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from ..errors import InputError


class Stateful(Protocol):
    """What has state of its own, of plain values and tensors."""

    def state_dict(self) -> Mapping[str, Any]: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Attached:
    """Objects by name. What was loaded for a name that nobody has attached yet waits for it, and is saved on."""

    def __init__(self) -> None:
        self._objects: dict[str, Stateful] = {}
        self._waiting: dict[str, Any] = {}

    def attach(self, name: str, holder: Stateful) -> None:
        """Raises InputError if the name is taken, or `holder` has no state."""
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(holder, method, None)):
                raise InputError(
                    f"engine.attach({name!r}, {type(holder).__name__}): an object with state_dict() and "
                    f"load_state_dict(state) is expected, and this one has no {method}"
                )
        if name in self._objects:
            raise InputError(
                f"engine.attach({name!r}, ...): the name is taken by a {type(self._objects[name]).__name__}; give "
                "another one, or call engine.detach first"
            )
        if name in self._waiting:
            holder.load_state_dict(self._waiting[name])
            del self._waiting[name]
        self._objects[name] = holder

    def detach(self, name: str, keep: bool = True) -> None:
        """Raises InputError if nothing of that name is there."""
        if name not in self._objects:
            raise InputError(
                f"engine.detach({name!r}): nothing of that name is attached, only: {', '.join(self._objects) or '-'}"
            )
        holder = self._objects.pop(name)
        if keep:
            self._waiting[name] = copy.deepcopy(dict(holder.state_dict()))

    def state_dict(self) -> dict[str, Any]:
        return self._waiting | {name: dict(holder.state_dict()) for name, holder in self._objects.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Iterator[str]:
        """Yields what stays as it is, because the state of it was not saved."""
        self._waiting = dict(state)
        for name, holder in self._objects.items():
            if name in self._waiting:
                holder.load_state_dict(self._waiting.pop(name))
            else:
                yield f"it has no state of {name!r} (engine.attach), which stays as it is"
