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
from .parallel.registries import SCHEDULES

Kind = Literal["refused", "advice"]

_FSDP_KEYS = (
    "param_dtype",
    "output_dtype",
    "buffer_dtype",
    "reshard_after_forward",
    "prefetch",
    "cpu_offload",
    "hybrid",
)


@dataclass(frozen=True)
class Finding:
    """One reason why a config cannot run, or should run otherwise. `where` is a key, or a cell of the composition
    table."""

    kind: Kind
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"


def find_key_problems(config: Config) -> Iterator[Finding]:
    """Everything that is wrong with the keys, whatever the number of ranks."""
    yield from _check_pipeline(config)
    yield from _check_data(config)
    yield from _check_losses(config)
    yield from _check_compile(config)
    yield from _check_activations(config)
    yield from _check_resume(config)


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
        yield Finding("advice", "parallel.data.reduce_dtype", message)
    if recipe.param_dtype is None and data.param_dtype in (None, "float32"):
        message = (
            "weights are gathered in float32; bf16 = dict(mode='naive') gathers, sends and holds half as much, with "
            "the parts as fp32 masters, and mode='torch' with param_dtype='bfloat16' gathers in bf16, too"
        )
        yield Finding("advice", "parallel.data.param_dtype", message)


def recipe_of(config: Config) -> Recipe:
    """The recipe of the config's mode."""
    if config.precision is None or config.precision_dtype is None:
        return FP32
    plugin = AMP_PLUGINS.get(config.precision.mode)
    recipe = plugin.recipe(config.precision.options, getattr(torch, config.precision_dtype))
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{plugin.__name__}.recipe returned {recipe!r}, but it has to return a halfmesh.Recipe")
    return recipe


def _check_pipeline(config: Config) -> Iterator[Finding]:
    """Microbatches and chunks against the schedule; without a pipeline these keys have no effect."""
    pipeline = config.parallel.pipeline
    size, microbatches, schedule = pipeline.size, pipeline.microbatches, pipeline.schedule
    if size == 1:
        return
    where = "parallel.pipeline.microbatches"
    if microbatches is None:
        start = f"pipeline=dict(size={size}, microbatches={2 * size})"
        yield Finding("refused", where, f"is required when pipeline.size > 1; {start} is a start")
    for key, message in SCHEDULES.get(schedule).find_problems(size, pipeline.chunks, microbatches):
        yield Finding("refused", f"parallel.pipeline.{key}", message)


def _check_data(config: Config) -> Iterator[Finding]:
    data = config.parallel.data
    if data.reduce_dtype == "float16" and not recipe_of(config).keeps_scale:
        message = "without a loss scale, gradients leave float16's range while they are summed; use 'float32'"
        yield Finding("refused", "parallel.data.reduce_dtype", message)
    if data.strategy != "fsdp":
        for key in _FSDP_KEYS:
            if getattr(data, key) != DataConfig.model_fields[key].default:
                message = f"only strategy='fsdp' has it, and the strategy is {data.strategy!r}; remove it"
                yield Finding("refused", f"parallel.data.{key}", message)
        return
    if config.parallel.pipeline.size > 1 and data.output_dtype is not None:
        message = f"{data.output_dtype!r} cannot be had under a pipeline, which calls no model as a whole; remove it"
        yield Finding("refused", "parallel.data.output_dtype", message)
    if config.parallel.pipeline.size > 1 and not data.reshard_after_forward:
        message = (
            "False keeps the weights that were gathered for one microbatch while others are on their way, which FSDP2 "
            "does not do right under a pipeline; leave it at True"
        )
        yield Finding("refused", "parallel.data.reshard_after_forward", message)
    if config.parallel.pipeline.size > 1 and data.prefetch > 1:
        message = f"{data.prefetch}: FSDP2 cannot gather ahead under a pipeline, where units are apart; leave it at 1"
        yield Finding("refused", "parallel.data.prefetch", message)
    decides = recipe_of(config).param_dtype
    if data.buffer_dtype is not None and decides not in (None, getattr(torch, data.buffer_dtype)):
        message = f"{data.buffer_dtype!r} is not what the mode casts the model to ({config.precision_dtype}); remove it"
        yield Finding("refused", "parallel.data.buffer_dtype", message)
    if config.activation_offload and not config.activation_checkpoint.enabled:
        message = (
            "True with data='fsdp' would move the gathered weights, too, which are among what forward saves; set "
            "activation_checkpoint, of which only the inputs are moved, or use 'zero1'"
        )
        yield Finding("refused", "activation_offload", message)
    if data.param_dtype not in (None, config.precision_dtype or "float32"):
        message = f"{data.param_dtype!r} is not what the mode computes in ({config.precision_dtype or 'float32'})"
        yield Finding("refused", "parallel.data.param_dtype", f"{message}; remove it: the mode decides")


