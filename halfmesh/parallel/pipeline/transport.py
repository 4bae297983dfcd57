"""What is sent from one stage to the next: the tensors of a tree, in a form that torch's stages can send.

torch.distributed.pipelining sends tuples of floating-point tensors that all require gradients, and wants a gradient
back for each. (What it does with others differs between its versions.) So integers travel as the bits of a float, what
needs no gradient says that it does and gets zeros back, and everything in a tree that is not a tensor stays behind:
each rank knows it from the `StageMetadata`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import Function

from ...errors import InputError
from ...tensors import map_tensors, tensors_of


@dataclass(frozen=True)
class StageMetadata:
    """What a stage returns: a tree whose tensors are on the meta device."""

    tree: Any

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Without memory; `requires_grad` says whether they need a gradient."""
        return tensors_of(self.tree)

    def wire(self) -> tuple[torch.Tensor, ...]:
        """The tensors as torch's stages are told of them."""
        return tuple(
            torch.empty(tensor.shape, dtype=_wire_dtype(tensor.dtype), device="meta", requires_grad=True)
            for tensor in self.tensors
        )

    def fill(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The tree with these tensors."""
        following: Iterator[torch.Tensor] = iter(tensors)
        return map_tensors(lambda _: next(following), self.tree)

    def restore(self, received: Sequence[torch.Tensor]) -> Any:
        """The tree of what was received, without gradients."""
        return self.fill([_from_wire(t, meta.dtype) for t, meta in zip(received, self.tensors, strict=True)])


def pack(tree: Any, metadata: StageMetadata) -> list[torch.Tensor]:
    """The tensors of a stage's result as they are sent.

    Raises:
        InputError: they are not what the metadata says: the result depends on data.
    """
    tensors = [_to_wire(tensor) for tensor in tensors_of(tree)]
    wanted = [(tuple(t.shape), t.dtype) for t in metadata.wire()]
    found = [(tuple(t.shape), t.dtype) for t in tensors]
    if wanted != found:
        raise InputError(
            f"a stage returned tensors of {found}, where {wanted} was expected from its inputs' shapes. Shapes that "
            "depend on the data cannot be sent through a pipeline: pad to a size that does not. Dtypes differ where "
            "engine(...) is called within an autocast and engine.backward(loss) is not: leave it out"
        )
    return tensors


def unpack(received: Sequence[torch.Tensor], metadata: StageMetadata) -> tuple[Any, list[torch.Tensor]]:
    """What a stage works with, made of what it received; and anchors for `require_gradients`, without which some of
    that, or all, would get no gradient.

    What is returned may be changed in place, as in one process.
    """
    metas = metadata.tensors
    needing = [tensor for tensor, meta in zip(received, metas, strict=True) if meta.requires_grad]
    *tensors, link = _Unpack.apply(*needing) if needing else (None,)
    unpacked: Iterator[torch.Tensor] = iter(tensors)
    values = [
        next(unpacked) if meta.requires_grad else _from_wire(tensor.detach(), meta.dtype)
        for tensor, meta in zip(received, metas, strict=True)
    ]
    anchors = [tensor for tensor, meta in zip(received, metas, strict=True) if not meta.requires_grad]
    return metadata.fill(values), anchors if link is None else [*anchors, link]


def require_gradients(results: Sequence[torch.Tensor], anchors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """`results`, all of which require gradients, and backward from which gives each of `anchors` a gradient of zero, or
    where it is no leaf, reaches what it came from."""
    if not anchors and all(result.requires_grad for result in results):
        return tuple(results)
    if not anchors:
        anchors = [torch.zeros((), device=results[0].device, requires_grad=True)]
    return _WithAnchors.apply(len(anchors), *anchors, *results)


class _Unpack(Function):
    """Tensors that are not leaves, and share memory with what was received; unused ones get a gradient of zeros. The
    last one links them to the results of the stage, which may use none of them."""

    @staticmethod
    def forward(ctx: Any, *received: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return *(tensor.detach() for tensor in received), received[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return grads[:-1]


class _WithAnchors(Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.leaves = [tensor.is_leaf for tensor in tensors[:count]]
        ctx.save_for_backward(*tensors[:count])
        return tuple(tensor.detach() for tensor in tensors[count:])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.leaves, strict=True)
        return None, *(torch.zeros_like(anchor) if is_leaf else None for anchor, is_leaf in pairs), *grads


# -- the wire --------------------------------------------------------------------------------------------------------


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype
    if dtype.is_complex:
        raise InputError("complex tensors cannot be sent through a pipeline; pass real and imaginary part alone")
    return torch.float64 if dtype.itemsize == 8 else torch.float32


def _to_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous, and floating: of an integer the bits."""
    tensor = tensor.contiguous()
    if tensor.stride() != torch.empty(tensor.shape, device="meta").stride():
        # Where a dim is 0 or 1 others count as contiguous, too, but not for stages of torch 2.11.
        tensor = tensor.reshape(-1).view(tensor.shape)
    if tensor.is_floating_point():
        return tensor
    wire = _wire_dtype(tensor.dtype)
    return (tensor if tensor.dtype.itemsize == 8 else tensor.to(torch.int32)).view(wire)


def _from_wire(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        return tensor
    return tensor.view(dtype) if dtype.itemsize == 8 else tensor.view(torch.int32).to(dtype)
