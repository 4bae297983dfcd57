"""One outcome for each value of a source, and the config that they make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.config import Config, build_leniently
from ..errors import cut, did_you_mean
from .outcome import Converted, NotUnderstood, Outcome, Rule, UnreadableError, Without
from .source import Code, Source

_MOST_SUGGESTED = 1000
"""Values of a source that are looked up among similar names, at most."""

_EACH_BATCH = (
    "gradient_accumulation counts batches itself: delete the `if (i + 1) % N == 0` around the step and the `/ N` of "
    "the loss, and call engine.step() for each batch"
)


def _nothing(source: Source) -> Mapping[str, Any]:
    return {}


def _no_ranks(source: Source) -> int | None:
    return None


@dataclass(frozen=True)
class Origin:
    """An engine whose configs are understood.

    Attributes:
        title: its name in sentences.
        rules: by dotted key; a name that ends in `.*` takes what is below it and has no rule of its own.
        prefixes: what may stand before its keys.
        others: a rule for keys that `rules` does not have, or None.
        defaults: settings that follow from what the source does not say.
        looks: what the user should look at, beside single keys.
        world_size: the number of ranks, where the source says it.
        fills_in: a value that stands for "filled in later", if there is one.
    """

    title: str
    rules: Mapping[str, Rule]
    prefixes: tuple[tuple[str, ...], ...] = ()
    others: Callable[[str, Any], Rule | None] = lambda name, value: None
    defaults: Callable[[Source], Mapping[str, Any]] = _nothing
    looks: Callable[[Source], tuple[str, ...]] = lambda source: ()
    world_size: Callable[[Source], int | None] = _no_ranks
    fills_in: str | None = None


@dataclass(frozen=True)
class Entry:
    """What became of one value."""

    key: str
    value: Any
    outcome: Outcome


@dataclass(frozen=True)
class Conversion:
    """The whole of it.

    Attributes:
        entries: one for each value of the source, in its order.
        settings: the config, nested, as a user would write it.
        looks: what the user should look at, beside the entries' own.
        world_size: the number of ranks, where it is known.
        findings: what keeps the config from running.
    """

    entries: tuple[Entry, ...]
    settings: Mapping[str, Any]
    config: Config
    looks: tuple[str, ...] = ()
    world_size: int | None = None
    findings: tuple[str, ...] = ()

    def of(self, kind: type[Outcome]) -> list[Entry]:
        """The entries whose outcome is of that kind."""
        return [entry for entry in self.entries if isinstance(entry.outcome, kind)]


def convert(origin: Origin, data: Mapping[Any, Any], world_size: int | None = None, device: str = "cuda") -> Conversion:
    """Convert what was read from another engine's config.

    Args:
        world_size: the number of ranks; None: what the source says, if it does.
        device: the kind of device that the config is checked for.
    """
    source = Source(data, origin.prefixes, world_size)
    if world_size is None:
        source.world_size = world_size = origin.world_size(source)
    entries = [Entry(key, value, _decide(origin, name, value, source)) for key, (name, value) in source.names.items()]
    entries, settings = _join(entries, origin.defaults(source))
    entries, settings, config = _make_valid(entries, settings, origin.defaults(source))
    looks = (*origin.looks(source), *((_EACH_BATCH,) if config.gradient_accumulation > 1 else ()))
    return Conversion(tuple(entries), settings, config, looks, world_size, _check(config, world_size, device))


def _decide(origin: Origin, name: str, value: Any, source: Source) -> Outcome:
    rule = origin.rules.get(name) or _find_above(origin, name) or origin.others(name, value)
    if rule is None:
        few = len(source.names) <= _MOST_SUGGESTED  # each takes as long as all rules are many
        near = did_you_mean(name, [known for known in origin.rules if few and not known.endswith("*")])
        return NotUnderstood(f"{origin.title} has no such key, or it is not known here{near}")
    if not rule.any_value:
        if isinstance(value, Code):
            return NotUnderstood(f"its value is known only when the file runs: {cut(str(value))}")
        if value is None:
            return Converted(says="nothing to write: None is the default here, too")
        if origin.fills_in is not None and value == origin.fills_in:
            return NotUnderstood(f"{value!r} is filled in from elsewhere when a run starts; write its value")
    try:
        return rule.do(value, source)
    except UnreadableError as error:
        return NotUnderstood(str(error))


def _find_above(origin: Origin, name: str) -> Rule | None:
    while "." in name:
        name = name.rpartition(".")[0]
        if f"{name}.*" in origin.rules:
            return origin.rules[f"{name}.*"]
    return None


def _join(entries: list[Entry], defaults: Mapping[str, Any]) -> tuple[list[Entry], dict[str, Any]]:
    """The settings of all entries. One that contradicts an earlier one is not understood."""
    flat: dict[str, Any] = {}
    said_by: dict[str, str] = {}
    joined = []
    for entry in entries:
        outcome = entry.outcome
        if isinstance(outcome, Converted):
            clash = next((key for key in outcome.settings if _clashes(key, outcome.settings[key], flat)), None)
            if clash is not None:
                others = [said_by[one] for one in said_by if _overlaps(one, clash)]
                entry = replace(entry, outcome=NotUnderstood(f"it contradicts {others[0]}, which sets {clash}, too"))
            else:
                flat.update(outcome.settings)
                said_by.update(dict.fromkeys(outcome.settings, entry.key))
        joined.append(entry)
    for key, value in defaults.items():
        if not any(_overlaps(key, one) for one in flat):
            flat[key] = value
    return joined, _nest(flat)


def _overlaps(one: str, other: str) -> bool:
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


def _clashes(key: str, value: Any, flat: Mapping[str, Any]) -> bool:
    return any(_overlaps(key, one) and not (key == one and _same(value, flat[one])) for one in flat)


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flat.items():
        *parents, last = key.split(".")
        inner = nested
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
    return nested


def _make_valid(
    entries: list[Entry], settings: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[list[Entry], dict[str, Any], Config]:
    """Without the settings that halfmesh refuses; their entries say why."""
    while True:
        config, problems = build_leniently(settings)
        if not problems and config is not None:
            return entries, settings, config
        blamed = _blame(entries, problems)
        if not blamed:
            raise RuntimeError(f"the converted config is wrong, and no key is to blame: {problems}; this is a bug")
        entries = [
            replace(entry, outcome=NotUnderstood(f"halfmesh refuses it: {blamed[entry.key]}"))
            if entry.key in blamed
            else entry
            for entry in entries
        ]
        entries, settings = _join(entries, defaults)


def _blame(entries: list[Entry], problems: list[str]) -> dict[str, str]:
    """By entry, the problem that it makes: those with that very key, else those of the same top-level key."""
    for depth in (None, 1):
        found: dict[str, str] = {}
        for problem in problems:
            place = problem.partition(": ")[0]
            for entry in entries:
                keys = entry.outcome.settings if isinstance(entry.outcome, Converted) else {}
                if any(_matches(key, place, depth) for key in keys):
                    found.setdefault(entry.key, problem)
        if found:
            return found
    return {}


def _matches(key: str, place: str, depth: int | None) -> bool:
    if depth is None:
        return any(_overlaps(key, one) and "." in one for one in place.split(", ")) or key == place
    return any(key.split(".")[0] == one.split(".")[0] for one in place.split(", "))


def _check(config: Config, world_size: int | None, device: str) -> tuple[str, ...]:
    """What keeps the config from running on so many ranks; where their number is not known, on any that suits it."""
    from ..compat import check

    if world_size is None:
        parallel = config.parallel
        copies = parallel.data.size or parallel.data.hybrid or 2
        world_size = parallel.pipeline.size * parallel.tensor.size * copies
    return tuple(map(str, check(config, world_size, device)))


__all__ = ["Conversion", "Converted", "Entry", "NotUnderstood", "Origin", "Without", "convert"]
