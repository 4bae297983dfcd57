"""The pydantic base class of everything a user types: strict, frozen, unknown keys refused."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field


class Options(BaseModel):
    """Base of the config schema and of every plugin's own keys.

    Strict, because pydantic would otherwise take True for 1 and "1.0" for 1.0; frozen, because a config is a value.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @property
    def variant(self) -> str:
        """What tells one use of a mode from another, in a word or two, for what is printed."""
        return ""

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(
            f"cannot set {name!r}: configs are immutable; config.replace(key=value) gives a changed copy"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"cannot delete {name!r}: configs are immutable; config.replace(key=value) gives a changed copy"
        )


def _refuse_huge(value: int) -> int:
    if value >= 2**63:
        raise ValueError(f"{f'{value:.3g} ' if value < 10**300 else ''}is too large: integers have 64 bits")
    return value


PositiveFloat = Annotated[float, Field(gt=0)]
Scale = Annotated[float, Field(gt=0, le=2.0**127)]
"""A loss scale: a positive number that fp32 can hold."""
PositiveInt = Annotated[int, Field(ge=1), AfterValidator(_refuse_huge)]
GrowthFactor = Annotated[float, Field(gt=1)]
BackoffFactor = Annotated[float, Field(gt=0, lt=1)]
Names = Annotated[tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
