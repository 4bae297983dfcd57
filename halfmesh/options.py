"""The pydantic base class of the config and of every plugin's keys, and the types that they share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


class Options(BaseModel):
    """The base class of the config and of every plugin's keys: a pydantic model.

    Unknown keys are rejected. Types are strict: without that, pydantic would accept True for 1 and "1.0" for 1.0.
    Numbers must be finite. Instances are frozen.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def variant(self) -> str:
        """One or two words that tell uses of a mode apart in printed text, such as the `opt_level`. "" by default."""
        return ""


PositiveFloat = Annotated[float, Field(gt=0)]
Scale = Annotated[float, Field(gt=0, le=2.0**127)]
"""A loss scale: a positive number that fp32 can hold."""
DType = Literal["float32", "float16", "bfloat16"]
PositiveInt = Annotated[int, Field(ge=1)]
GrowthFactor = Annotated[float, Field(gt=1)]
BackoffFactor = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
