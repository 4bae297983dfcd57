"""The effective plan: what a config came down to, printed once at the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .amp.optimizer import MixedPrecisionOptimizer
from .amp.recipe import Recipe
from .division import Division
from .errors import shorten
from .global_batch import batch_size
from .memory import StateBytes, readable, state_bytes
from .parallel.registries import SCHEDULES
from .parallel.tensor import TensorParallel
from .parallel.tensor_plans import generalise

if TYPE_CHECKING:
    from .loop.parts import EngineParts
    from .parallel.pipeline.partition import Partition


@dataclass(frozen=True)
class EffectivePlan:
    """What an engine came down to.

    Attributes:
        name: the engine's, if it has one.
        rows: by name, in words: precision, loss scale, layout, batch, update, memory; others where they apply.
        values: the same as plain values, for JSON. Bytes are this rank's.
    """

    rows: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    name: str | None = None

    def __str__(self) -> str:
        title = "halfmesh plan" if self.name is None else f"halfmesh plan of {self.name}"
        return "\n".join([title, *(f"  {name + ':':<11} {text}" for name, text in self.rows.items())])


def make_plan(parts: EngineParts, recipe: Recipe, loader: Any) -> EffectivePlan:
    """The plan of an engine whose model is divided and cast; `loader` is the user's."""
    update, division = parts.update, parts.division
    held = _held(parts, update)
    rows = {
        "precision": _precision(parts, recipe),
        "loss scale": _loss_scale(recipe),
        "layout": _layout(parts, division),
        **({} if division.plans.partition is None else {"stages": _stages(parts, division, division.plans.partition)}),
        **({} if division.plans.compilation is None else {"compile": _compile(parts, division)}),
        **({} if not _changes_activations(division) else {"activations": _activations(parts, division)}),
        **({} if division.late is None else {"values": division.late.words}),
        "batch": _batch(parts, loader),
        "update": _update(parts, update),
        "memory": _memory(held),
    }
    return EffectivePlan(
        rows, _values(parts, update, recipe, loader, division) | {"bytes": asdict(held)}, parts.config.name
    )


def _values(
    parts: EngineParts, update: MixedPrecisionOptimizer, recipe: Recipe, loader: Any, division: Division
) -> dict[str, Any]:
    config, context, partition = parts.config, parts.context, division.plans.partition
    size, cycle = batch_size(loader), config.gradient_accumulation
    return {
        "mode": None if config.precision is None else config.precision.label,
        "compute_dtype": _short(recipe.compute_dtype),
        "param_dtype": None if recipe.param_dtype is None else _short(recipe.param_dtype),
        "master_weights": bool(recipe.master_weights),
        "loss_scale": None
        if recipe.loss_scale is None
        else {"initial": recipe.loss_scale.initial, "dynamic": recipe.loss_scale.dynamic},
        "mesh": {"pp": context.pp_size, "dp": context.dp_size, "tp": context.tp_size},
        "device": context.device.type,
        "data_strategy": config.parallel.data.strategy,
        "stages": None if partition is None else list(partition.names),
        "batch": {
            "per_rank": size,
            "data_ranks": context.dp_size,
            "accumulated": cycle,
            "per_update": None if size is None else size * context.dp_size * cycle,
        },
        "optimizer": type(update.optimizer).__name__,
        "fused": bool(update.stepper.takes_grad_scale),
        "clip_grad_norm": config.clip_grad_norm.max_norm or None,
    }


def _precision(parts: EngineParts, recipe: Recipe) -> str:
    precision = parts.config.precision
    mode = "none" if precision is None else precision.label
    params = "as given" if recipe.param_dtype is None else _short(recipe.param_dtype)
    masters = ", fp32 masters" if recipe.master_weights else ""
    lists = {"torch": " (autocast)", "apex": " (apex's O1 lists)"}
    how = lists[recipe.cast_lists] if recipe.autocast else ""
    norm = ", BatchNorm float32" if recipe.keep_batchnorm_fp32 else ""
    return f"mode {mode}, compute {_short(recipe.compute_dtype)}{how}, parameters {params}{norm}{masters}"


def _loss_scale(recipe: Recipe) -> str:
    scale = recipe.loss_scale
    if scale is None:
        return "off"
    if not scale.dynamic:
        return f"static {scale.initial:g}"
    each = f"{recipe.num_losses} losses, each " if recipe.num_losses > 1 else ""
    return (
        f"{each}dynamic from {scale.initial:g}, x{scale.growth_factor:g} after {scale.growth_interval} good steps, "
        f"x{scale.backoff_factor:g} on overflow (hysteresis {scale.hysteresis})"
    )


def _layout(parts: EngineParts, division: Division) -> str:
    context, data = parts.context, parts.config.parallel.data
    mesh = f"pp {context.pp_size} x dp {context.dp_size} x tp {context.tp_size} on {context.device.type}"
    if context.size == 1:
        return f"{mesh}; one process holds all of the model"
    held = "every rank holds all of the model" if division.cut is None else "every rank holds its stages"
    if division.tensor is not None:
        held = _divided(
            parts, division, division.tensor, "this stage's numbers" if division.cut is not None else "the numbers"
        )
    averaged = f", gradients averaged in {data.reduce_dtype}" if context.dp_size > 1 else ""
    if division.sharded is not None:
        where = " in host memory" if data.cpu_offload else ""
        held = f"{held}, in parts{where} over {data.hybrid or context.dp_size} data ranks (fsdp)"
    if division.slices is not None:
        averaged += f", each data rank steps 1/{context.dp_size} of it (zero1)"
    return f"{mesh}; {held}{averaged}"


