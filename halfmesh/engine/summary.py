"""The effective plan: the resolved configuration, printed once at the start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..amp.recipe import Recipe
from ..config.global_batch import batch_size
from ..errors import readable
from ..parallel.mesh import in_words
from ..utils.tensors import dtype_name
from .memory import state_bytes

if TYPE_CHECKING:
    from .parts import EngineParts


@dataclass(frozen=True)
class EffectivePlan:
    """The resolved configuration of an engine.

    Attributes:
        name: the engine's, if it has one.
        rows: by name, in words: precision, loss scale, layout, batch, update, memory; others where they apply.
        values: the same for programs, as plain values for JSON. Bytes are this rank's.
    """

    rows: Mapping[str, str]
    values: Mapping[str, Any]
    name: str | None

    def __str__(self) -> str:
        title = "halfmesh plan" if self.name is None else f"halfmesh plan of {self.name}"
        return "\n".join([title, *(f"  {name + ':':<11} {text}" for name, text in self.rows.items())])


def make_plan(parts: EngineParts, recipe: Recipe, loader: Any) -> EffectivePlan:
    """The plan of an engine whose model is parallelized and cast; `loader` is the user's."""
    config, context, division = parts.config, parts.context, parts.division
    size, cycle = batch_size(loader), config.gradient_accumulation
    reduced = getattr(torch, config.parallel.data.reduce_dtype) if context.dp_size > 1 else None
    held = state_bytes(parts.model, parts.update, reduced)
    batch = f"{size or '?'} per rank x {context.dp_size} data rank(s) x {cycle} accumulated"
    total = size and size * context.dp_size * cycle
    if total:
        batch += f" = {total} samples per update{' (global_batch_size)' if config.global_batch_size else ''}"
    memory = (
        f"{readable(held.known)} per rank besides activations: parameters {readable(held.parameters)}, masters "
        f"{readable(held.masters)}, gradients {readable(held.gradients)}, optimizer state "
        f"{'?' if held.optimizer is None else readable(held.optimizer)}"
    )
    rows = {
        "precision": _precision(parts, recipe),
        "loss scale": _loss_scale(recipe),
        **_layout(parts),
        "compile": _compile(parts),
        "activations": _activations(parts),
        "values": None if division.late is None else division.late.description,
        "batch": batch,
        "update": _update(parts),
        "memory": memory,
    }
    scale = recipe.loss_scale
    values = {
        "mode": None if config.precision is None else config.precision.label,
        "compute_dtype": dtype_name(recipe.compute_dtype),
        "loss_scale": None if scale is None else {"initial": scale.initial, "dynamic": scale.dynamic},
        "mesh": dict(context.sizes),
        "batch": {"per_rank": size, "data_ranks": context.dp_size, "accumulated": cycle, "per_update": total},
        "bytes": asdict(held),
    }
    return EffectivePlan({name: text for name, text in rows.items() if text is not None}, values, config.name)


def _precision(parts: EngineParts, recipe: Recipe) -> str:
    precision = parts.config.precision
    mode = "none" if precision is None else precision.label
    params = "as given" if recipe.param_dtype is None else dtype_name(recipe.param_dtype)
    how = {"torch": " (autocast)", "apex": " (apex's O1 lists)"}[recipe.cast_lists] if recipe.autocast else ""
    norm = ", BatchNorm float32" if recipe.keep_batchnorm_fp32 else ""
    masters = ", fp32 masters" if recipe.master_weights else ""
    linear = "" if recipe.linear is None else f", {recipe.linear.describe(parts.model, parts.context.device)}"
    return f"mode {mode}, compute {dtype_name(recipe.compute_dtype)}{how}{linear}, parameters {params}{norm}{masters}"


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


def _layout(parts: EngineParts) -> dict[str, str]:
    """The mesh, this rank's coordinates in it, and notes of the axes."""
    context, division, parallel = parts.context, parts.division, parts.config.parallel
    mesh = in_words(context.sizes) + f" on {context.device.type}"
    if context.size == 1:
        return {"layout": f"{mesh}; one process holds all of the model{division.data.text}"}
    came = {part.source.param: part.model_param for part in division.data.shards if part.source is not None}
    held = dict(parts.model.named_parameters())
    params = {name: came.get(param, param) for name, param in held.items()}
    sizes = {name: param.numel() for name, param in held.items()}
    rows, layouts = dict[str, str](), list[str]()
    for name, axis in reversed(division.axes.items()):
        row = dict(axis.describe(params, sizes, getattr(parallel, name)))
        layouts += [row.pop("layout")] if "layout" in row else []
        rows |= row
    text = ", ".join(layouts) or "every rank holds all of the model"
    text += division.data.text
    if context.dp_size > 1:
        text += f", gradients averaged in {parallel.data.reduce_dtype}"
    return {"layout": f"{mesh}; {text}", **rows}


def _compile(parts: EngineParts) -> str | None:
    """The compiled modules of this rank and the options, in words."""
    options, compiled = parts.config.compile, parts.division.compiled
    if not parts.division.plans.compiled:
        return None
    what = "the whole model"
    if compiled != [parts.model]:
        kinds = Counter(type(module).__name__ for module in compiled)
        what = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "nothing on this rank"
    settings = [f"{key}={value!r}" for key in ("mode", "dynamic") if (value := getattr(options, key)) is not None]
    settings += ["fullgraph=True"] if options.fullgraph else []
    return ", ".join([f"{what} with {options.backend}, when first called", *settings])


def _activations(parts: EngineParts) -> str | None:
    """The modules of this rank that are recomputed in backward, and the activations offloaded to the host."""
    division, options = parts.division, parts.config.activation_checkpoint
    words = []
    if division.plans.recomputed:
        kind = "module(s)" if options.patterns else "block(s)"
        words.append(f"{len(division.checkpointed)} {kind} checkpointed ({options.label})")
    if division.offload is not None:
        words.append("offloaded")
    return ", ".join(words) or None


def _update(parts: EngineParts) -> str:
    update, max_norm = parts.update, parts.config.clip_grad_norm.max_norm
    stepper, masters = update.stepper, update.master_weights
    fused = "fused" if stepper.takes_grad_scale else "not fused"
    fused += " by fused='auto'" if stepper.switched else ""
    fused += ", no host read" if stepper.fuses_unscale else ""
    words = [f"{type(update.optimizer).__name__} ({fused})"]
    if max_norm:
        words.append(f"clip norm {max_norm:g}")
    if parts.lr.scheduler is not None:
        when = {"step": "after each update", "epoch": "after each epoch", "manual": "advanced by the loop"}
        words.append(f"{type(parts.lr.scheduler).__name__} {when[parts.config.lr_interval]}")
    if masters.masters and stepper.can_step_in_buckets:
        words.append("masters' gradients in buckets")
    trainable = sum(param.requires_grad for param in parts.model.parameters())
    left = trainable - sum(shard.param.requires_grad for shard in masters.trained)
    if left:
        words.append(f"{left} trainable parameter(s) left out")
    return ", ".join(words)