def _check_losses(config: Config) -> Iterator[Finding]:
    losses = recipe_of(config).num_losses
    if config.loss_reduction == "weighted" and losses > 1:
        message = f"'weighted' joins the batches of one loss, but num_losses is {losses}; use 'mean' or 'sum'"
        yield Finding("refused", "loss_reduction", message)


def _check_compile(config: Config) -> Iterator[Finding]:
    """What compiled code cannot do; whether there is a compiler is asked by `initialize`."""
    options, parallel = config.compile, config.parallel
    if not options.enabled:
        return
    if options.mode is not None and options.backend != "inductor":
        message = f"only backend='inductor' has modes, and the backend is {options.backend!r}; remove one of the two"
        yield Finding("refused", "compile.mode", message)
    if options.scope == "model" and parallel.pipeline.size > 1:
        message = (
            "'model' is not possible under a pipeline, whose stages call the model's blocks and never the model as a "
            "whole; use 'blocks', or leave scope out"
        )
        yield Finding("refused", "compile.scope", message)
    if options.fullgraph and parallel.tensor.size > 1:
        message = (
            "divided layers wait for other ranks, and a graph ends at each of these places, so that none is full; "
            "leave fullgraph out, or use tensor=1"
        )
        yield Finding("refused", "compile.fullgraph", message)
    if options.scope == "model" and parallel.data.strategy == "fsdp":
        message = (
            "'model' has a graph for each block all the same under data='fsdp', where blocks gather their weights "
            "between graphs, and takes far longer to compile; use 'blocks', or leave scope out"
        )
        yield Finding("refused", "compile.scope", message)
    if recipe_of(config).cast_lists == "apex":
        message = (
            "O1's casts do not reach into compiled code; use mode='torch' (close to O1) or opt_level='O2', or leave "
            "compile out"
        )
        yield Finding("refused", "compile", message)
    elif config.precision is not None and getattr(config.precision.options, "backend", None) == "apex":
        message = "an installed apex changes torch's functions, which compiled code does not call; use backend='native'"
        yield Finding("refused", "compile", message)


def _check_activations(config: Config) -> Iterator[Finding]:
    options, compiled = config.activation_checkpoint, config.compile
    if options.selective and config.activation_offload:
        message = (
            "torch keeps what 'selective' saves where it cannot be moved; use activation_checkpoint='full' or "
            "dict(every=...) with it, or leave one of the two out"
        )
        yield Finding("refused", "activation_offload", message)
    if options.selective and compiled.enabled:
        message = (
            "'selective' chooses among torch's operations, which compiled code does not call one by one; use 'full', "
            "dict(every=...) or dict(patterns=...), or leave compile out"
        )
        yield Finding("refused", "activation_checkpoint", message)
    if options.enabled and compiled.enabled and compiled.scope == "model":
        message = (
            "'model' compiles all modules as one, and those that are computed again are called by themselves; use "
            "'blocks', or leave scope out"
        )
        yield Finding("refused", "compile.scope", message)


def _check_resume(config: Config) -> Iterator[Finding]:
    if config.resume == "auto" and config.checkpoint is None:
        message = (
            "'auto' goes on from the newest checkpoint of checkpoint.directory, which is not set; set "
            "checkpoint='checkpoints', or give resume a folder"
        )
        yield Finding("refused", "resume", message)
