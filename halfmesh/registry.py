"""One registry class: names to objects, with lazy built-ins and the entry points of installed packages."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar, overload

from .errors import RegistryError, did_you_mean
from .log import get_logger

T = TypeVar("T")

_log = get_logger(__name__)


class Registry(Generic[T]):
    """Names (lower case, compared without case) to objects of one kind.

    Three ways in: `register` as decorator or call, `register_lazy` with a "module:attribute" reference that is
    imported when first asked for, and entry points of installed packages in the group `entry_point_group`:

        [project.entry-points."halfmesh.amp_plugins"]
        my_mode = "my_package.amp:MyPlugin"

    A registered name wins over an entry point of the same name only when it was registered with `override=True`;
    otherwise that name is refused, and no other.

    Args:
        find_problem: says what is wrong with an object that a package brings, if anything is.
    """

    def __init__(
        self, kind: str, entry_point_group: str, find_problem: Callable[[Any], str | None] = lambda obj: None
    ) -> None:
        self.kind = kind
        self.entry_point_group = entry_point_group
        self._find_problem = find_problem
        self._packages: dict[str, str] = {}
        """Where a name is a package's: " by the package 'name'"."""
        self._taken_twice: dict[str, str] = {}
        self._left_out: set[str] = set()
        self._objects: dict[str, T] = {}
        self._lazy: dict[str, str] = {}
        self._overrides: set[str] = set()
        self._entry_points_read = False

    @overload
    def register(self, name: str, obj: None = None, *, override: bool = False) -> Callable[[T], T]: ...
    @overload
    def register(self, name: str, obj: T, *, override: bool = False) -> T: ...
    def register(self, name: str, obj: Any = None, *, override: bool = False) -> Any:
        """Register `obj` under `name`, or return a decorator that does.

        Raises:
            RegistryError: the name is taken and `override` is False.
        """
        if obj is None:
            return lambda decorated: self.register(name, decorated, override=override)
        key = self._claim(name, override)
        self._objects[key] = obj
        return obj

    def register_lazy(self, name: str, reference: str, *, override: bool = False) -> None:
        """Register the object that `reference` ("package.module:attribute") names; it is imported on first use."""
        self._lazy[self._claim(name, override)] = reference

    def unregister(self, name: str) -> None:
        """Forget `name` (for tests and notebooks that define a plugin twice)."""
        key = _key(name)
        self._objects.pop(key, None)
        self._lazy.pop(key, None)
        self._overrides.discard(key)
        self._packages.pop(key, None)
        self._taken_twice.pop(key, None)

    def get(self, name: str) -> T:
        """The object registered as `name`.

        Raises:
            RegistryError: no such name (the message has the nearest one and the list), a package's that does not work,
                or a package claims a name that was there.
        """
        self._read_entry_points()
        key = _key(name)
        if key in self._taken_twice:
            raise RegistryError(self._taken_twice[key])
        if key not in self._objects and key in self._lazy:
            self._objects[key] = self._load(key)
        if key not in self._objects:
            names = self.names()
            raise RegistryError(
                f"no {self.kind} named {name!r}{did_you_mean(name, names)}; "
                f"registered: {', '.join(names) or 'none'}. A package adds one with the entry point group "
                f"{self.entry_point_group!r} or with the decorator `.register({str(name)!r})`"
            )
        return self._objects[key]

    def peek(self, name: str) -> T | str | None:
        """The object registered as `name`, or the reference of one not imported yet, or None. Imports nothing."""
        self._read_entry_points()
        return self._objects.get(_key(name), self._lazy.get(_key(name)))

    def each(self) -> Iterator[tuple[str, T]]:
        """All names with their objects. What a package brings that does not work is left out, with a warning, for
        nobody has asked for it."""
        for name in self.names():
            try:
                found = self.get(name)
            except RegistryError as error:
                if name not in self._packages:
                    raise
                if name not in self._left_out:
                    self._left_out.add(name)
                    _log.warning("%s; it is left out", error)
                continue
            yield name, found

    def names(self) -> list[str]:
        """All registered names in order of registration."""
        self._read_entry_points()
        return list(dict.fromkeys([*self._lazy, *self._objects]))

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self.names()

    def _claim(self, name: str, override: bool) -> str:
        if not isinstance(name, str) or not name:
            raise RegistryError(
                f"a {self.kind} is registered under a non-empty string, but {name!r} was given; name it"
            )
        key = _key(name)
        taken = self._objects.get(key, self._lazy.get(key))
        if taken is not None and not override:
            raise RegistryError(
                f"the {self.kind} {name!r} is already registered ({_where(taken)}); "
                "choose another name, or pass override=True to replace it"
            )
        self._objects.pop(key, None)
        self._lazy.pop(key, None)
        if override:
            self._overrides.add(key)
            self._packages.pop(key, None)
            self._taken_twice.pop(key, None)
        return key

    def _load(self, key: str) -> T:
        reference = self._lazy[key]
        module, _, attribute = reference.partition(":")
        package = self._packages.get(key)
        failed = f"the {self.kind} {key!r} is registered as {reference!r}{package or ''}, which fails: "
        try:
            found: T = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise RegistryError(f"{failed}{error}") from error
        except Exception as error:  # anything may go wrong in another's module
            raise RegistryError(f"{failed}{type(error).__name__}: {error}") from error
        if package is not None and (problem := self._find_problem(found)) is not None:
            raise RegistryError(f"{failed}{problem}")
        return found

    def _read_entry_points(self) -> None:
        if self._entry_points_read:
            return
        self._entry_points_read = True
        for entry_point in entry_points(group=self.entry_point_group):
            self._add_entry_point(entry_point)

    def _add_entry_point(self, entry_point: EntryPoint) -> None:
        key, package = _key(entry_point.name), _package_of(entry_point)
        # A package found twice on the path repeats itself.
        if key in self._overrides or self._lazy.get(key) == entry_point.value:
            return
        taken = self._objects.get(key, self._lazy.get(key))
        if taken is None:
            self._lazy[key] = entry_point.value
        else:  # what others of this package, and the names of halfmesh, are good for is not touched by it
            self._taken_twice[key] = (
                f"the {self.kind} {key!r} is already registered ({_where(taken)}), and entry point "
                f"{entry_point.value!r}{package} has the same name; rename one of them, "
                "remove the package, or register yours with override=True before the first use"
            )
        self._packages[key] = package


def _key(name: str) -> str:
    return str(name).lower()


def _where(obj: object) -> str:
    if isinstance(obj, str):
        return obj
    named = obj if inspect.isclass(obj) or inspect.isfunction(obj) else type(obj)
    return f"{named.__module__}.{named.__qualname__}"


def _package_of(entry_point: EntryPoint) -> str:
    return f" by the package {entry_point.dist.name!r}" if entry_point.dist is not None else " by a package"
