"""APEX: the opt levels O0 to O3 of NVIDIA's apex.amp, with its keys, defaults and meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from ..options import Options
from .apex_options import INITIAL_SCALE, ApexOptions
from .plugin import AMPPlugin, Composes
from .recipe import LossScale, Recipe

if TYPE_CHECKING:
    from .backend import Backend

_NO_SHARED_VERDICT = (
    "apex's contract has no verdict shared by all ranks, so shards would skip different steps and drift apart; "
    "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch' (close to O1)"
)


class ApexAMP(AMPPlugin):
    """apex.amp's O0 to O3, on torch alone."""

    options = ApexOptions
    composes = Composes(
        dtypes=frozenset({"float16"}),
        why_not=dict.fromkeys(["tensor", "pipeline", "zero1", "fsdp"], _NO_SHARED_VERDICT)
        | {"bfloat16": "apex has no bf16; use bf16 = dict(mode='torch') or dict(mode='naive')"},
    )

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        assert isinstance(options, ApexOptions)
        if not options.enabled:
            return Recipe(num_losses=options.num_losses)  # a script that names its losses goes on
        properties = options.properties
        param_dtype = _dtype(properties.cast_model_type)
        casts_model = param_dtype == torch.float16
        masters = properties.master_weights and casts_model
        return Recipe(
            compute_dtype=torch.float16 if casts_model or properties.patch_torch_functions else torch.float32,
            param_dtype=param_dtype,
            autocast=properties.patch_torch_functions,
            cast_lists="apex" if properties.patch_torch_functions else "torch",
            keep_batchnorm_fp32=properties.keep_batchnorm_fp32 and casts_model,
            master_weights=masters,
            loss_scale=_loss_scale(options, properties.loss_scale),
            num_losses=options.num_losses,
            wide_gradients=masters,  # apex adds them up in the masters' gradients
            output_dtype=_dtype(options.cast_model_outputs) or (torch.float32 if param_dtype else None),
        )

    @classmethod
    def backend(cls, options: Options) -> Backend:
        assert isinstance(options, ApexOptions)
        if not options.enabled or options.backend == "native":
            return super().backend(options)
        from .apex_backend import ApexBackend

        return ApexBackend(options)


def _dtype(name: str | None) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _loss_scale(options: ApexOptions, scale: float | Literal["dynamic"]) -> LossScale | None:
    """apex.amp.scaler: from 2**16, halved on overflow, doubled after 2000 good steps; a static 1 scales nothing."""
    if scale == 1.0:
        return None
    if scale != "dynamic":
        return LossScale(initial=scale, dynamic=False, skips=False)
    return LossScale(
        initial=min(options.max_loss_scale, INITIAL_SCALE),
        growth_interval=2000,
        min_scale=options.min_loss_scale or 0.0,
        max_scale=options.max_loss_scale,
        verbose=options.verbosity > 0,
    )
