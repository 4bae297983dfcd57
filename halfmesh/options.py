"""The pydantic base class of everything a user types: strict, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field


class Options(BaseModel):
    """Base of the config schema and of every plugin's own keys.

    Strict, because pydantic would otherwise take True for 1 and "1.0" for 1.0; frozen, because a config is a value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


PositiveFloat = Annotated[float, Field(gt=0)]
PositiveInt = Annotated[int, Field(ge=1)]
GrowthFactor = Annotated[float, Field(gt=1)]
BackoffFactor = Annotated[float, Field(gt=0, lt=1)]
