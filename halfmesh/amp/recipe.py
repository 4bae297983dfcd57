"""The recipe of a precision mode as plain values: number formats, loss scale, and the options of an update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

if TYPE_CHECKING:
    from .float8 import Float8Product

HALF = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class LossScale:
    """The initial value of a loss scale, and how it changes. The defaults are those of `torch.amp.GradScaler`.

    Attributes:
        initial: the scale of the first update.
        dynamic: adapt the scale to overflows. False: it stays `initial`.
        growth_factor: the scale is multiplied by this when it grows.
        backoff_factor: the scale is multiplied by this when it is lowered after an overflow.
        growth_interval: the number of updates in a row without overflow after which the scale grows.
        hysteresis: the number of overflows until the scale is lowered: 1 lowers it at each. The count restarts after
            each growth.
        min_scale: the smallest value of a dynamic scale.
        max_scale: the largest value of a dynamic scale.
        verbose: log each change of the scale, as soon as the host knows it.
        skips: skip an update with inf or nan. A dynamic scale requires True; apex's static scale uses False.

    Raises:
        ValueError: `initial` is not in (0, 2**127], or a dynamic scale has values that cannot work.
    """

    initial: float = 2.0**16
    dynamic: bool = True
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 0.0
    max_scale: float = 2.0**127
    verbose: bool = False
    skips: bool = True

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
    """The number format of each tensor in training. A precision plugin returns one.

    Attributes:
        compute_dtype: the dtype in which matrix products are computed.
        param_dtype: the dtype of the model's parameters and floating-point buffers. None leaves them unchanged (fp32).
        autocast: run forward and criterion in a scope that casts the inputs of each operation to `compute_dtype` or
            fp32.
        master_weights: keep an fp32 copy of each trained half-precision parameter for the optimizer.
        loss_scale: the loss scale. None: gradients are not scaled.
        output_dtype: the dtype to which the model's floating-point outputs are cast. None leaves them unchanged.
        count_zeros: count the zeros in the gradients of each step, for `StepResult.num_zeros`.
        cast_lists: the rules of `autocast`: those of `torch.autocast`, or the lists of apex's O1 (fp16 only).
        keep_batchnorm_fp32: keep BatchNorm layers that have weights, and their statistics, in fp32 when the model is
            cast.
        num_losses: the number of losses, each with a separate scale if the scale is dynamic.
        wide_gradients: accumulate the half-precision gradients of several backwards in fp32.
        keep_fp32: patterns of names of buffers, parameters and arguments of the model that are not cast. The
            frequencies of rotary embeddings, and tensors that the model itself keeps in fp32, are not cast either.
            None: everything is cast.
        linear: computes the products of linear layers in float8. None: `compute_dtype` applies to them.
        split_masters: store only the 16 bits of each master weight that its bf16 parameter does not hold.

    Raises:
        ValueError: the formats contradict each other, such as `master_weights` without a `param_dtype`.
    """

    compute_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype | None = None
    autocast: bool = False
    master_weights: bool = False
    loss_scale: LossScale | None = None
    output_dtype: torch.dtype | None = None
    count_zeros: bool = False
    cast_lists: Literal["torch", "apex"] = "torch"
    keep_batchnorm_fp32: bool = False
    num_losses: int = 1
    wide_gradients: bool = False
    keep_fp32: tuple[str, ...] | None = ()
    linear: Float8Product | None = None
    split_masters: bool = False

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
        """True if updates with inf or nan are skipped. This requires a loss scale."""
        return self.loss_scale is not None and self.loss_scale.skips

    @property
    def keeps_scale(self) -> bool:
        """True if gradients stay scaled until the update. With several dynamic scales they are unscaled first."""
        return self.loss_scale is not None and not (self.loss_scale.dynamic and self.num_losses > 1)


def trainable_dtypes(recipe: Recipe) -> set[torch.dtype]:
    """The dtypes that the user's parameters may have. Half precision that the recipe does not train through masters
    loses small updates, and BatchNorm weights that were rounded earlier are not fp32 any more."""
    return {torch.float32} if recipe.keep_batchnorm_fp32 else {torch.float32, recipe.param_dtype or torch.float64}


# The recipe of a config without `fp16` or `bf16`.
FP32 = Recipe()


@dataclass(frozen=True)
class UpdateOptions:
    """The options of an update. With the defaults it is a plain step.

    Attributes:
        max_norm: clip the norm of all gradients to this; 0 does not clip.
        on_nonfinite: the action on an update that has inf or nan. "auto": the recipe decides.
        max_consecutive_skips: the number of updates with inf or nan in a row that ends the run.
        track_grad_norm: measure the gradient norm even if nothing else needs it.
        fused: auto: use torch's fused implementation if it is exact and the user made no choice.
        wide_gradients: accumulate the gradients of half-precision parameters in fp32.
        name: the engine's name, for messages.
    """

    max_norm: float = 0.0
    norm_type: float = 2.0
    on_nonfinite: Literal["auto", "skip", "raise"] = "auto"
    max_consecutive_skips: int = 50
    track_grad_norm: bool = False
    fused: Literal["auto", False] = "auto"
    wide_gradients: bool = False
    name: str | None = None

    def skips_nonfinite(self, recipe: Recipe) -> bool:
        """Return True if an update with inf or nan is skipped."""
        return recipe.skips if self.on_nonfinite == "auto" else self.on_nonfinite == "skip"

    def needs_grad_norm(self, recipe: Recipe) -> bool:
        """Return True if every update must be measured, even one that is not clipped."""
        return recipe.skips or recipe.count_zeros or self.on_nonfinite != "auto" or self.track_grad_norm
