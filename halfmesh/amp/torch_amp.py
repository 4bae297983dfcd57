"""TORCH: fp32 parameters, forward and criterion under torch.autocast, torch.amp.GradScaler's loss scaling."""

from __future__ import annotations

import torch

from ..options import BackoffFactor, GrowthFactor, Options, PositiveInt, Scale
from .plugin import ALL_PARALLEL, AMPPlugin, Composes
from .recipe import LossScale, Recipe


class TorchOptions(Options):
    """Keys and defaults of `torch.amp.GradScaler`."""

    init_scale: Scale = 2.0**16
    growth_factor: GrowthFactor = 2.0
    backoff_factor: BackoffFactor = 0.5
    growth_interval: PositiveInt = 2000
    enabled: bool = True
    """False drops the loss scaling and keeps autocast, as in torch."""


class TorchAMP(AMPPlugin):
    """torch's own mixed precision."""

    options = TorchOptions
    composes = Composes(parallel=ALL_PARALLEL)
    scale_keys = frozenset(TorchOptions.model_fields)

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        assert isinstance(options, TorchOptions)
        scale = None
        if options.enabled and dtype == torch.float16:
            keys = options.model_dump(exclude={"enabled"})
            scale = LossScale(initial=keys.pop("init_scale"), **keys)
        return Recipe(compute_dtype=dtype, autocast=True, loss_scale=scale)
