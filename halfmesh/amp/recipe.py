"""The recipe of a precision mode: one row of the precision table, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .float8 import Float8Product

HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class LossScale:
    """The start and the rule of a loss scale. Defaults are those of `torch.amp.GradScaler`."""

    initial: float = 2.0**16
    dynamic: bool = True
    """False: it never moves."""
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    """Steps without overflow after which the scale grows."""
    hysteresis: int = 1
    """Overflows that are tolerated before the scale is lowered; the count restarts after each growth."""
    min_scale: float = 0.0
    max_scale: float = 2.0**127
    verbose: bool = False
    """Log each change of the scale, once it is known on the host."""
    skips: bool = True
    """Skip an update with inf or nan. A dynamic scale has to; apex's static one does not."""

    def __post_init__(self) -> None:
        moves = self.growth_factor > 1 > self.backoff_factor > 0 and self.growth_interval >= 1 and self.hysteresis >= 1
        starts = self.skips and self.min_scale <= self.initial <= self.max_scale
        if not 0 < self.initial <= 2.0**127 or (self.dynamic and not (moves and starts)):
            raise ValueError(
                f"{self} cannot work: it needs 0 < initial <= 2**127 and, if it is dynamic, initial between min_scale "
                "and max_scale, growth_factor > 1, 0 < backoff_factor < 1, growth_interval and hysteresis >= 1, skips"
            )


@dataclass(frozen=True)
class Recipe:
    """The number format of each tensor. A plugin returns one; everything that runs is derived from it."""

    compute_dtype: torch.dtype = torch.float32
    """The dtype of matrix products."""
    param_dtype: torch.dtype | None = None
    """Parameters and floating-point buffers of the model are cast to it; None leaves them unchanged (fp32)."""
    autocast: bool = False
    """Run forward and criterion in a scope that casts for each operation to `compute_dtype` or fp32."""
    master_weights: bool = False
    """Keep an fp32 copy of each trained half-precision parameter for the optimizer."""
    loss_scale: LossScale | None = None
    """None: gradients are not scaled."""
    output_dtype: torch.dtype | None = None
    """Floating-point outputs of the model are cast to it; None leaves them unchanged."""
    count_zeros: bool = False
    """Count the zeros in the gradients of each step."""
    cast_lists: Literal["torch", "apex"] = "torch"
    """The rules of `autocast`: those of `torch.autocast`, or apex's O1 lists (fp16 only)."""
    keep_batchnorm_fp32: bool = False
    """Leave BatchNorm with weights, and its statistics, in fp32 when the model is cast."""
    num_losses: int = 1
    """The number of losses with separate scales, if these are dynamic."""
    wide_gradients: bool = False
    """Add up the half-precision gradients of several backwards in fp32."""
    keep_fp32: tuple[str, ...] | None = ()
    """Patterns of the names of buffers, parameters and the model's arguments that are not cast; frequencies of rotary
    embeddings, and tensors that the model keeps in fp32, are not either. None: all are cast."""
    linear: Float8Product | None = None
    """Computes the products of linear layers in a narrower format; None: they are computed as all others."""
    split_masters: bool = False
    """Keep of the masters only the 16 bits that parameters in bf16 do not have."""

    def __post_init__(self) -> None:
        problem = None
        if self.compute_dtype != torch.float32 and not self.autocast and self.param_dtype is None:
            problem = f"would compute in fp32: set autocast=True or param_dtype={self.compute_dtype}"
        elif self.autocast and self.param_dtype not in (None, torch.float32):
            problem = f"has two ways to compute in {self.compute_dtype}: autocast and param_dtype"
        elif self.master_weights and self.param_dtype is None:
            problem = "keeps fp32 masters of fp32 parameters: set param_dtype, or master_weights=False"
        elif self.split_masters and not self.master_weights:
            problem = "splits masters and has none: set master_weights=True"
        elif self.cast_lists == "apex" and not (self.autocast and self.compute_dtype == torch.float16):
            problem = "has apex's cast lists, which need autocast=True and compute_dtype=torch.float16"
        if problem is not None:
            raise ValueError(f"{self} {problem}")

    @property
    def skips(self) -> bool:
        """True if an update with inf or nan is skipped: only under a loss scale."""
        return self.loss_scale is not None and self.loss_scale.skips

    @property
    def keeps_scale(self) -> bool:
        """True if gradients stay scaled until the update: those of several losses are unscaled before the sum."""
        return self.loss_scale is not None and not (self.loss_scale.dynamic and self.num_losses > 1)


def trainable_dtypes(recipe: Recipe) -> set[torch.dtype]:
    """The dtypes that parameters may be given in: half precision that the recipe does not train by masters loses
    small updates, and fp32 of BatchNorm that was rounded before is not fp32."""
    return {torch.float32} if recipe.keep_batchnorm_fp32 else {torch.float32, recipe.param_dtype or torch.float64}


def wider_format(device: torch.device) -> str:
    """Advice for numbers that leave the range of fp16."""
    emulates = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
    return "compute in fp32 (this GPU has no bf16)" if emulates else "use bf16"


FP32 = Recipe()
"""The recipe of a config without `fp16` or `bf16`."""


@dataclass(frozen=True)
class UpdateOptions:
    """The options of an update. The defaults do not change a plain step."""

    max_norm: float = 0.0
    """Clip the norm of all gradients to this; 0 does not clip."""
    norm_type: float = 2.0
    on_nonfinite: Literal["auto", "skip", "raise"] = "auto"
    """The action on an update that has inf or nan; auto: by the recipe."""
    max_consecutive_skips: int = 50
    """The number of updates with inf or nan in a row that ends the run."""
    track_grad_norm: bool = False
    """Measure the gradient norm even if nothing else needs it."""
    fused: Literal["auto", False] = "auto"
    """auto: use torch's fused implementation where the user left the choice open and it is exact."""
    wide_gradients: bool = False
    """Add up the gradients of half-precision parameters in fp32."""
    name: str | None = None
    """The engine's name, for messages."""

    def skips_nonfinite(self, recipe: Recipe) -> bool:
        """Return True if an update with inf or nan is skipped."""
        return recipe.skips if self.on_nonfinite == "auto" else self.on_nonfinite == "skip"

    def needs_grad_norm(self, recipe: Recipe) -> bool:
        """Return True if every update has to be measured, also one that is not clipped."""
        return recipe.skips or recipe.count_zeros or self.on_nonfinite != "auto" or self.track_grad_norm
