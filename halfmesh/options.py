"""The pydantic base class of the config and of plugins' keys, and the types that both use."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Options(BaseModel):
    """Base of the config schema and of every plugin's keys.

    Strict, because pydantic would otherwise take True for 1 and "1.0" for 1.0; frozen, because a config is a value;
    unknown keys are rejected.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def variant(self) -> str:
        """A word or two that distinguish uses of a mode in printed text, such as an opt_level."""
        return ""


PositiveFloat = Annotated[float, Field(gt=0)]
Scale = Annotated[float, Field(gt=0, le=2.0**127)]
"""A loss scale: a positive number that fp32 can hold."""
DType = Literal["float32", "float16", "bfloat16"]
PositiveInt = Annotated[int, Field(ge=1)]
GrowthFactor = Annotated[float, Field(gt=1)]
BackoffFactor = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
