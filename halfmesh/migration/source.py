"""Another engine's config as a flat table: one row for each value, under its dotted name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import show


class Code(str):
    """Source text of a value that is not known without running it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


class Source:
    """The values of a nested dict.

    Args:
        prefixes: parts that may stand before a key, or not; rules do not see them.
        world_size: the number of ranks, if the user gave it.

    Attributes:
        names: for each value's full name (unique): the name without prefix, and the value. Empty dicts are values.
    """

    def __init__(
        self, data: Mapping[Any, Any], prefixes: Sequence[tuple[str, ...]] = (), world_size: int | None = None
    ) -> None:
        self.world_size = world_size
        self.names: dict[str, tuple[str, Any]] = {}
        self._by_name: dict[str, Any] = {}
        ordered = sorted(prefixes, key=len, reverse=True)
        for path, value in _flatten(data, ()):
            cut = next((len(one) for one in ordered if path[: len(one)] == one and len(path) > len(one)), 0)
            name = _join(path[cut:])
            full = _join(path)
            while full in self.names:  # long names are shortened, perhaps to the same
                full += "'"
            self.names[full] = (name, value)
            self._by_name.setdefault(name, value)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of that name; `default` where there is none, or where it is not known."""
        value = self._by_name.get(name, default)
        return default if isinstance(value, Code) else value

    def has(self, name: str) -> bool:
        """Whether there is a value of that name, or one below it."""
        return any(one == name or one.startswith(f"{name}.") for one in self._by_name)

    def whole(self, name: str, default: int) -> int:
        """`get`, where it is a whole number of at least 1."""
        value = self.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else default


def _flatten(value: Mapping[Any, Any], path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, item in value.items():
        if isinstance(item, Mapping) and item:
            yield from _flatten(item, (*path, key))
        else:
            yield (*path, key), item


def _join(path: Sequence[Any]) -> str:
    return ".".join(part if _is_plain(part) else f"[{show(part, 120)}]" for part in path)


def _is_plain(part: Any) -> bool:
    return isinstance(part, str) and part.replace("-", "_").replace(" ", "_").isidentifier() and len(part) <= 120
