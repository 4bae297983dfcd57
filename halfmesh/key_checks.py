"""What a config's keys say to each other, beside the composition table: pipeline, data, losses, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from .amp.plugin import AMP_PLUGINS
from .amp.recipe import FP32, Recipe
from .config.config import Config
from .config.schema import DataConfig
from .parallel.registries import AXES

_FSDP_KEYS = (
    *("param_dtype", "output_dtype", "buffer_dtype", "reshard_after_forward", "prefetch", "cpu_offload"),
    "hybrid",
)


@dataclass(frozen=True)
class Finding:
    """One reason why a config cannot run, or should run otherwise. `where` is a key, or a cell of the composition
    table."""

    where: str
    message: str
    kind: Literal["refused", "advice"] = "refused"

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def find_key_problems(config: Config) -> Iterator[Finding]:
    """Everything that is wrong with the keys, whatever the number of ranks."""
    for check in (_check_axes, _check_data, _check_losses, _check_compile, _check_activations, _check_resume):
        yield from (Finding(key, message) for key, message in check(config))


def find_advice(config: Config) -> Iterator[Finding]:
    """What runs, and could run better."""
    data, recipe = config.parallel.data, recipe_of(config)
    if data.strategy != "fsdp":
        return
    if data.reduce_dtype != "float32":
        message = (
            f"gradients are summed over the ranks in {data.reduce_dtype}, where small ones are lost among large ones; "
            "'float32', the default, is what FSDP2's documentation recommends, also for half-precision weights"
        )
        yield Finding("parallel.data.reduce_dtype", message, "advice")
    if recipe.param_dtype is None and data.param_dtype in (None, "float32"):
        message = (
            "weights are gathered in float32; bf16 = dict(mode='naive') gathers, sends and holds half as much, with "
            "the parts as fp32 masters, and mode='torch' with param_dtype='bfloat16' gathers in bf16, too"
        )
        yield Finding("parallel.data.param_dtype", message, "advice")


def recipe_of(config: Config) -> Recipe:
    """The recipe of the config's mode."""
    if config.precision is None or config.precision_dtype is None:
        return FP32
    plugin = AMP_PLUGINS.get(config.precision.mode)
    recipe = plugin.recipe(config.precision.options, getattr(torch, config.precision_dtype))
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{plugin.__name__}.recipe returned {recipe!r}, but it has to return a halfmesh.Recipe")
    return recipe


def _check_axes(config: Config) -> Iterator[tuple[str, str]]:
    """What the axes that are used say; keys of an axis of size 1 have no effect."""
    for name, size in config.parallel.sizes.items():
        if size > 1:
            yield from AXES.get(name).find_key_problems(config)


def _check_data(config: Config) -> Iterator[tuple[str, str]]:
    data, recipe, pipeline = config.parallel.data, recipe_of(config), config.parallel.pipeline.size > 1
    changed = [key for key in _FSDP_KEYS if getattr(data, key) != DataConfig.model_fields[key].default]
    if data.reduce_dtype == "float16" and not recipe.keeps_scale:
        message = "without a loss scale, gradients leave float16's range while they are summed; use 'float32'"
        yield "parallel.data.reduce_dtype", message
    for key in changed:
        if data.strategy != "fsdp":
            message = f"only strategy='fsdp' has it, and the strategy is {data.strategy!r}; remove it"
            yield f"parallel.data.{key}", message
        elif pipeline and key in ("output_dtype", "reshard_after_forward", "prefetch"):
            message = "FSDP2 does not do this under a pipeline, whose stages call the model's blocks apart; remove it"
            yield f"parallel.data.{key}", message
    if data.strategy != "fsdp":
        return
    if data.buffer_dtype is not None and recipe.param_dtype not in (None, getattr(torch, data.buffer_dtype)):
        message = f"{data.buffer_dtype!r} is not what the mode casts the model to ({config.precision_dtype}); remove it"
        yield "parallel.data.buffer_dtype", message
    computes_in = config.precision_dtype or "float32"
    if data.param_dtype not in (None, computes_in):
        message = f"{data.param_dtype!r} is not what the mode computes in ({computes_in}); remove it: the mode decides"
        yield "parallel.data.param_dtype", message
    if config.activation_offload and not config.activation_checkpoint.enabled:
        message = (
            "True with data='fsdp' would move the gathered weights, too, which forward saves; set "
            "activation_checkpoint, which saves inputs only, or use 'zero1'"
        )
        yield "activation_offload", message


def _check_losses(config: Config) -> Iterator[tuple[str, str]]:
    losses = recipe_of(config).num_losses
    if config.loss_reduction == "weighted" and losses > 1:
        message = f"'weighted' joins the batches of one loss, but num_losses is {losses}; use 'mean' or 'sum'"
        yield "loss_reduction", message


def _check_compile(config: Config) -> Iterator[tuple[str, str]]:
    """What compiled code cannot do."""
    options, parallel = config.compile, config.parallel
    if not options.enabled:
        return
    if options.mode is not None and options.backend != "inductor":
        message = f"only backend='inductor' has modes, and the backend is {options.backend!r}; remove one of the two"
        yield "compile.mode", message
    whole_model = {
        "under a pipeline, whose stages call blocks and never the model as a whole": parallel.pipeline.size > 1,
        "with data='fsdp', which gathers the weights of each block between graphs": parallel.data.strategy == "fsdp",
        "with activation_checkpoint, which calls modules by themselves again": config.activation_checkpoint.enabled,
    }
    for why, holds in whole_model.items():
        if options.scope == "model" and holds:
            yield "compile.scope", f"'model' is not possible {why}; use 'blocks', or leave scope out"
    if recipe_of(config).cast_lists == "apex":
        message = (
            "O1's casts do not reach into compiled code; use mode='torch' (close to O1) or opt_level='O2', or leave "
            "compile out"
        )
        yield "compile", message
    elif config.precision is not None and getattr(config.precision.options, "backend", None) == "apex":
        message = "an installed apex changes torch's functions, which compiled code does not call; use backend='native'"
        yield "compile", message


def _check_activations(config: Config) -> Iterator[tuple[str, str]]:
    if config.activation_checkpoint.selective and config.activation_offload:
        message = (
            "torch keeps what activation_checkpoint='selective' saves where it cannot be moved; use 'full' or "
            "dict(every=...) with it, or leave one of the two out"
        )
        yield "activation_offload", message
    if config.activation_checkpoint.selective and config.compile.enabled:
        message = (
            "'selective' chooses among torch's operations, which compiled code does not call one by one; use 'full', "
            "dict(every=...) or dict(patterns=...), or leave compile out"
        )
        yield "activation_checkpoint", message


def _check_resume(config: Config) -> Iterator[tuple[str, str]]:
    if config.resume == "auto" and config.checkpoint is None:
        message = (
            "'auto' goes on from the newest checkpoint of checkpoint.directory, which is not set; set "
            "checkpoint='checkpoints', or give resume a folder"
        )
        yield "resume", message
