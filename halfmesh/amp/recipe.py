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

    def __post_init__(self) -> None:
        fine = (
            0 < self.initial <= 2.0**127
            and self.growth_factor > 1
            and 0 < self.backoff_factor < 1
            and self.growth_interval >= 1
            and self.hysteresis >= 1
            and (not self.dynamic or self.min_scale <= self.initial <= self.max_scale)
        )
        if not fine:
            raise ValueError(
                f"{self} cannot work: it needs 0 < initial <= 2**127 between min_scale and max_scale, growth_factor > "
                "1, 0 < backoff_factor < 1, growth_interval >= 1 and hysteresis >= 1"
            )


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

    def __post_init__(self) -> None:
        if self.compute_dtype != torch.float32 and not self.autocast and self.param_dtype is None:
            raise ValueError(f"{self} would compute in fp32: set autocast=True or param_dtype={self.compute_dtype}")
        if self.autocast and self.param_dtype is not None:
            raise ValueError(f"{self} has two ways to compute in {self.compute_dtype}: autocast and param_dtype")
        if self.master_weights and self.param_dtype is None:
            raise ValueError(f"{self} keeps fp32 masters of fp32 parameters: set param_dtype, or master_weights=False")

    @property
    def skips(self) -> bool:
        """Whether a step with non-finite gradients is skipped by itself: only a dynamic scale does that."""
        return self.loss_scale is not None and self.loss_scale.dynamic


FP32 = Recipe()
"""The recipe of a config without `fp16` or `bf16`."""
