"""The configs of the runs: of the layout in each phase, shrunk to few ranks, and of its reference; their rounding."""

from __future__ import annotations

from typing import Any

import torch

from ..config import Config
from ..config.composition import Setup
from ..config.schema import CompileConfig, DataConfig, ParallelConfig
from ..parallel.registries import AXES, DATA_STRATEGIES

QUIET: dict[str, Any] = {"checkpoint": None, "resume": None, "compile": CompileConfig(enabled=False)}
QUIET |= {"track_grad_norm": True, "on_nonfinite": "auto"}
"""Without what writes files; compiled code would only make the proof slow, and hooks run without it."""


def shrink(setup: Setup) -> Setup:
    """The same layout with at most 2 ranks on each axis."""
    config, ranks = setup.config, setup.dims.dp
    parallel, data = config.parallel, config.parallel.data
    changed: dict[str, Any] = {}
    for key, size in parallel.sizes.items():
        changed[key] = getattr(parallel, key).model_copy(update={"size": min(size, 2)})
    shared = DATA_STRATEGIES.get(data.strategy).ranks_of_copy(data, ranks)
    copies = ranks // shared
    dp = min(shared, 2) * min(copies, 2)
    changed["data"] = _with(data, size=None, hybrid=min(shared, 2) if copies > 1 else None)
    views = [size for key, size in parallel.sizes.items() if size > 1 and AXES.get(key).replica_dim]
    dp = max([dp, *(2 * min(ranks // size, 2) for size in views)])
    parallel = parallel.model_copy(update=changed)
    return Setup.of(config.model_copy(update={"parallel": parallel}), dp * parallel.ranks_of_batch)


def _with(data: DataConfig, **keys: Any) -> DataConfig:
    """A copy with those of the `keys` that its strategy has."""
    return data.model_copy(update={key: value for key, value in keys.items() if key in type(data).model_fields})


def settle(config: Config, rows: int) -> Config:
    """`config` without what a run of a few updates cannot have; `rows`: of one batch on all data ranks."""
    cycle = config.gradient_accumulation
    if config.global_batch_size is not None:
        cycle = max(1, config.global_batch_size // max(1, rows))
    return config.model_copy(
        update={**QUIET, "global_batch_size": None, "lr_interval": "step", "gradient_accumulation": min(cycle, 2)}
    )


def structure(config: Config) -> Config:
    """`config` without its precision."""
    data = _with(config.parallel.data, reduce_dtype="float32", param_dtype=None, output_dtype=None, buffer_dtype=None)
    parallel = config.parallel.model_copy(update={"data": data})
    return config.model_copy(update={"fp16": None, "bf16": None, "fp8": None, "parallel": parallel})


def reference(config: Config, calls: int) -> Config:
    """`config` in one process, which makes `calls` calls for each update."""
    alone = {"parallel": ParallelConfig(data=DataConfig()), "gradient_accumulation": calls}
    return config.model_copy(update=alone)


def gentle(config: Config) -> Config:
    """`config` with a loss scale that the first updates do not overflow with."""
    key, precision = config.precision_key, config.precision
    options: Any = precision and precision.options
    name = next((name for name in ("init_scale", "initial_scale") if hasattr(options, name)), None)  # torch, naive
    if key is None or precision is None or name is None or getattr(options, "loss_scale", "dynamic") != "dynamic":
        return config
    scale = max(min(getattr(options, name), 2.0**10), getattr(options, "min_scale", 0.0))
    options = options.model_copy(update={name: scale})
    return config.model_copy(update={key: precision.model_copy(update={"options": options})})


def rounding(setup: Setup) -> float:
    """Of the formats in which a config computes and reduces, the largest relative error of rounding."""
    recipe = setup.recipe
    dtypes = [recipe.compute_dtype, getattr(torch, setup.config.parallel.data.reduce_dtype)]
    return 2.0**-4 if recipe.linear is not None else max(torch.finfo(dtype).eps / 2 for dtype in dtypes)
