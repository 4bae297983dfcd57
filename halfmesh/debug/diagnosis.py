"""Why a run met inf or nan, in words: the first one, the course of the loss scale, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch

from ..amp.recipe import Recipe
from ..errors import bullet_list
from .tensor_stats import TensorStats, largest_number, name_of

Kind = Literal["weight", "input", "target", "between", "output", "loss", "gradient"]
_SHOWN = 9
"""So many scales of the history are shown, the first and the last ones."""


@dataclass(frozen=True)
class Fault:
    """The first inf or nan of an update.

    Attributes:
        kind: what holds it. "input": the batch. "between": what a module was given by operations between modules.
            "gradient": the gradient of a module's output (or of what `around` was given, if `name` is "").
        name: of the module, parameter or argument.
        layer: the module's class; "" where there is none.
        dtype: of what holds it, or what it was computed in.
        stats: of the tensor.
        inputs: of an "output" or "loss", the largest finite magnitude that went into it.
        around: for "between" the module whose forward does the operations, for "gradient" what used the tensor.
        key: in which order it was computed, to compare over ranks.
        ranks: where it is.
    """

    kind: Kind
    name: str
    layer: str
    dtype: torch.dtype
    stats: TensorStats
    key: tuple[int, ...]
    inputs: float = 0.0
    around: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Diagnosis:
    """What `NonFiniteError.diagnosis` holds. The same on all ranks.

    Attributes:
        scales: the loss scales (of the first loss) of the last updates, oldest first, each with the number of updates
            that it was used for; the last one is that of the update that failed. Empty without loss scaling.
        skipped, updates: how many of the last updates were skipped, of how many.
        was_watched: whether the modules were watched in the update that failed.
        fault: the first inf or nan in that update; None if the modules were not watched, or all was finite in them.
        advice: what to do.
    """

    scales: tuple[tuple[float, int], ...]
    skipped: int
    updates: int
    was_watched: bool
    fault: Fault | None
    advice: str
    world_size: int = 1

    def __str__(self) -> str:
        lines = []
        if self.updates:
            lines.append(f"{self.skipped} of the {self.updates} updates before this one were skipped")
        if self.scales:
            lines.append(f"loss scale: {_course(self.scales)}")
        if self.fault is not None:
            lines.append(f"first inf or nan of this update: {describe(self.fault, self.world_size)}")
        elif self.was_watched:
            lines.append("the outputs of all modules, the loss, and the gradients of both were finite in this update")
        else:
            lines.append("the modules were not watched in this update")
        return bullet_list("Diagnosis:", [*lines, f"advice: {self.advice}"])


def history(scales: Sequence[float]) -> tuple[tuple[float, int], ...]:
    """`Diagnosis.scales` of the scales of single updates."""
    return tuple((scale, len(list(same))) for scale, same in groupby(scales))


def _course(runs: Sequence[tuple[float, int]]) -> str:
    words = [f"{scale:g}" + (f" ({count} updates)" if count > 1 else "") for scale, count in runs]
    if len(words) > _SHOWN:
        words = [*words[: _SHOWN // 2], f"({len(words) - _SHOWN + 1} more)", *words[-(_SHOWN // 2) :]]
    return " -> ".join(words)


def describe(fault: Fault, world_size: int) -> str:
    """One line about where inf or nan are."""
    where = ""
    if world_size > 1:
        ranks = f"rank{'s' * (len(fault.ranks) > 1)} {', '.join(map(str, fault.ranks))}"
        where = ", on all ranks" if len(fault.ranks) == world_size else f", on {ranks}"
    return _place(fault) + where


def _place(fault: Fault) -> str:
    stats, dtype = fault.stats, name_of(fault.dtype)
    kinds = [f"{count} {kind}" for count, kind in ((stats.inf, "inf"), (stats.nan, "nan")) if count]
    counts = f"{' and '.join(kinds)} of {stats.count} numbers"
    end = f"{dtype} ends at {largest_number(fault.dtype):.5g}"
    module = f"{fault.name!r} ({fault.layer})" if fault.name else f"the model ({fault.layer})"
    users = " or ".join(fault.around)
    match fault.kind:
        case "weight":
            what = counts if stats.nonfinite else f"it reaches {stats.largest:.3g}, and {end}"
            return f"the weight {fault.name!r}, before the forward: {what}"
        case "input":
            return f"the batch: argument {fault.name!r} of the model holds {counts}"
        case "target":
            return f"what the criterion was given besides the model's output holds {counts}"
        case "between":
            made = f", made by operations in the forward of {users}" if users else ""
            made = made if fault.name else ", by the cast of a batch that is finite"
            given = "the criterion" if not fault.layer else module if fault.name else "the model"
            return f"what {given} was given, in {dtype}{made}: {counts}"
        case "output":
            return f"the output of {module}, in {dtype}: {counts}; what it was given reaches {fault.inputs:.3g}; {end}"
        case "loss" if not fault.name:
            return f"the loss that engine.backward was given, in {dtype}: {counts}"
        case "loss":
            return f"the value of the criterion, in {dtype}: {counts}; what it was given reaches {fault.inputs:.3g}"
        case "gradient" if not fault.name:
            return f"the gradient of what {users} was given, in {dtype}, made by its backward: {counts}"
        case "gradient":
            of = module if fault.layer else fault.name
            made = f"made by the backward of {users or 'what follows it'}"
            return f"the gradient of the output of {of}, in {dtype}, {made}: {counts}"


# -- what to do ------------------------------------------------------------------------------------------------------

_UNWATCHED = (
    "set debug='nonfinite' in the config: the first module with inf or nan is named then, in each update (every module "
    "is looked at, which is slow). max_consecutive_skips does that by itself in the last updates before it stops"
)
_DATA = "look at the data: this batch holds inf or nan before the model sees it"
_WEIGHT = (
    "this batch is not the reason: the model was bad before. Go on from an older checkpoint; on_nonfinite='raise' "
    "stops at the first inf or nan; lower the learning rate, or clip with clip_grad_norm"
)
_LOSS = (
    "look for a logarithm of 0, an exponential, or a division by a count that may be 0 in the criterion; let it "
    "compute in fp32, from logits instead of probabilities"
)
_BACKWARD = (
    "look for a root, norm, logarithm, power or division at 0 in that forward, whose value is finite and whose "
    "derivative is not: add a small number to what goes into it, as in sqrt(x + 1e-12)"
)
_FORWARD = (
    "look for a division by 0, a logarithm, root or exponential in that forward, or for numbers that grow from layer "
    "to layer"
)
_SUMS = (
    "the gradient of a parameter, or its sum over microbatches or ranks, left the dtype's range: lower the loss scale, "
    "or use bf16"
)


def advise(fault: Fault | None, was_watched: bool, recipe: Recipe, scale: float | None) -> str:
    """What to do. `scale` is that of the loss; None: it is not scaled."""
    if not was_watched:
        return _UNWATCHED
    if fault is None:
        return _SUMS
    too_large = fault.dtype == torch.float16 and not fault.stats.nan
    match fault.kind:
        case "weight":
            return _WEIGHT if fault.stats.nonfinite else f"float16 has no such number: {_wider(recipe)}"
        case "input" | "target":
            return _DATA
        case "loss":
            return _LOSS
        case "between" if not fault.name:
            return "scale the inputs (to mean 0 and variance 1), or use bf16, which has the range of fp32"
        case "between" | "output":
            return f"{_wider(recipe)}; or make its inputs smaller (a norm before it)" if too_large else _FORWARD
        case "gradient" if recipe.compute_dtype == torch.float16 and not fault.stats.nan:
            return _scaled_gradient(recipe, scale)
    return _BACKWARD


def _wider(recipe: Recipe) -> str:
    if recipe.autocast:
        return (
            "use bf16, which has the range of fp32, or compute this layer in fp32: within its forward, `with "
            "torch.autocast(x.device.type, enabled=False)` on x.float()"
        )
    return "use bf16, which has the range of fp32, or mode='torch', where a layer may compute in fp32"


def _scaled_gradient(recipe: Recipe, scale: float | None) -> str:
    options = recipe.loss_scale
    if scale is not None and scale > 1 and options is not None:
        how = "lower the loss scale" if not options.dynamic else "let the loss scale fall further (min_scale)"
        return (
            f"the gradient, multiplied by the loss scale {scale:g}, leaves float16: {how}, or use bf16. A dynamic "
            "scale falls by itself; skipped updates now and then are its way to find the place"
        )
    return (
        "the gradient itself leaves float16, with no scale above 1: use bf16, lower the learning rate, or " + _BACKWARD
    )
