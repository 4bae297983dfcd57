"""What in a precision report is worth a change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

from ..amp.recipe import HALF, Recipe
from ..errors import shorten
from .precision_report import LayerPrecision, PrecisionReport, name_of

MANY_SKIPPED = 0.05
"""A dynamic scale at its place overflows about once in `growth_interval` updates (2000: 0.05 %); this is a hundred
times as often."""
MUCH_LOST = 0.05
"""Where about 5 % of a speech model's weight gradients were too small for fp16, it lost 80 % in accuracy without fp32
masters (Micikevicius and others, 2018, "Mixed Precision Training", section 3.1)."""
HIGH_OUTPUT = 0.25
"""Twice as large, and twice as large again, and it overflows: a choice of ours."""

HIGH_SCALE = 2.0**24
"""Where apex.amp's dynamic scale stops (its max_loss_scale). A gradient of 2**-24 is 1 then."""


def find(report: PrecisionReport, recipe: Recipe) -> list[str]:
    """One line each."""
    rules: list[Callable[[PrecisionReport, Recipe], Iterator[str]]] = [
        _overflow,
        _scale,
        _outputs,
        _lost,
        _formats,
        _without_gradient,
        _sizes,
    ]
    return [line for rule in rules for line in rule(report, recipe)]


def _overflow(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = _names(report.layers, lambda layer: layer.nonfinite > 0)
    if names:
        yield f"inf or nan in outputs or gradients of {shorten(names)}: an update with this batch is skipped, or spoilt"


def _scale(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    if report.loss_scale is not None:
        yield from judge_scale(report.loss_scale)
    if report.updates and report.skipped > MANY_SKIPPED * report.updates:
        yield (
            f"{report.skipped} of the last {report.updates} updates were skipped: the scale has not found its place "
            "yet (the first updates of a run), or gradients overflow at any scale; clip_grad_norm does not help there, "
            "a lower learning rate or bf16 does"
        )


def judge_scale(scale: float) -> Iterator[str]:
    """What is wrong with a loss scale that is very low or very high, if it is."""
    if scale < 1:
        yield (
            f"the loss scale is {scale:g}, below 1: gradients are made smaller, so they overflow by themselves. Look "
            "for inf or nan (on_nonfinite='raise' gives a diagnosis), lower the learning rate, or use bf16"
        )
    if scale > HIGH_SCALE:
        yield (
            f"the loss scale is {scale:g}, above 2**24: gradients are so small that nothing overflows. Look whether "
            "the loss is divided too much, whether it depends on the parameters at all, and whether they learn; "
            "max_scale of mode 'naive' (max_loss_scale of 'apex') is a ceiling"
        )


def _outputs(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = _names(
        report.layers, lambda layer: layer.output_dtype == "float16" and (layer.output_share or 0) > HIGH_OUTPUT
    )
    if names:
        yield (
            f"outputs of {shorten(names)} reach above {HIGH_OUTPUT:.0%} of float16's largest number: use bf16, or a "
            "norm before these layers"
        )


def _lost(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    def loses(layer: LayerPrecision) -> bool:
        return max(layer.lost_gradients or 0, layer.lost_weight_gradients or 0) > MUCH_LOST

    names = _names(report.layers, loses)
    if not names:
        return
    room = report.room or 1
    if room >= 2:
        grows = (
            " (a dynamic one grows by itself: start higher, or with a shorter growth_interval)"
            if report.is_dynamic
            else ""
        )
        how = f"the loss scale could be {room:.0f} times larger{grows}"
    else:
        how = "the loss scale has no room above, as gradients elsewhere are large: use bf16"
    yield f"more than {MUCH_LOST:.0%} of the gradients of {shorten(names)} are lost to zero: {how}"


def _formats(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    halves = {name_of(dtype) for dtype in HALF}
    if recipe.param_dtype in HALF and not recipe.keep_batchnorm_fp32:
        wide = _names(report.layers, lambda layer: layer.param_dtype not in halves)
        if wide:
            yield f"{shorten(wide)} have fp32 parameters within a model in {name_of(recipe.param_dtype)}"
    if recipe.param_dtype in (None, torch.float32):
        narrow = _names(report.layers, lambda layer: layer.param_dtype in halves)
        if narrow:
            yield (
                f"{shorten(narrow)} have half-precision parameters, without fp32 masters: small updates are lost; "
                "build them in fp32"
            )


def _without_gradient(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    names = [name for layer in report.layers for name in layer.without_gradient]
    if names:
        yield f"no gradient came to {shorten(names)}: they are not used for this batch, or cut off (detach, no_grad)"


def _sizes(report: PrecisionReport, recipe: Recipe) -> Iterator[str]:
    odd = [f"{layer.name} ({', '.join(layer.odd_sizes)})" for layer in report.layers if layer.odd_sizes]
    if odd:
        yield f"sizes that are no multiple of 8, which tensor cores want in half precision: {shorten(odd)}"


def _names(layers: Iterable[LayerPrecision], chosen: Callable[[LayerPrecision], bool]) -> list[str]:
    return [layer.name or "the model itself" for layer in layers if chosen(layer)]
