"""The config as an immutable value: it compares, prints, pickles, and converts to YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..amp.plugin import PRECISIONS
from ..errors import ConfigError, did_you_mean, shorten
from ..options import Options
from .problems import Problem, explain, find_contradictions, find_unknown
from .schema import CompileConfig, PrecisionConfig, Settings, validate
from .text import to_yaml

OWN_NAMES = "; a constant of your own is written in UPPERCASE"
"""What the line of an unknown key ends with, if it is like no other."""


class Config(Settings, extra="allow"):
    """The settings of `Settings` as attributes, and the user's UPPERCASE constants beside them.

    `halfmesh.load_config` makes one. Containers among the constants are handed out as copies.
    """

    if not TYPE_CHECKING:  # a checker should know the settings' types; constants are Any

        def __getattr__(self, name: str) -> Any:
            user = object.__getattribute__(self, "__pydantic_extra__") or {}
            if name in user:
                return _copied(user[name])
            if name.startswith("__"):
                raise AttributeError(name)
            known = [*type(self).model_fields, *user]
            own = f"; constants: {shorten(list(user))}" if user else ""
            raise AttributeError(f"the config has no {name!r}{did_you_mean(name, known) or own}")

    else:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def user(self) -> dict[str, Any]:
        """The user's own constants."""
        return {name: _copied(value) for name, value in (self.model_extra or {}).items()}

    @property
    def precision(self) -> PrecisionConfig | None:
        """The one of `fp16`, `bf16` and `fp8` that is set."""
        return None if self.precision_key is None else getattr(self, self.precision_key)

    @property
    def precision_key(self) -> Literal["fp16", "bf16", "fp8"] | None:
        """Which of the keys that name a mode is set."""
        keys: tuple[Literal["fp16", "bf16", "fp8"], ...] = ("fp16", "bf16", "fp8")
        return next((key for key in keys if getattr(self, key) is not None), None)

    @property
    def precision_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """The half precision in use; bfloat16 under fp8, for all but some products."""
        if self.precision_key is None:
            return None
        return "float16" if self.precision_key == "fp16" else "bfloat16"

    def to_dict(self) -> dict[str, Any]:
        """What differs from the defaults, and the constants, in the form in which a user would write them."""
        return {**_changed(self, Settings), **self.user}

    def to_yaml(self) -> str:
        """`to_dict` as YAML; loading that gives an equal config.

        Raises:
            ConfigError: YAML cannot hold a value (an object, a function); the message names its key.
        """
        return to_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Config:
        """A config in which the top-level keys of `changes` have new values.

        Raises:
            ConfigError: a key is unknown or a value is not allowed.
        """
        return build({**self.to_dict(), **changes}, "config.replace()")

    def __repr__(self) -> str:
        items = [f"{key}={_show(value)}" for key, value in self.to_dict().items()]
        line = f"Config({', '.join(items)})"
        return line if len(line) <= 88 else "\n".join(["Config(", *(f"    {item}," for item in items), ")"])

    __str__ = __repr__


def build(raw: Mapping[Any, Any], source: str = "the config", hint: str = OWN_NAMES) -> Config:
    """The config that `raw` describes.

    Raises:
        ConfigError: with all problems at once.
    """
    config, problems = build_leniently(raw, hint)
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


def build_leniently(raw: Mapping[Any, Any], hint: str = OWN_NAMES) -> tuple[Config | None, list[str]]:
    """The config of the top-level keys that are right, so that it can be checked further, and all problems."""
    problems = list(find_unknown(raw, hint))
    known = _without(raw, problems)
    known |= {key: _copied(value) for key, value in known.items() if key not in Settings.model_fields}
    problems += find_contradictions(known)
    config, errors = validate(Config, known)
    problems += explain(known, errors)
    if problems:
        right = _without(known, problems)
        config = validate(Config, {**_find_mode(known), **right})[0] or validate(Config, right)[0]
    return config, [problem.line for problem in problems]


def _copied(value: Any) -> Any:
    """`value` with its dicts, lists, tuples and sets copied, all the way down; what they hold is shared."""
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    return type(value)(map(_copied, value)) if type(value) in (list, tuple, set) else value


def _without(raw: Mapping[Any, Any], problems: list[Problem]) -> dict[str, Any]:
    wrong = {key for problem in problems for key in problem.keys}
    return {key: value for key, value in raw.items() if key not in wrong}


def _find_mode(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The mode alone, which can be checked against the layout even where another key is wrong."""
    given = {key: raw[key] for key in PRECISIONS if raw.get(key) is not None}
    if len(given) != 1:
        return {}
    return {key: {"mode": value.get("mode")} for key, value in given.items() if isinstance(value, Mapping)}


def _changed(options: Options, model: type[Options] | None = None) -> dict[str, Any]:
    """The fields that differ from their defaults, as dicts and plain values."""
    changed = {}
    for name, field in (model or type(options)).model_fields.items():
        value = getattr(options, name)
        if value != field.get_default(call_default_factory=True):
            changed[name] = _plain(value)
    return changed


def _plain(value: Any) -> Any:
    if isinstance(value, PrecisionConfig):
        return {"mode": value.mode, **_changed(value.options)}
    if isinstance(value, Options):
        return _changed(value) or (True if isinstance(value, CompileConfig) else {})
    return dict(value) if isinstance(value, dict) else value


def _show(value: Any) -> str:
    if type(value) is dict and value and all(isinstance(key, str) and key.isidentifier() for key in value):
        return f"dict({', '.join(f'{key}={_show(item)}' for key, item in value.items())})"
    return repr(value)
