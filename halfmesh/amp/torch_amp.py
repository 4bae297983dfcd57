"""Mode torch: fp32 parameters, forward and criterion under torch.autocast, loss scaling as GradScaler's. With `fp8`,
linear layers also compute their products in float8."""

from __future__ import annotations

import torch

from ..options import BackoffFactor, GrowthFactor, Names, Options, PositiveInt, Scale
from .float8 import Emulate, Float8Product, Scaling
from .plugin import ALL_PARALLEL, PRECISIONS, AMPPlugin, Composes
from .recipe import LossScale, Recipe


class TorchOptions(Options):
    """The keys of mode torch: for fp16 those of `torch.amp.GradScaler`, with its defaults; fp8: see `Float8Product`.

    Attributes:
        enabled: false turns loss scaling off and keeps autocast, as in torch.
    """

    init_scale: Scale = 2.0**16
    growth_factor: GrowthFactor = 2.0
    backoff_factor: BackoffFactor = 0.5
    growth_interval: PositiveInt = 2000
    enabled: bool = True
    recipe: Scaling = "tensorwise"
    emulate: Emulate = "auto"
    filter: Names | None = None


class TorchAMP(AMPPlugin):
    """torch's mixed precision: fp32 parameters, with forward and criterion under torch.autocast."""

    options = TorchOptions
    composes = Composes(parallel=ALL_PARALLEL, dtypes=frozenset(PRECISIONS.values()))
    float8_keys = frozenset({"recipe", "emulate", "filter"})
    scale_keys = frozenset(TorchOptions.model_fields) - float8_keys

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        assert isinstance(options, TorchOptions)
        if dtype == torch.float8_e4m3fn:
            product = Float8Product(options.recipe, options.emulate, options.filter)
            return Recipe(compute_dtype=torch.bfloat16, autocast=True, linear=product)
        scale = None
        if options.enabled and dtype == torch.float16:
            keys = options.model_dump(exclude={"enabled", *cls.float8_keys})
            scale = LossScale(initial=keys.pop("init_scale"), **keys)
        return Recipe(compute_dtype=dtype, autocast=True, loss_scale=scale)
