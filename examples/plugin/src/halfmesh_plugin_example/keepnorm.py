"""The mode "keepnorm": half precision with fp32 masters, and BatchNorm in fp32; apex's O2, with tensor parallelism."""

from __future__ import annotations

import torch

from halfmesh import AMPPlugin, Composes, LossScale, Options, Recipe
from halfmesh.options import PositiveInt, Scale


class KeepNormOptions(Options):
    """What may stand beside `mode` in the config. halfmesh checks types, bounds and misspellings."""

    initial_scale: Scale = 2.0**12
    growth_interval: PositiveInt = 500
    wide_gradients: bool = False
    """Add up the gradients of an accumulation cycle in fp32."""


class KeepNormAMP(AMPPlugin):
    """fp16 or bf16, but for BatchNorm. Not said to work with a pipeline, zero1 or fsdp, so these are rejected."""

    options = KeepNormOptions
    composes = Composes(
        parallel=frozenset({"tensor", "replicate"}),
        why_not={"pipeline": "keepnorm has not been tried with a pipeline; use mode='naive'"},
    )
    scale_keys = frozenset({"initial_scale", "growth_interval"})  # rejected under bf16, where the loss is not scaled

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        """One row of plain values, from which everything follows."""
        assert isinstance(options, KeepNormOptions)
        scale = LossScale(initial=options.initial_scale, growth_interval=options.growth_interval)
        return Recipe(
            compute_dtype=dtype,
            param_dtype=dtype,
            master_weights=True,
            loss_scale=scale if dtype == torch.float16 else None,
            output_dtype=torch.float32,
            keep_batchnorm_fp32=True,
            wide_gradients=options.wide_gradients,
        )
