"""The effective plan: the resolved configuration, printed once at the start; and the memory of weights."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import Recipe
from ..config.composition import batch_size
from ..errors import InputError, counted, readable
from ..parallel.dims import in_words
from ..utils.tensors import bucket_bytes, dtype_name

if TYPE_CHECKING:
    from ..checkpoint.state import ShardedState
    from ..config import Config
    from ..parallel.mesh import ParallelContext
    from .lr_scheduler import LRAdvance

# Optimizers that keep two, and one, fp32 tensors of a parameter's size.
_TWO = (optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.Rprop)
_ONE = (optim.Adagrad, optim.RMSprop, optim.ASGD, optim.Muon)


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, without activations and communication buffers."""

    parameters: int
    masters: int  # at their peak: with the memory of split masters in an update
    optimizer: int | None  # None for an optimizer whose state is not known
    gradients: int  # at their peak, with the masters' temporary fp32 gradients


def state_bytes(model: nn.Module, update: MixedPrecisionOptimizer, reduced: torch.dtype | None = None) -> StateBytes:
    """Count the bytes of `model` and `update` on this rank; gradients are reduced over dp in `reduced`."""
    parts: dict[torch.Tensor, torch.Tensor] = {  # of sharded parameters
        shard.source.param: shard.param
        for shard in update.master_weights.trained
        if shard.source is not None and shard.original is not None
    }
    params = [parts.get(tensor, tensor) for tensor in (*model.parameters(), *model.buffers())]
    trained = sum(s.param.numel() for s in update.master_weights.trained if s.param.requires_grad)
    receivers = [parts.get(s.param, s.param) for s in update.master_weights.receivers if s.param.requires_grad]
    grads = sum(param.numel() * param.element_size() for param in receivers)
    published = trained if update.publisher is not None else 0
    limit = bucket_bytes(update.device, published) if update.stepper.can_step_in_buckets else trained * 4
    masters, temporary = update.master_weights, 0
    cuts = update.publisher is not None and not parts
    if reduced is not None and cuts:  # of all parameters, and reduced ones of this rank's shards
        temporary = trained * reduced.itemsize
    elif reduced is not None:  # held in the reduction's buckets, which masters take as they are
        grads = max(grads, trained * reduced.itemsize)
    elif masters.masters:
        temporary = min(trained * 4, limit)
    joined = min(sum(p.numel() for p in masters.masters) * 4, limit) if update.recipe.split_masters else 0
    trained_ids = {id(target) for s, target in update.master_weights.stepped.items() if s.param.requires_grad}
    states = [_state_bytes(part, trained_ids) for part in update.stepper.parts]
    return StateBytes(
        parameters=sum(p.numel() * p.element_size() for p in params),
        masters=sum(m.numel() * m.element_size() for m in masters.kept) + joined,
        optimizer=None if None in states else sum(filter(None, states)),
        gradients=grads + temporary,
    )


def _state_bytes(optimizer: optim.Optimizer, trained: Container[int]) -> int | None:
    """Bytes of the fp32 tensors of a parameter's size that `optimizer` keeps for those of its parameters whose ids are
    in `trained`; None: not known."""
    groups, kind = optimizer.param_groups, type(optimizer)
    if kind not in (*_TWO, *_ONE, optim.SGD):
        return None
    more = sum(any(group.get(key) for group in groups) for key in ("amsgrad", "centered"))
    if kind in (optim.SGD, optim.RMSprop):
        more += any(group["momentum"] for group in groups)
    held = sum(param.numel() for group in groups for param in group["params"] if id(param) in trained)
    return held * 4 * ((2 if kind in _TWO else int(kind in _ONE)) + more)


def parse_bytes(text: str) -> int:
    """The number of bytes in `text`: "80GB" (of 1000**3), "80 GiB" (of 1024**3), "80e9".

    Raises:
        InputError: it is no number with a unit; or a number below 1e6 without one, which nobody means as bytes.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None:
        raise InputError(f"{text!r} is not an amount of memory; write 80GB, 80GiB or 80e9")
    number, letter, binary = found.groups()
    if text.strip().isdecimal() and int(text) < 1e6:
        raise InputError(f"{text!r} is {text.strip()} bytes; did you mean {text.strip()}GB?")
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter or " "))


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
        title = "halfmesh: resolved configuration" + ("" if self.name is None else f" of {self.name}")
        return "\n".join([title, *(f"  {name + ':':<11} {text}" for name, text in self.rows.items())])


def make_plan(
    config: Config, context: ParallelContext, state: ShardedState, lr: LRAdvance, recipe: Recipe, loader: Any
) -> EffectivePlan:
    """The plan of an engine whose model is parallelized and cast; `loader` is the user's."""
    model, update, parallel_model = state.model, state.update, state.parallel_model
    size, cycle = batch_size(loader), config.gradient_accumulation
    reduced = getattr(torch, config.parallel.data.reduce_dtype) if context.dims.grad_ranks > 1 else None
    held = asdict(state_bytes(model, update, reduced))
    batch = f"{size or '?'} per rank x {counted(context.dp_size, 'data rank')} x {cycle} accumulated"
    total = size and size * context.dp_size * cycle
    if total:
        batch += f" = {total} samples per update{' (global_batch_size)' if config.global_batch_size else ''}"
    shown = {name: "?" if size is None else readable(size) for name, size in held.items()}
    compiled, recomputed = parallel_model.compiled, len(parallel_model.checkpointed)
    what = "module" if config.activation_checkpoint.patterns else "block"
    label = config.activation_checkpoint.label
    activations = [f"{counted(recomputed, what)} checkpointed ({label})"] if recomputed else []
    activations += ["offloaded"] * (parallel_model.offload is not None)
    rows = {
        "precision": _precision(config, context, state, recipe),
        "loss scale": _loss_scale(recipe),
        **_layout(config, context, state),
        "compile": f"{counted(len(compiled), 'module')} with {config.compile.backend}" if compiled else "",
        "activations": ", ".join(activations),
        "batch": batch,
        "update": _update(config, state, lr),
        "memory": f"{readable(sum(filter(None, held.values())))} per rank without activations: parameters "
        f"{shown['parameters']}, masters {shown['masters']}, gradients {shown['gradients']}, optimizer state "
        f"{shown['optimizer']}",
    }
    scale = recipe.loss_scale
    values = {
        "mode": None if config.precision is None else config.precision.label,
        "compute_dtype": dtype_name(recipe.compute_dtype),
        "loss_scale": None if scale is None else {"initial": scale.initial, "dynamic": scale.dynamic},
        "mesh": dict(context.sizes),
        "batch": {"per_rank": size, "data_ranks": context.dp_size, "accumulated": cycle, "per_update": total},
        "bytes": held,
        "optimizer": list(_optimizer_settings(update)),
    }
    return EffectivePlan({name: text for name, text in rows.items() if text}, values, config.name)


