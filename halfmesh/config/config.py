"""The config as an immutable value that compares, prints, pickles and converts to YAML."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from ..amp.plugin import PRECISIONS
from ..errors import ConfigError
from .messages import explain, explain_key, find_contradictions
from .schema import PrecisionConfig, Settings
from .text import as_python, to_yaml

OWN_NAMES = "; a constant of your own is written in UPPERCASE"
"""The end of the message about an unknown key that is similar to no other."""


class Config(Settings, extra="allow"):
    """The settings of `Settings` as attributes, and the user's UPPERCASE constants beside them.

    `halfmesh.load_config` makes one.
    """

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """The user's constants."""

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
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp8" if self.fp8 else None

    @property
    def precision_dtype(self) -> Literal["float16", "bfloat16"] | None:
        """The half precision in use; under fp8 that of all but the float8 products."""
        return "float16" if self.fp16 else "bfloat16" if self.precision else None

    def to_dict(self) -> dict[str, Any]:
        """The keys that differ from the defaults, and the constants, as a user would write them."""
        given = self.model_dump(include=set(Settings.model_fields), exclude_defaults=True)
        for key in PRECISIONS.keys() & given.keys():
            given[key] = {"mode": given[key]["mode"], **given[key]["options"]}
        if "compile" in given:
            given["compile"] = given["compile"] or True
        if given.get("clip_grad_norm", {}).get("norm_type") == math.inf:
            given["clip_grad_norm"]["norm_type"] = "inf"  # JSON has no infinite numbers
        return {**given, **self.user}

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
    config: Config | None = None
    errors: Sequence[Mapping[str, Any]] = ()
    try:
        config = Config.model_validate(known)
    except ValidationError as error:
        errors = error.errors(include_url=False)
    problems = [*unknown.values(), *find_contradictions(known), *explain(known, errors)]
    if problems or config is None:
        raise ConfigError(problems, source)
    return config
