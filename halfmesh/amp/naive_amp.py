"""Mode naive: the full model in half precision, fp32 master weights, and one dynamic or static loss scale."""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import model_validator

from ..options import BackoffFactor, GrowthFactor, Names, Options, PositiveInt, Scale
from .plugin import ALL_PARALLEL, AMPPlugin, Composes
from .recipe import LossScale, Recipe


class NaiveOptions(Options):
    """The keys of mode naive, with Colossal-AI's names and defaults.

    One default differs: `initial_scale` is 2**16. With Colossal-AI's 2**32, the first ~20 steps are skipped.

    Attributes:
        loss_scale: A number is a static scale, which never changes. Updates with inf or nan are skipped, as in
            Colossal-AI.
        masters: split (bf16 only): store only the 16 bits that the bf16 weights do not hold. The masters have equal
            values.
        log_num_zeros_in_grad: count the zeros in the gradients of each step, for `StepResult.num_zeros`.
        keep_fp32: patterns of names of buffers, parameters and arguments of the model's forward that are not cast.
    """

    loss_scale: Literal["dynamic"] | Scale = "dynamic"
    masters: Literal["float32", "split"] = "float32"
    log_num_zeros_in_grad: bool = False
    initial_scale: Scale = 2.0**16
    growth_factor: GrowthFactor = 2.0
    backoff_factor: BackoffFactor = 0.5
    growth_interval: PositiveInt = 1000
    hysteresis: PositiveInt = 2
    max_scale: Scale = 2.0**32
    min_scale: Scale = 1.0
    verbose: bool = False
    keep_fp32: Names = ()

    @model_validator(mode="after")
    def _consistent(self) -> NaiveOptions:
        moot = sorted(self.model_fields_set & _DYNAMIC_KEYS)
        if self.loss_scale != "dynamic":
            if moot:
                raise ValueError(
                    f"loss_scale={self.loss_scale} is static, so {', '.join(moot)} would have no effect; "
                    f"remove {'it' if len(moot) == 1 else 'them'}, or set loss_scale='dynamic'"
                )
        elif not self.min_scale <= self.initial_scale <= self.max_scale:
            raise ValueError(
                f"initial_scale={self.initial_scale} must lie between min_scale={self.min_scale} "
                f"and max_scale={self.max_scale}"
            )
        return self


_DYNAMIC_KEYS = frozenset(
    {"initial_scale", "growth_factor", "backoff_factor", "growth_interval", "hysteresis", "max_scale", "min_scale"}
)


class NaiveAMP(AMPPlugin):
    """Half-precision parameters with fp32 masters (apex's O2 with keep_batchnorm_fp32=False).

    Frozen parameters outside the optimizer, and floating-point buffers, are cast as well. Where rounding changes them,
    their original values stay in host memory (4 bytes per element): `close`, state dicts and checkpoints return these,
    and a layer that is unfrozen later starts from them.
    """

    options = NaiveOptions
    composes = Composes(parallel=ALL_PARALLEL)
    scale_keys = _DYNAMIC_KEYS | {"loss_scale", "verbose"}

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        assert isinstance(options, NaiveOptions)
        keys = options.model_dump(include={*_DYNAMIC_KEYS, "verbose"})
        scale = LossScale(initial=keys.pop("initial_scale"), **keys)
        if options.loss_scale != "dynamic":
            scale = LossScale(initial=options.loss_scale, dynamic=False, verbose=options.verbose)
        return Recipe(
            compute_dtype=dtype,
            param_dtype=dtype,
            master_weights=True,
            split_masters=options.masters == "split",
            loss_scale=scale if dtype == torch.float16 else None,
            output_dtype=torch.float32,
            count_zeros=options.log_num_zeros_in_grad,
            keep_fp32=options.keep_fp32,
        )
