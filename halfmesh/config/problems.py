"""pydantic's errors in plain words: where, what was given, what is allowed, and which key was meant."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from ..amp.plugin import AMP_PLUGINS
from ..errors import cut, did_you_mean, find_near, shorten, show, show_name
from ..options import Options
from ..parallel.registries import AXES
from .foreign import find_foreign
from .schema import PrecisionConfig, Settings, get_plugin, parallel_config

PRECISION_KEYS = ("fp16", "bf16")

FAR_CUTOFF = 0.75  # a key of another level has to be nearer than one of this level: there are many of them

_MOST_EACH = 50
"""Unknown keys, and wrong values, that are explained: each takes time."""
_MOST = 2000
"""Characters of a line."""

_DTYPE_NAMES: Mapping[str, str] = types.MappingProxyType(
    {"fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
)


@dataclass(frozen=True)
class Problem:
    """One mistake: the top-level keys it concerns, and what to say about it."""

    keys: tuple[Any, ...]
    line: str


class _Place(NamedTuple):
    """Where an error lies: the path that the user can see, the key itself, and the model that should own it."""

    path: tuple[str, ...]
    owner: type[Options]
    field: str | None


def find_unknown(raw: Mapping[Any, Any], hint: str) -> Iterator[Problem]:
    """Top-level keys that are neither settings nor UPPERCASE constants; `hint` ends the line of one unlike any key."""
    for key in raw:
        if not isinstance(key, str):
            yield Problem((key,), f"{show(key)}: keys must be strings, not {type(key).__name__}")
        elif key == "NUM_MICRO_BATCHES":  # the one constant of Colossal-AI that was a setting
            yield Problem((key,), f"{key}: {find_foreign(key)}")
        elif key not in Settings.model_fields and (key.startswith("_") or not key.isupper()):
            yield Problem((key,), f"{show_name(key)}: unknown key{_suggest(key, (), Settings, hint)}")


def find_contradictions(raw: Mapping[str, Any]) -> Iterator[Problem]:
    """Keys that are valid alone but not beside another one."""
    if all(raw.get(key) is not None for key in PRECISION_KEYS):
        yield Problem(PRECISION_KEYS, "fp16, bf16: both are set, but a run has one precision; remove one of the two")
    given = raw.get("bf16")
    if isinstance(given, PrecisionConfig):
        given = {"mode": given.mode, **dict.fromkeys(given.options.model_fields_set)}
    if isinstance(given, Mapping):
        try:
            moot = sorted(get_plugin(given.get("mode")).scale_keys & given.keys())
        except ValueError:
            return  # reported by the schema
        for name in moot:
            line = f"bf16.{name}: bf16 has the range of fp32, so the loss is not scaled; remove {name}, or use fp16"
            yield Problem(("bf16",), line)


def explain(raw: Mapping[str, Any], errors: Sequence[Mapping[str, Any]]) -> list[Problem]:
    """One problem per place: the branches of a union report the same value once each."""
    problems: dict[tuple[str, ...], Problem] = {}
    for error in errors[:_MOST_EACH]:
        place = _locate(error["loc"], raw, unknown=error["type"] == "extra_forbidden")
        path = _visible(place.path, raw) if error["type"] != "missing" else place.path
        line = f"{'.'.join(map(show_name, path))}: {cut(_reason(error, place), _MOST)}"
        problems.setdefault(place.path, Problem(place.path[:1], line))
    if rest := errors[_MOST_EACH:]:
        keys = dict.fromkeys(str(error["loc"][0]) for error in rest)
        problems[tuple(keys)] = Problem(tuple(keys), f"and {len(rest)} more in {shorten(list(keys))}")
    return list(problems.values())


def _locate(loc: Sequence[int | str], raw: Mapping[str, Any], unknown: bool) -> _Place:
    """Follow the schema along pydantic's `loc`, which names union branches and list items beside the fields.

    With `unknown`, the last part is the key that no model has.
    """
    path: list[str] = []
    owner: type[Options] = Settings
    field: str | None = None
    for i, part in enumerate(map(str, loc)):
        model = _model_at(path, owner, raw) if path else Settings
        if model is not None and part in model.model_fields:
            owner, field = model, part
            path.append(part)
        elif unknown and i == len(loc) - 1:
            return _Place((*path, part), model or owner, None)
    return _Place(tuple(path), owner, field)


def _model_at(path: Sequence[str], owner: type[Options], raw: Mapping[str, Any]) -> type[Options] | None:
    if path[0] in PRECISION_KEYS and len(path) == 1:  # pydantic went deeper, so the mode is valid
        return get_plugin(raw[path[0]]["mode"]).options
    if list(path) == ["parallel"] and isinstance(raw["parallel"], Mapping):
        return parallel_config(raw["parallel"])  # with the axes of others
    return next(_find_models(owner.model_fields[path[-1]].annotation), None)


def _find_models(annotation: Any) -> Iterator[type[Options]]:
    if isinstance(annotation, type) and issubclass(annotation, Options):
        yield annotation
    for inner in get_args(annotation):
        yield from _find_models(inner)


def _visible(path: tuple[str, ...], raw: Any) -> tuple[str, ...]:
    """The part of `path` that the user wrote: `tensor="2"` is at parallel.tensor, not at parallel.tensor.size."""
    seen: list[str] = []
    for part in path:
        if isinstance(raw, (list, tuple)):
            return path
        if not isinstance(raw, Mapping):
            break
        seen.append(part)
        raw = raw.get(part)
    return tuple(seen)


def _reason(error: Mapping[str, Any], place: _Place) -> str:
    kind, given = error["type"], error["input"]
    if kind == "extra_forbidden":
        return "unknown key" + _suggest(place.path[-1], place.path[:-1], place.owner, "")
    if kind == "missing":
        return f"is required{_allowed_text(place, '; give ')}"
    if kind in ("value_error", "assertion_error"):
        return str(error["ctx"]["error"])
    allowed = _allowed_text(place, " is not ")
    if not allowed:
        return f"{show(given)} is refused: {error['msg']}"
    return f"{show(given)}{allowed}{_hint(given, place)}"


def _allowed_text(place: _Place, prefix: str) -> str:
    if place.field is None:
        return ""
    info = place.owner.model_fields[place.field]
    allowed = describe(info.annotation, info.metadata)
    return prefix + allowed if allowed else ""


def _hint(given: object, place: _Place) -> str:
    """What to write instead, where that can be guessed."""
    if place.field is None:
        return ""
    annotation = place.owner.model_fields[place.field].annotation
    if isinstance(given, bool):
        return f" ({type(given).__name__})"
    if not isinstance(given, str):
        return ""
    words = [word for word in _literals(annotation) if isinstance(word, str)]
    if given in _DTYPE_NAMES and _DTYPE_NAMES[given] in words:
        return f"; did you mean {_DTYPE_NAMES[given]!r}?"
    return did_you_mean(given, words) or _unquote(given, annotation)


def _unquote(text: str, annotation: Any) -> str:
    """A number given as text."""
    try:
        number = float(text)
    except ValueError:
        return ""
    if not math.isfinite(number):
        return ""
    return f"; write {int(number) if number.is_integer() and annotation is int else text} without quotes"


def _literals(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [word for inner in get_args(annotation) for word in _literals(inner)]


def describe(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """The values that a type allows, in words; empty for a type without a description."""
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *extra = get_args(annotation)
        return describe(inner, [*metadata, *extra])
    if origin in (Union, types.UnionType):
        parts = [describe(inner, metadata) for inner in get_args(annotation)]
        return " or ".join(parts) if all(parts) else ""
    if origin is Literal:
        words = get_args(annotation)
        return ("one of " if len(words) > 1 else "") + ", ".join(map(repr, words))
    if origin is tuple:
        return "a list of names" if str in get_args(annotation) else "a list"
    names: Mapping[Any, str] = {
        int: "an integer", float: "a number", bool: "True or False", str: "a string", type(None): "None",
    }  # fmt: skip
    if annotation in (int, float):
        return names[annotation] + _bounds(metadata)
    if isinstance(annotation, type) and issubclass(annotation, Options):
        return f"a dict with keys from {', '.join(annotation.model_fields)}"
    return "a dict of strings" if origin is dict else names.get(annotation, "")


def _bounds(metadata: Sequence[Any]) -> str:
    flat = [item for entry in metadata for item in (getattr(entry, "metadata", None) or [entry])]
    signs = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
    found = [
        f"{sign} {_number(getattr(item, name))}" for item in flat for name, sign in signs.items() if hasattr(item, name)
    ]
    return " " + " and ".join(found) if found else ""


def _number(bound: float) -> str:
    return f"{bound:g}" if bound > 1e15 else str(bound)


def _suggest(key: str, parents: tuple[str, ...], owner: type[Options], otherwise: str) -> str:
    """Which key was meant: another library's, one that lies elsewhere in the tree, or a near one at this place."""
    if (foreign := find_foreign(key)) is not None:
        return f"; {foreign}"
    here = list(owner.model_fields)
    if parents == ("parallel",):
        here = list(dict.fromkeys([*here, *AXES.names()]))
    if parents[:1] and parents[0] in PRECISION_KEYS:
        near = did_you_mean(key, here)
        modes = [name for name, keys in _mode_keys().items() if key in keys]
        elsewhere = f"; mode {' and '.join(map(repr, modes))} has it" if modes else ""
        return near or elsewhere or f"; allowed: {', '.join(['mode', *here])}"
    if paths := [path for path in _all_paths() if path.split(".")[-1] == key]:
        return f"; it belongs at {' or '.join(map(repr, paths))}"
    if near := did_you_mean(key, here):
        return near
    by_leaf = {path.split(".")[-1]: path for path in _all_paths()}
    if leaf := find_near(key, by_leaf, FAR_CUTOFF):
        return f"; did you mean {by_leaf[leaf]!r}?"
    return otherwise or f"; allowed: {', '.join(here)}"


def _all_paths() -> list[str]:
    """Every key of the tree, dotted; those of all modes under fp16."""
    paths = [f"fp16.{key}" for keys in _mode_keys().values() for key in keys]
    return list(dict.fromkeys([*_walk(Settings, ""), *paths, "fp16.mode"]))


def _mode_keys() -> dict[str, list[str]]:
    """The keys of each mode. A plugin that cannot be imported must not hide the mistake that is being explained."""
    keys = {}
    for name in AMP_PLUGINS.names():
        with contextlib.suppress(ValueError):
            keys[name] = list(get_plugin(name).options.model_fields)
    return keys


def _walk(model: type[Options], prefix: str) -> Iterator[str]:
    for name, info in model.model_fields.items():
        yield prefix + name
        for inner in _find_models(info.annotation):
            if inner is not PrecisionConfig:
                yield from _walk(inner, f"{prefix}{name}.")
