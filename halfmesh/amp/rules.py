"""What an update does besides stepping, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class UpdateRules:
    """Clipping, and what to do about inf and nan. Defaults change nothing about a plain step."""

    max_norm: float = 0.0
    """Clip the norm of all gradients to this; 0 does not clip."""
    norm_type: float = 2.0
    on_nonfinite: Literal["auto", "skip", "raise"] = "auto"
    """auto: where the recipe has a loss scale it is skipped (not with apex's static one), else stepped."""
    max_consecutive_skips: int = 50
    """Non-finite verdicts in a row that end the run."""
    track_grad_norm: bool = False
    """Measure the gradient norm even if nothing else needs it."""
    fused: Literal["auto", False] = "auto"
    """auto: use torch's fused implementation where the user left the choice open and it is exact."""
    wide_gradients: bool = False
    """Add up the gradients of half-precision parameters in fp32."""
    name: str | None = None
    """Of the engine, for messages."""
