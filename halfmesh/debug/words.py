"""What to do about an inf or nan, by where it was met first."""

from __future__ import annotations

import torch

from ..amp.recipe import Recipe
from .faults import Fault

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
_FINITE = (
    "it came from other random numbers (dropout), an earlier microbatch of the update, or a batch before; set "
    "on_nonfinite='raise' to stop at the first one, and gradient_accumulation=1 to look at each batch"
)
_NOT_COMPUTED = (
    "look for inf or nan in the batch, the loss and the weights; lower the learning rate, clip with clip_grad_norm, or "
    "use bf16"
)
_COMPLETE = (
    "a sum over ranks or microbatches left the dtype's range, or, under fsdp, one of what is summed is inf or nan "
    "already; lower the loss scale, or use bf16"
)


def advise(fault: Fault | None, recipe: Recipe, scale: float | None, failed: bool) -> str:
    """What to do.

    Args:
        scale: that of the loss; None: it is not scaled.
        failed: nothing is known.
    """
    if failed:
        return _NOT_COMPUTED
    if fault is None:
        return _FINITE
    too_large = fault.dtype == torch.float16 and not fault.numbers.nan
    if fault.kind == "weight":
        return _WEIGHT if fault.numbers.bad else f"float16 has no such number: {_wider(recipe)}"
    if fault.kind in ("input", "target"):
        return _DATA
    if fault.kind == "loss":
        return _LOSS
    if fault.kind in ("between", "output"):
        if fault.kind == "between" and not fault.name:
            return "scale the inputs (to mean 0 and variance 1), or use bf16, which has the range of fp32"
        return f"{_wider(recipe)}; or make its inputs smaller (a norm before it)" if too_large else _FORWARD
    if fault.kind == "complete gradient":
        return _COMPLETE
    if recipe.compute_dtype == torch.float16 and not fault.numbers.nan:
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
