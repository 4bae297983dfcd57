"""A cross entropy that computes the logits of a language model's head one chunk of tokens at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.overrides import handle_torch_function, has_torch_function_variadic
from torch.utils.checkpoint import checkpoint

from ..errors import InputError

LEAST_TOKENS = 1024
"""Of a chunk by default. For each weight of the head a chunk computes 8 operations a token, and moves 12 bytes to add
its gradient in fp32: by an H100's figures (990e12 operations and 3.35e12 bytes a second) adding takes 0.4 of computing
then, and longer than computing below 450 tokens."""
CHUNK = "is_chunk"
"""The attribute of the hidden states with which a head is called: `halfmesh.verify` leaves out what it makes of them,
because the chunks of a layout are other tokens than those of one process."""


def linear_cross_entropy(
    input: torch.Tensor,
    head: nn.Module | Callable[[torch.Tensor], torch.Tensor],
    target: torch.Tensor,
    *,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    chunk_size: int | None = None,
) -> torch.Tensor:
    """Compute `F.cross_entropy(head(input), target, ...)` with the logits of only one chunk of tokens in memory.

    Forward keeps only `input`. Backward computes the logits of each chunk again, which adds a third to the work of head
    and loss. Call the function in the model's forward, and pass the head itself:

        loss = halfmesh.nn.linear_cross_entropy(hidden, self.head, targets)

    It works in every precision mode and layout. The head computes in the mode's dtype, and the cross entropy in fp32
    (in float64 for float64 logits). If a module's parameters are in half precision, or autocast casts them, halfmesh
    sums the gradients of the chunks in fp32 and rounds once. If each tensor rank holds a shard of the vocabulary (style
    "vocab_parallel"), the logits of each chunk are sharded in the same way. If fsdp gathers the head by itself, as
    under a pipeline, all tokens are one chunk.

    `torch.nn.functional.linear_cross_entropy` (torch 2.14 and later, with the same option names) differs in three ways.
    It takes the head's weight, which in some layouts is a shard, or not gathered. It does not use chunks without
    `options` or with `label_smoothing`. It computes the gradients of a mean or sum in forward, before the loss is
    scaled, so under fp16 small gradients are lost.

    Args:
        input: hidden states [..., features].
        head: computes logits [tokens, classes] from hidden states [tokens, features], each token independently of the
            others: a `torch.nn.Linear`, any other module, or a function (for example, of a scaled head). With a
            function, the gradients of the chunks are summed in the dtype of the weight, or of its cast.
        target: class indices [...], int64.
        weight: the weight of each class [classes]. Not supported with sharded logits.
        reduction: "mean" (over the targets that count, or their weights), "sum", or "none" (the shape of `target`).
        ignore_index: the target value that does not count.
        label_smoothing: from 0 to 1, as in `F.cross_entropy`.
        chunk_size: tokens per chunk. None: the number that makes the logits of a chunk about as large as `input` (the
            rule of Liger's fused kernel and of torch's `LinearCrossEntropyOptions`), but at least 1,024.

    Returns:
        The loss, in fp32 or wider. A mean is nan if no target counts.

    Raises:
        InputError: `head` is a tensor, the shapes of `input` and `target` differ, or an option has an invalid value.
    """
    options: dict[str, Any] = {"weight": weight, "ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if has_torch_function_variadic(input, target):
        given = input, head, target
        return handle_torch_function(
            linear_cross_entropy, given[::2], *given, **options, reduction=reduction, chunk_size=chunk_size
        )
    if isinstance(head, torch.Tensor):
        raise InputError("linear_cross_entropy() takes the head itself, not its weight, which may be sharded")
    if input.shape[:-1] != target.shape:
        shapes = f"{list(input.shape)} and {list(target.shape)}"
        raise InputError(f"linear_cross_entropy() takes [..., features] and class indices [...], but got {shapes}")
    if reduction not in ("mean", "sum", "none"):
        raise InputError(f"linear_cross_entropy(): reduction={reduction!r} is not 'mean', 'sum' or 'none'")
    targets = target.reshape(-1)
    losses = _losses(input.reshape(-1, input.shape[-1]), head, targets, options, chunk_size)
    if reduction == "none":
        return losses.view(target.shape)
    if reduction == "sum":
        return losses.sum()
    counted = targets != ignore_index
    if weight is None:
        return losses.sum() / counted.sum()
    weights = weight.to(losses.dtype)[targets.masked_fill(~counted, 0)]
    return losses.sum() / weights.masked_fill(~counted, 0).sum()


@torch.compiler.disable
def _losses(
    x: torch.Tensor, head: Any, targets: torch.Tensor, options: dict[str, Any], size: int | None
) -> torch.Tensor:
    """The loss of each token."""
    size = len(targets) if _is_gathered_by_itself(head) else size or _chunk_size(x, head)
    chunks, parts = x.split(size or 1), targets.split(size or 1)  # without tokens 0
    sums = _wide_sums(head, x.device.type) if len(chunks) > 1 and torch.is_grad_enabled() else {}
    compute: Callable[..., torch.Tensor] = partial(_chunk_losses, head, sums, options)
    if torch.is_grad_enabled():
        compute = partial(checkpoint, compute, use_reentrant=False)
    return torch.cat([compute(*pair) for pair in zip(chunks, parts, strict=True)])


def _chunk_losses(
    head: Any, sums: dict[str, _Param], options: dict[str, Any], x: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    setattr(x, CHUNK, True)
    if sums:
        logits: torch.Tensor = functional_call(head, {name: _Use.apply(*pair) for name, pair in sums.items()}, (x,))
    else:
        logits = head(x)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    weight = None if options["weight"] is None else options["weight"].to(logits.dtype)
    return F.cross_entropy(logits, targets, **{**options, "weight": weight}, reduction="none")


def _chunk_size(x: torch.Tensor, head: Any) -> int:
    classes = getattr(head, "out_features", 0)
    tokens = -(-len(x) // -(-classes // x.shape[1])) if classes else 1
    return max(LEAST_TOKENS, 1 << (tokens - 1).bit_length())


def _is_gathered_by_itself(head: Any) -> bool:
    """Return True if fsdp gathers weights in each call of `head`: data ranks may have other numbers of chunks."""
    from torch.distributed.fsdp import FSDPModule

    return isinstance(head, nn.Module) and any(isinstance(module, FSDPModule) for module in head.modules())


# -- sums of gradients in fp32 -----------------------------------------------------------------------------------------

_Param = tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]
"""A token that carries a parameter's gradient, what the chunks compute with in its place, and the sum of the gradients,
if some chunk has one. (Lists hide tensors from autograd.)"""


def _wide_sums(head: Any, device: str) -> dict[str, _Param]:
    """The parameters of `head`, by name, whose gradients would be summed in half precision. Those of a plain layer are
    cast here, where autocast would cast them for each chunk."""
    found: dict[str, _Param] = {}
    casts = torch.is_autocast_enabled(device)
    plain = (
        isinstance(head, nn.Linear) and getattr(head, "product", F.linear) is F.linear and "forward" not in vars(head)
    )
    plain = plain and (type(head).forward is nn.Linear.forward or hasattr(head, "product"))
    for name, param in head.named_parameters() if isinstance(head, nn.Module) else ():
        if param.requires_grad and (casts or param.dtype.itemsize < 4):
            is_cast = casts and plain and name in ("weight", "bias") and param.dtype == torch.float32
            value = param.detach().to(torch.get_autocast_dtype(device)) if is_cast else param
            total: list[torch.Tensor] = []
            found[name] = _Sum.apply(param, total), [value], total
    return found


class _Sum(Function):
    """A token for the uses of a parameter. Its backward runs after all of theirs."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor, total: list[torch.Tensor]) -> torch.Tensor:
        ctx.total, ctx.dtype = total, param.dtype
        return torch.empty(0, device=param.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Any) -> tuple[torch.Tensor | None, None]:
        return (ctx.total.pop().to(ctx.dtype) if ctx.total else None), None


class _Use(Function):
    """The parameter itself, for one chunk."""

    @staticmethod
    def forward(ctx: Any, token: torch.Tensor, value: list[torch.Tensor], total: list[torch.Tensor]) -> torch.Tensor:
        ctx.total = total
        return value[0].detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        if ctx.total:
            ctx.total[0].add_(grad)
        else:
            ctx.total.append(grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True))
        return None, None, None
