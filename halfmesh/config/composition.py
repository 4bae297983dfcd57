"""The consequences of a config on a number of ranks, and the checks between its keys beyond the composition table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..amp.plugin import AMP_PLUGINS, PRECISIONS
from ..amp.recipe import FP32, Recipe
from ..errors import IncompatibleConfigError, counted
from ..parallel.data_strategy import DataStrategy
from ..parallel.dims import ParallelDims
from ..parallel.registries import AXES, DATA_STRATEGIES
from .config import Config


@dataclass(frozen=True)
class Finding:
    """One reason why a config cannot run, or should run otherwise. `where` is a key, or a cell of the composition
    table."""

    where: str
    message: str
    kind: Literal["rejected", "advice"] = "rejected"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


@dataclass(frozen=True)
class Setup:
    """A config on a number of ranks, and what follows from both. A command, or `initialize`, makes it once."""

    config: Config
    dims: ParallelDims
    recipe: Recipe

    @classmethod
    def of(cls, config: Config, world_size: int) -> Setup:
        """The mesh and the recipe of `config` on `world_size` ranks."""
        return cls(config, config.parallel.dims(world_size), _make_recipe(config))

    @property
    def strategy(self) -> type[DataStrategy]:
        """The data strategy. On one data rank only one that changes the model differs from `replicate`: it may gather
        block by block, from host memory, and casts."""
        strategy: type[DataStrategy] = DATA_STRATEGIES.get(self.config.parallel.data.strategy)
        return strategy if self.dims.grad_ranks > 1 or strategy.shards_model else DataStrategy

    @property
    def meets_in_forward(self) -> bool:
        """True if data ranks wait for each other in forward: each must make the same number of calls."""
        axes = (AXES.get(name) for name, size in self.config.parallel.sizes.items() if size > 1)
        return self.strategy.shards_model or any(axis.replica_dim for axis in axes)

    def accumulate(self, batch_size: int | None) -> Setup:
        """The same with `gradient_accumulation` set from `global_batch_size`; unchanged without that key.

        Args:
            batch_size: samples of a batch on each data rank; None: not known.

        Raises:
            IncompatibleConfigError: `global_batch_size` is not a multiple of `batch_size` x data ranks,
                `gradient_accumulation` is given and says otherwise, or `batch_size` is not known.
        """
        if self.config.global_batch_size is None:
            return self
        length = _cycle_length(self.config, self.config.global_batch_size, batch_size, self.dims.dp)
        return replace(self, config=self.config.model_copy(update={"gradient_accumulation": length}))


def find_key_problems(setup: Setup) -> Iterator[Finding]:
    """Everything that is wrong with the keys, on any number of ranks."""
    for check in (_check_axes, _check_data, _check_compile, _check_rest):
        yield from (Finding(key, message) for key, message in check(setup.config, setup.recipe))


def find_advice(setup: Setup) -> Iterator[Finding]:
    """Advice on configs that can run, but could run better."""
    asked = setup.config.parallel.data.strategy
    strategy = DATA_STRATEGIES.get(asked)
    if setup.strategy is not strategy:
        message = f"{asked!r} has nothing to shard over one data rank, so the run uses 'replicate'"
        yield Finding("parallel.data.strategy", message, "advice")
    for key, message in (
        strategy.find_advice(setup.config, setup.recipe.param_dtype) if setup.dims.grad_ranks > 1 else ()
    ):
        yield Finding(key, message, "advice")


def batch_size(loader: Any) -> int | None:
    """Samples that a DataLoader gives at a time; None if it does not say."""
    loader = getattr(loader, "loader", loader)  # in timm's PrefetchLoader
    size = getattr(loader, "batch_size", None) or getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None


def _cycle_length(config: Config, total: int, size: int | None, data_ranks: int) -> int:
    """The number of batches in an update of `total` samples."""
    if size is None:
        raise _rejected(
            f"{total}: the loader has no batch_size; give initialize a DataLoader with batch_size, or set "
            "gradient_accumulation instead"
        )
    what, together = f"batch size {size} x {counted(data_ranks, 'data rank')}", size * data_ranks
    if total % together:
        below, above = total // together * together, (total // together + 1) * together
        near = f"{below} or {above}" if below else str(above)
        raise _rejected(f"{total} is not a multiple of {what} = {together}; set it to {near}, or change the batch size")
    given, length = config.gradient_accumulation, total // together
    if "gradient_accumulation" in config.model_fields_set and given != length:
        raise _rejected(
            f"{total}, but {what} x gradient_accumulation={given} makes {together * given} samples; remove one of the "
            f"two keys, or set gradient_accumulation={length}"
        )
    return length


def _rejected(message: str) -> IncompatibleConfigError:
    return IncompatibleConfigError([f"global_batch_size: {message}"])


def _make_recipe(config: Config) -> Recipe:
    if config.precision is None or config.precision_key is None:
        return FP32
    plugin = AMP_PLUGINS.get(config.precision.mode)
    recipe = plugin.recipe(config.precision.options, getattr(torch, PRECISIONS[config.precision_key]))
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{plugin.__name__}.recipe returned {recipe!r}, but it must return a halfmesh.Recipe")
    return recipe


def _check_axes(config: Config, _: Recipe) -> Iterator[tuple[str, str]]:
    """Problems that the used axes find; keys of an axis of size 1 have no effect."""
    for name, size in config.parallel.sizes.items():
        if size > 1:
            yield from AXES.get(name).find_key_problems(config)


def _check_data(config: Config, recipe: Recipe) -> Iterator[tuple[str, str]]:
    data = config.parallel.data
    strategy = DATA_STRATEGIES.get(data.strategy)
    if data.reduce_dtype == "float16" and not recipe.keeps_scale:
        message = "without a loss scale, sums of gradients leave the range of float16; use 'float32'"
        yield "parallel.data.reduce_dtype", message
    yield from strategy.find_key_problems(config, recipe.param_dtype)


def _check_compile(config: Config, recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Problems of keys that compiled code cannot serve."""
    options, parallel = config.compile, config.parallel
    if not options.enabled:
        return
    if options.mode is not None and options.backend != "inductor":
        yield "compile.mode", f"only backend='inductor' has modes, not {options.backend!r}; remove one of the two"
    several = {
        "gradient_accumulation": config.gradient_accumulation,
        "num_losses": recipe.num_losses,
        "parallel.pipeline.size": parallel.pipeline.size,
    }
    why = " and ".join(key for key, number in several.items() if number > 1)
    for key, value in options.graphs.items() if why else ():
        yield (
            f"compile.{key}",
            f"{value!r} makes CUDA graphs, and with {why} > 1 the next call of a graph may overwrite gradients "
            "that are still needed; use mode='max-autotune-no-cudagraphs' or 'default'",
        )
    whole_model = {
        "under a pipeline, which calls blocks": parallel.pipeline.size > 1,
        f"with data={parallel.data.strategy!r}, which gathers the weights of each block between graphs": (
            DATA_STRATEGIES.get(parallel.data.strategy).shards_model
        ),
        "with activation_checkpoint, which calls modules again": config.activation_checkpoint.enabled,
    }
    for why, holds in whole_model.items():
        if options.scope == "model" and holds:
            yield "compile.scope", f"'model' is not possible {why}; use 'blocks', or leave scope out"
    if recipe.cast_lists == "apex":
        yield (
            "compile",
            "O1's casts have no effect in compiled code; use mode='torch' (close to O1) or opt_level='O2', or leave "
            "compile out",
        )
    elif config.precision is not None and getattr(config.precision.options, "backend", None) == "apex":
        yield "compile", "compiled code does not call the functions that apex changes; use backend='native'"


def _check_rest(config: Config, recipe: Recipe) -> Iterator[tuple[str, str]]:
    selective = config.activation_checkpoint.selective
    if recipe.split_masters and recipe.param_dtype != torch.bfloat16:
        message = "'split' needs weights that are the upper half of fp32, which only bf16 has; use bf16, or leave"
        yield f"{config.precision_key}.masters", f"{message} masters out"
    if config.loss_reduction == "weighted" and recipe.num_losses > 1:
        losses = recipe.num_losses
        yield "loss_reduction", f"'weighted' joins batches of one loss, not of num_losses={losses}; use 'mean' or 'sum'"
    if selective and config.activation_offload:
        yield (
            "activation_offload",
            "torch keeps the tensors that activation_checkpoint='selective' saves where they cannot be moved; use "
            "'full' or dict(every=...) with it, or leave one of the two out",
        )
    if selective and config.compile.enabled:
        yield (
            "activation_checkpoint",
            "'selective' chooses among torch's operations, which compiled code does not call one by one; use 'full', "
            "dict(every=...) or dict(patterns=...), or leave compile out",
        )
    if config.resume == "auto" and config.checkpoint is None:
        yield "resume", "'auto' needs checkpoint.directory; set checkpoint='checkpoints', or give resume a folder"
