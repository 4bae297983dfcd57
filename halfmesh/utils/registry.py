"""The registry class that all extension points use: names of built-in, user and third-party objects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from ..errors import RegistryError, did_you_mean
from .log import get_logger

T = TypeVar("T")

_log = get_logger(__name__)


class Registry(Generic[T]):
    """A mapping from names to objects of one kind. Names are compared without case.

    There are three ways to register an object: `register`, as a decorator or a call; `register_lazy`, with a
    "module:attribute" reference that is imported on first use; and an entry point of an installed package, in the
    group `entry_point_group`:

        [project.entry-points."halfmesh.amp_plugins"]
        my_mode = "my_package.amp:MyPlugin"

    A name can be registered once, unless `override=True` replaces it. An entry point whose name is taken is ignored
    with a warning.

    Args:
        kind: the kind of the objects, for messages ("AMP mode").
        entry_point_group: the group of entry points, which is read when the registry is first used.
        find_problem: returns what is wrong with an imported object, or None.
    """

    def __init__(
        self, kind: str, entry_point_group: str, find_problem: Callable[[Any], str | None] = lambda obj: None
    ) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._find_problem = find_problem
        self._entries: dict[str, Any] = {}
        self._entry_points_read = False

    def register(self, name: str, obj: Any = None, *, override: bool = False) -> Any:
        """Register `obj` under `name`. Without `obj`, return a decorator.

        Raises:
            RegistryError: `name` is not a string, or it is taken and `override` is False.
        """
        if not isinstance(name, str):
            raise RegistryError(f"a {self.kind} needs a name: write register('name'), not register({name!r})")
        if obj is None:
            return lambda decorated: self.register(name, decorated, override=override)
        taken = self._entries.get(name.lower())
        if taken is not None and not override:
            shown = getattr(taken, "value", taken)
            raise RegistryError(
                f"the {self.kind} {name!r} is already registered ({shown}); choose another name, or pass override=True"
            )
        self._entries[name.lower()] = obj
        return obj

    def register_lazy(self, name: str, reference: str, *, override: bool = False) -> None:
        """Register the object at `reference` ("package.module:attribute"), which is imported on first use.

        Raises:
            RegistryError: `name` is not a string, or it is taken and `override` is False.
        """
        self.register(name, EntryPoint(name, reference, self.entry_point_group), override=override)

    def unregister(self, name: str) -> None:
        """Remove `name`, for tests and notebooks that define a plugin twice. Does nothing if it is not registered."""
        self._entries.pop(name.lower(), None)

    def get(self, name: str) -> T:
        """Return the object registered as `name`.

        Raises:
            RegistryError: the name is not registered (the message suggests the nearest one and lists all), or its
                object cannot be imported or is not of this kind.
        """
        key, names = str(name).lower(), self.names()
        if key not in names:
            known = ", ".join(names) or "none"
            raise RegistryError(
                f"no {self.kind} named {name!r}{did_you_mean(name, names) or '.'} Registered: {known}. A package adds "
                f"one with the entry point group {self.entry_point_group!r}"
            )
        if isinstance(self._entries[key], EntryPoint):
            self._entries[key] = self._import(key, self._entries[key])
        found: T = self._entries[key]
        return found

    def each(self) -> Iterator[tuple[str, T]]:
        """Iterate over all names and their objects. If an object from another package cannot be used, it is dropped
        with a warning, because nobody requested it by name."""
        for name in self.names():
            try:
                found = self.get(name)
            except RegistryError as error:
                if self._entries[name].dist is None:  # halfmesh's own
                    raise
                self.unregister(name)
                _log.warning("%s; it is left out", error)
            else:
                yield name, found

    def names(self) -> list[str]:
        """Return all registered names, in order of registration."""
        self._read_entry_points()
        return list(self._entries)

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name.lower() in self.names()

    def _import(self, key: str, reference: EntryPoint) -> Any:
        cause: Exception | None = None
        try:
            found = reference.load()
            problem = self._find_problem(found)
        except Exception as error:  # importing a module may raise anything
            cause, problem = error, f"{type(error).__name__}: {error}"
        if problem is not None:
            by = "" if reference.dist is None else f" by the package {reference.dist.name!r}"
            message = f"the {self.kind} {key!r} is registered as {reference.value!r}{by}, which fails: {problem}"
            raise RegistryError(message) from cause
        return found

    def _read_entry_points(self) -> None:
        points = () if self._entry_points_read else entry_points(group=self.entry_point_group)
        self._entry_points_read = True
        for point in points:
            if self._entries.setdefault(point.name.lower(), point) is not point:
                package = point.dist.name if point.dist else "?"
                _log.warning(
                    f"the {self.kind} {point.name!r} of the package {package!r} is left out: the name is taken"
                )