def _optimizer_settings(update: MixedPrecisionOptimizer) -> Iterator[dict[str, Any]]:
    """The class of each optimizer, and the settings of each of its groups that JSON can hold."""
    for part in update.stepper.parts:
        for group in part.param_groups:
            plain = (bool, int, float, str, tuple)
            settings = {key: value for key, value in group.items() if isinstance(value, plain)}
            yield {"type": type(part).__name__, **settings}


def _precision(config: Config, context: ParallelContext, state: ShardedState, recipe: Recipe) -> str:
    precision = config.precision
    mode = "none" if precision is None else precision.label
    params = "as given" if recipe.param_dtype is None else dtype_name(recipe.param_dtype)
    how = {"torch": " (autocast)", "apex": " (apex's O1 lists)"}[recipe.cast_lists] if recipe.autocast else ""
    norm = ", BatchNorm float32" if recipe.keep_batchnorm_fp32 else ""
    masters = ", fp32 masters" if recipe.master_weights else ""
    if recipe.split_masters:
        some = state.update.master_weights.masters
        masters += ", of which 16 bits are in the parameters" if some else ", not split: they are fsdp's shards"
    linear = "" if recipe.linear is None else f", {recipe.linear.describe(state.model, context.device)}"
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


def _layout(config: Config, context: ParallelContext, state: ShardedState) -> dict[str, str]:
    """The mesh, this rank's coordinates in it, and notes of the axes."""
    parallel_model = state.parallel_model
    mesh = in_words(context.sizes, context.dims.views) + f" on {context.device.type}"
    came = {part.source.param: part.model_param for part in parallel_model.data.shards if part.source is not None}
    held = dict(state.model.named_parameters())
    params = {name: came.get(param, param) for name, param in held.items()}
    sizes = {name: param.numel() for name, param in held.items()}
    rows, layouts = dict[str, str](), list[str]()
    for name, axis in reversed(parallel_model.axes.items()):
        row = dict(axis.describe(params, sizes, getattr(config.parallel, name)))
        layouts += [row.pop("layout")] if "layout" in row else []
        rows |= row
    if not layouts and (context.size == 1 or not parallel_model.data.shards_model):
        layouts = [f"{'one process' if context.size == 1 else 'every rank'} holds the whole model"]
    text = (", ".join(layouts) + parallel_model.data.text).removeprefix(", ")
    if context.dp_size > 1:
        text += f", {parallel_model.data.exchange}"
    return {"layout": f"{mesh}; {text}", **rows}


def _update(config: Config, state: ShardedState, lr: LRAdvance) -> str:
    update, max_norm = state.update, config.clip_grad_norm.max_norm
    stepper, masters = update.stepper, update.master_weights
    kinds, switched = list[str](), {part for part, _ in stepper.switched}
    for part in stepper.parts:
        fused = "fused" if all(group.get("fused") for group in part.param_groups) else "not fused"
        fused += " automatically" if part in switched else ""
        fused += ", no host read" if stepper.fuses_unscale else ""
        fused += ", whole matrices on one rank each" if part in state.parallel_model.plans.whole_steps else ""
        kinds.append(f"{type(part).__name__} ({fused})")
    words = [" and ".join(kinds)]
    if max_norm:
        words.append(f"clip norm {max_norm:g}")
    if lr.scheduler is not None:
        when = {"step": "after each update", "epoch": "after each epoch", "manual": "advanced by the loop"}
        words.append(f"{' and '.join(type(s).__name__ for s in lr.all)} {when[config.lr_interval]}")
    left = sum(p.requires_grad for p in state.model.parameters()) - sum(s.param.requires_grad for s in masters.trained)
    if left:
        words.append(f"{counted(left, 'trainable parameter')} not in the optimizer")
    return ", ".join(words)
