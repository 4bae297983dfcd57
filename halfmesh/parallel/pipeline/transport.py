"""Converts a tree of tensors to a form that torch's pipeline stages can send, and back.

torch.distributed.pipelining sends tuples of floating-point tensors that all require gradients, and expects a gradient
for each. (Its versions differ in their handling of other tensors.) So integers are sent as the bits of a float, and
tensors that need no gradient are sent as if they did, and get zeros back. Everything else in the tree is not sent: each
rank knows a stage's output, as a tree of tensors on the meta device.

`compute`, if given, is the dtype in which fp32 activations, and their gradients, are sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.autograd import Function

from ...errors import InputError
from ...utils.tensors import map_tensors, tensors_of


def on_wire(tree: Any, compute: torch.dtype | None = None) -> tuple[torch.Tensor, ...]:
    """The tensors of a tree as they are sent, on the meta device."""

    def dtype(tensor: torch.Tensor) -> torch.dtype:
        # Not tables of positions, masks, or sums that grow along the stages (an auxiliary loss).
        is_activation = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.dim() > 1
        return compute if compute is not None and is_activation else _wire_dtype(tensor.dtype)

    return tuple(torch.empty(t.shape, dtype=dtype(t), device="meta", requires_grad=True) for t in tensors_of(tree))


def pack(result: Any, expected: Any, compute: torch.dtype | None = None) -> list[torch.Tensor]:
    """The tensors of a stage's result as they are sent.

    Raises:
        InputError: their shapes differ from the tree `expected`: the result depends on data.
    """
    tensors = [_to_wire(tensor) for tensor in tensors_of(result)]
    wanted = [(tuple(t.shape), t.dtype) for t in on_wire(expected)]
    found = [(tuple(t.shape), t.dtype) for t in tensors]
    if wanted != found:
        raise InputError(
            f"a stage returned tensors of {found}, where {wanted} was expected: shapes depend on data, or the mode or "
            "attributes of a module changed after a batch of these input shapes. Pad to fixed sizes; set modes before "
            "the first batch, or with engine.train() and engine.eval(); do not call engine(...) inside your own "
            "autocast"
        )
    return [tensor.to(wire.dtype) for tensor, wire in zip(tensors, on_wire(expected, compute), strict=True)]


def restore(received: Sequence[torch.Tensor], tree: Any) -> Any:
    """The tree of the received tensors, without gradients."""
    following: Iterator[torch.Tensor] = iter(received)
    return map_tensors(lambda meta: _from_wire(next(following), meta.dtype), tree)


def unpack(received: Sequence[torch.Tensor], tree: Any) -> tuple[Any, torch.Tensor]:
    """The tree of the received tensors, and a link for `require_gradients`.

    The tensors may be changed in place, as in one process.
    """
    *tensors, link = _Unpack.apply(*received)
    metas = tensors_of(tree)
    needed = [t if meta.requires_grad else t.detach() for t, meta in zip(tensors, metas, strict=True)]
    return restore(needed, tree), link


def require_gradients(results: Sequence[torch.Tensor], link: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """`results`, all of which require gradients, and whose backward reaches all tensors that the stage received."""
    if link is None and all(result.requires_grad for result in results):
        return tuple(results)
    if link is None:
        link = torch.zeros((), device=results[0].device, requires_grad=True)
    return _Link.apply(link, *results)


class _Unpack(Function):
    """Tensors that are not leaves, and share memory with the received ones; unused ones get a gradient of zeros. The
    last one links them to the results of the stage, which may use none of them."""

    @staticmethod
    def forward(ctx: Any, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *(tensor.detach() for tensor in received), received[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(map(_contiguous, grads[:-1]))  # torch sends them with their strides if it splits backward


class _Link(Function):
    @staticmethod
    def forward(ctx: Any, link: torch.Tensor, *results: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Not as views, which torch's zero-bubble schedules could not detach in place.
        return tuple(torch.ops.aten._unsafe_view(result, result.shape) for result in results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *grads


# -- the wire --------------------------------------------------------------------------------------------------------


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype
    if dtype.is_complex:
        raise InputError(
            "complex tensors cannot be sent through a pipeline; send their real and imaginary parts as two tensors"
        )
    return torch.float64 if dtype.itemsize == 8 else torch.float32


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        # A tensor with a dim of 0 or 1 is also contiguous with other strides, but not for torch 2.11.
        tensor = tensor.reshape(-1).view(tensor.shape)
    return tensor


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, contiguous and floating-point; an integer becomes the float with its bits."""
    tensor = _contiguous(tensor)
    if tensor.is_floating_point():
        return tensor
    wire = _wire_dtype(tensor.dtype)
    return (tensor if tensor.dtype.itemsize == 8 else tensor.to(torch.int32)).view(wire)


def _from_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return tensor.to(dtype)
    return tensor.view(dtype) if dtype.itemsize == 8 else tensor.view(torch.int32).to(dtype)
