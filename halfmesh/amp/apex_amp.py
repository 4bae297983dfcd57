"""APEX: the keys of apex.amp and what they compose with. The mode itself is not built yet."""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..options import Options, PositiveFloat, PositiveInt
from .plugin import AMPPlugin, Composes
from .recipe import Recipe

_NO_SHARED_VERDICT = (
    "apex's contract has no verdict shared by all ranks, so shards would skip different steps and drift apart; "
    "use mode='naive' (the same as O2 with keep_batchnorm_fp32=False) or mode='torch' (close to O1)"
)


class ApexOptions(Options):
    """The arguments of `apex.amp.initialize`, with its names and defaults."""

    enabled: bool = True
    opt_level: Literal["O0", "O1", "O2", "O3"] = "O1"
    num_losses: PositiveInt = 1
    verbosity: int = 1
    min_loss_scale: PositiveFloat | None = None
    max_loss_scale: PositiveFloat = 2.0**24
    cast_model_type: Any = None
    patch_torch_functions: bool | None = None
    keep_batchnorm_fp32: bool | Literal["True", "False"] | None = None
    master_weights: bool | None = None
    loss_scale: Literal["dynamic"] | PositiveFloat | None = None


class ApexAMP(AMPPlugin):
    """apex.amp's O0 to O3."""

    options = ApexOptions
    composes = Composes(
        dtypes=frozenset({"float16"}),
        why_not=dict.fromkeys(["tensor", "pipeline", "zero1", "fsdp"], _NO_SHARED_VERDICT)
        | {"bfloat16": "apex has no bf16; use bf16 = dict(mode='torch') or dict(mode='naive')"},
    )
    built = False

    @classmethod
    def recipe(cls, options: Options, dtype: torch.dtype) -> Recipe:
        raise NotImplementedError("mode='apex' is declared in the composition table but not built yet")
