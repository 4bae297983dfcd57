"""The key `activation_checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from ..errors import did_you_mean, shorten, show
from ..options import Names, Options, PositiveInt


class ActivationCheckpointConfig(Options):
    """`activation_checkpoint`: the modules whose activations are recomputed in backward. Off if no key is set.

    The shorthand "full" is `every=1`; "selective" is `every=1, selective=True`.
    """

    every: PositiveInt | None = None
    """Every N-th repeated block of the model, starting with the first."""
    patterns: Names = ()
    """Patterns of module names, instead of blocks."""
    selective: bool = False
    """Keep the outputs of matrix products and attention."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.every is not None and self.patterns:
            raise ValueError("every and patterns are two ways to choose modules; leave one of them out")
        return self

    @property
    def enabled(self) -> bool:
        """Whether anything is recomputed."""
        return self.every is not None or bool(self.patterns)

    @property
    def label(self) -> str:
        """The value as a user would write it."""
        if self.patterns:
            chosen = shorten(list(self.patterns))
        else:
            chosen = "full" if self.every == 1 else f"every={self.every}"
        if not self.selective:
            return chosen
        return "selective" if self.every == 1 else f"{chosen}, selective"


def expand_checkpoint(value: Any) -> Any:
    """The shorthand forms as the long one."""
    forms = "'full', 'selective', dict(every=2), dict(patterns=['blocks.*.mlp']) or False"
    if value is None or value is False:
        return {}
    if value is True or (isinstance(value, str) and value == "full"):
        return {"every": 1}
    if isinstance(value, str) and value == "selective":
        return {"every": 1, "selective": True}
    if isinstance(value, ActivationCheckpointConfig):
        return value
    if isinstance(value, Mapping) and value and value != {"patterns": []}:
        given = dict(value)
        if given.get("selective") is True and not given.get("patterns") and given.get("every") is None:
            given["every"] = 1
        return given
    near = did_you_mean(value, ["full", "selective"]) if isinstance(value, str) else ""
    hint = f"; for every second block write dict(every={show(value)})" if type(value) is int else near
    raise ValueError(f"{show(value)} does not say what to recompute; use {forms}{hint}")