def _divided(parts: EngineParts, division: Division, tensor: TensorParallel, numbers: str) -> str:
    """Which layers are divided over the tensor group, and what part of the numbers that is."""
    sharded = [] if division.sharded is None else division.sharded.parts
    came = {part.source.param: part.model_param for part in sharded if part.source is not None}
    params = list(parts.model.named_parameters())
    cut = {name for name, param in params if came.get(param, param) in tensor.splits}
    own = sum(param.numel() for name, param in params if name in cut)
    whole = sum(param.numel() for name, param in params if name not in cut)
    names = {name.rpartition(".")[0] for name in cut}
    kinds = Counter(generalise(name) for name in sorted(names))
    layers = ", ".join(f"{kind} x {count}" if count > 1 else kind for kind, count in kinds.items())
    share = own * tensor.axis.size / (own * tensor.axis.size + whole)
    sequence = " and the sequence" if tensor.plan.regions else ""
    return f"{share:.0%} of {numbers}{sequence} divided over tp: {layers}"


def _stages(parts: EngineParts, division: Division, partition: Partition) -> str:
    """Schedule, bubble, who has which stage and what part of the whole it is, and what several have."""
    pipeline, total = parts.config.parallel.pipeline, sum(partition.costs) or 1
    microbatches = pipeline.microbatches or 1
    waits = SCHEDULES.get(pipeline.schedule).bubble(pipeline.size, pipeline.chunks, microbatches)
    each = "; ".join(
        f"{index} on pp {index % partition.size}: {name} ({cost / total:.0%} of parameters)"
        for index, (name, cost) in enumerate(zip(partition.names, partition.costs, strict=True))
    )
    tied = sorted(division.cut.tied_names) if division.cut is not None else []
    shared = f"; on several stages: {shorten(tied)}" if tied else ""
    return f"{pipeline.schedule}, {microbatches} microbatches, bubble {waits:.0%}; {each}{shared}"


def _compile(parts: EngineParts, division: Division) -> str:
    """What of this rank's part is compiled, and how."""
    options = parts.config.compile
    whole = division.compiled == [parts.model]
    kinds = Counter(type(module).__name__ for module in division.compiled)
    what = "the whole model" if whole else ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    settings = [f"{key}={value!r}" for key in ("mode", "dynamic") if (value := getattr(options, key)) is not None]
    settings += ["fullgraph=True"] if options.fullgraph else []
    return ", ".join([f"{what or 'nothing on this rank'} with {options.backend}, when first called", *settings])


def _changes_activations(division: Division) -> bool:
    return division.plans.activations is not None or division.offload is not None


def _activations(parts: EngineParts, division: Division) -> str:
    """What of this rank's part is computed again in backward, and what waits on the host."""
    if division.plans.activations is None:
        return "offloaded"
    count = len(division.checkpointed)
    what = "module" if parts.config.activation_checkpoint.patterns else "block"
    offloaded = ", offloaded" if division.offload is not None else ""
    label = parts.config.activation_checkpoint.label
    return f"{count} {what}{'s' if count != 1 else ''} checkpointed ({label}){offloaded}"


def _batch(parts: EngineParts, loader: Any) -> str:
    cycle, dp = parts.config.gradient_accumulation, parts.context.dp_size
    size = batch_size(loader)
    factors = f"{size or '?'} per rank x {dp} data rank(s) x {cycle} accumulated"
    asked = " (global_batch_size)" if parts.config.global_batch_size else ""
    return f"{factors} = {size * dp * cycle} samples per update{asked}" if size else factors


def _update(parts: EngineParts, update: MixedPrecisionOptimizer) -> str:
    config = parts.config
    fused = "fused" if update.stepper.takes_grad_scale else "not fused"
    fused += " by fused='auto'" if update.stepper.switched else ""
    fused += ", no host read" if update.stepper.folds else ""
    left = sum(p.requires_grad for p in parts.model.parameters()) - sum(
        shard.param.requires_grad for shard in update.master_weights.trained
    )
    held = f", {left} trainable parameter(s) left out" if left else ""
    clip = f", clip norm {config.clip_grad_norm.max_norm:g}" if config.clip_grad_norm.max_norm else ""
    streamed = (
        ", masters' gradients in buckets"
        if update.master_weights.masters and update.stepper.can_step_in_buckets
        else ""
    )
    return f"{type(update.optimizer).__name__} ({fused}){clip}{streamed}{held}"


def _held(parts: EngineParts, update: MixedPrecisionOptimizer) -> StateBytes:
    data = parts.config.parallel.data
    return state_bytes(parts.model, update, getattr(torch, data.reduce_dtype) if parts.context.dp_size > 1 else None)


def _memory(held: StateBytes) -> str:
    optimizer = "?" if held.optimizer is None else readable(held.optimizer)
    return (
        f"{readable(held.known)} per rank besides activations: parameters {readable(held.parameters)}, masters "
        f"{readable(held.masters)}, gradients {readable(held.gradients)}, optimizer state {optimizer}"
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
