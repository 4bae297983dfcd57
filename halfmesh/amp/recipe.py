"""What a precision mode comes down to: one row of the precision table, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LossScale:
    """How the loss scale starts and moves.

    Defaults are those of `torch.amp.GradScaler`. A static scale never moves and never skips a step.
    """

    initial: float = 2.0**16
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps without overflow after which the scale grows."""
    hysteresis: int = 1
    """Overflows that are tolerated before the scale is lowered, counted anew after each growth."""
    min_scale: float = 0.0
    max_scale: float = 2.0**127
    verbose: bool = False
    """Log each change of the scale (reads the scale on the host once per update)."""


@dataclass(frozen=True)
class Recipe:
    """Which number format each tensor has, and what it takes to train with it.

    A plugin returns one; everything that runs is derived from it.
    """

    compute_dtype: torch.dtype = torch.float32
    """The dtype of matrix products."""
    param_dtype: torch.dtype | None = None
    """Parameters and floating-point buffers of the model are cast to it; None leaves them as they are (fp32)."""
    autocast: bool = False
    """Run forward and criterion under `torch.autocast` with `compute_dtype`."""
    master_weights: bool = False
    """Keep an fp32 copy of each trained parameter for the optimizer."""
    loss_scale: LossScale | None = None
    """None: gradients are not scaled."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the model are cast to it; None leaves them as they are."""
    count_zeros: bool = False
    """Count the zeros in the gradients of each step."""

    @property
    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped by itself: only a dynamic scale does that."""
        return self.loss_scale is not None and self.loss_scale.dynamic


FP32 = Recipe()
"""The recipe of a config without `fp16` or `bf16`."""
