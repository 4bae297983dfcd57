"""The config as an immutable value that compares, prints, pickles and converts to YAML."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from ..errors import ConfigError, did_you_mean, shorten
from ..options import Options
from .problems import explain, explain_key, find_contradictions
from .schema import CompileConfig, PrecisionConfig, Settings, validate
from .text import as_python, to_yaml

OWN_NAMES = "; a constant of your own is written in UPPERCASE"
"""The end of the message about an unknown key that is similar to no other."""


class Config(Settings, extra="allow"):
    """The settings of `Settings` as attributes, and the user's UPPERCASE constants beside them.

    `halfmesh.load_config` makes one.
    """

    if not TYPE_CHECKING:  # a checker should know the settings' types; constants are Any

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                if name.startswith("__"):
                    raise
            user = self.user
            own = f"; constants: {shorten(list(user))}" if user else ""
            near = did_you_mean(name, [*type(self).model_fields, *user])
            raise AttributeError(f"the config has no {name!r}{near or own}")

    else:

        def __getattr__(self, name: str) -> Any: ...

    @property
    def user(self) -> dict[str, Any]:
        """The user's own constants."""
        return dict(self.model_extra or {})

    @property
    def precision(self) -> PrecisionConfig | None:
        """`fp16`, `bf16` or `fp8`, whichever is set."""
        return self.fp16 or self.bf16 or self.fp8

    @property
    def precision_key(self) -> Literal["fp16", "bf16", "fp8"] | None:
        """The key that sets it."""
        if self.fp16:
            return "fp16"
        return "bf16" if self.bf16 else "fp8" if self.fp8 else None

    @property
    def precision_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """The half precision in use; under fp8 that of all but the float8 products."""
        if self.fp16:
            return "float16"
        return "bfloat16" if self.precision else None

    def to_dict(self) -> dict[str, Any]:
        """The keys that differ from the defaults, and the constants, as a user would write them."""
        return {**_changed(self, Settings), **self.user}

    def to_yaml(self) -> str:
        """`to_dict` as YAML; loading it gives an equal config.

        Raises:
            ConfigError: YAML cannot hold a value (an object, a function); the message names its key.
        """
        return to_yaml(self.to_dict())

    def replace(self, **changes: Any) -> Config:
        """A copy with new values for the top-level keys in `changes`.

        Raises:
            ConfigError: a key is unknown or a value is not allowed.
        """
        return build({**self.to_dict(), **changes}, "config.replace()")

    def __repr__(self) -> str:
        items = [f"{key}={as_python(value)}" for key, value in self.to_dict().items()]
        line = f"Config({', '.join(items)})"
        return line if len(line) <= 88 else "\n".join(["Config(", *(f"    {item}," for item in items), ")"])

    __str__ = __repr__


def build(raw: Mapping[Any, Any], source: str = "the config", hint: str = OWN_NAMES) -> Config:
    """The config that `raw` describes.

    Raises:
        ConfigError: with all problems at once.
    """
    unknown = {key: problem for key in raw if (problem := explain_key(key, hint)) is not None}
    known = {key: value for key, value in raw.items() if key not in unknown}
    config, errors = validate(Config, known)
    problems = [*unknown.values(), *find_contradictions(known), *explain(known, errors)]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config


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
    if value == math.inf:  # as a user writes norm_type; JSON has no infinite numbers
        return "inf"
    return dict(value) if isinstance(value, dict) else value
