"""What the last training forward was called with, so that this batch can be computed once more."""

from __future__ import annotations

from typing import Any

import torch

from ... import torch_private
from ...parallel.pipeline.boundary import tensors_of
from ...tree import map_tensors
from ..handles import Handle, replace

CHANGED = "the loop made another loss of the criterion's, of which the gradients were looked at by themselves"
NO_LOSS = "only the forward was looked at: the loss was computed in the loop, not by engine.criterion(engine(...), ...)"


class LastBatch:
    """References to what the engine's calls were given, replaced by the next training forward.

    The engine stores into the attributes and calls nothing, because that is done for each batch. With accumulation, or
    several backwards for one update, it is the last of them.

    Attributes:
        call: args and kwargs of the last forward in training mode.
        output: what it returned, while it is needed to find it among the criterion's arguments.
        criterion: args and kwargs of the criterion's last call; without the first, if that is the output.
        takes_output: whether the criterion's first argument was the output.
        value: what the criterion returned.
        loss, loss_id: what `backward` was given, if that is not `value`.
    """

    __slots__ = ("call", "criterion", "loss", "loss_id", "output", "takes_output", "value")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There was no forward."""
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.output: Any = None
        self.criterion: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.takes_output = False
        self.value: Any = None
        self.loss: Any = None
        self.loss_id = 0

    @property
    def kind(self) -> str:
        """What can be computed once more; to be compared over the ranks."""
        return f"{self.call is not None} {self.criterion is not None} {self.takes_output} {self.loss_id}"


def copied(tree: Any) -> Any:
    """`tree` with copies of its tensors, which are on their own: a forward may change its inputs in place, and no
    gradient goes on into what made them."""
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def criterion_arguments(batch: LastBatch, output: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The criterion's arguments, with what `output` has in the place of the output of then; None if the loop computed
    some of them from the output."""
    if batch.criterion is None:
        return None
    args, kwargs = batch.criterion
    if batch.takes_output:
        return (output, *copied(args)), copied(kwargs)
    if isinstance(batch.output, Handle):
        args, kwargs = replace(copied([args, kwargs]), batch.output, output)
        return args, kwargs
    old, new = tensors_of(batch.output), tensors_of(output)
    if len(old) != len(new):
        return None
    found = 0

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal found
        for before, now in zip(old, new, strict=True):
            same = _same_view(tensor, before, now)
            if same is not None:
                found += 1
                return same
        if tensor.grad_fn is not None:
            raise LookupError
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    try:
        exchanged = map_tensors(exchange, [args, kwargs])
    except LookupError:
        return None
    return (exchanged[0], exchanged[1]) if found else None


def own_loss(batch: LastBatch, output: Any) -> Any:
    """The loss that the model returns, of `output`; None if what backward was given is not among it."""
    if batch.loss is None:
        return None
    if batch.loss is batch.output:
        return output
    old, new = tensors_of(batch.output), tensors_of(output)
    pairs = zip(old, new, strict=False)
    return next((now for before, now in pairs if before is batch.loss and len(old) == len(new)), None)


def _same_view(tensor: torch.Tensor, before: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    """What of `now` is what `tensor` is of `before`: itself, or a view. None: something else."""
    if tensor is before:
        return now
    base = torch_private.viewed(before)
    alike = before.stride() == now.stride() and before.shape == now.shape and before.dtype == now.dtype == tensor.dtype
    if torch_private.viewed(tensor) is not base or tensor.grad_fn is None or not alike:
        return None
    offset = tensor.storage_offset() - before.storage_offset() + now.storage_offset()
    return now.as_strided(tensor.shape, tensor.stride(), offset)
