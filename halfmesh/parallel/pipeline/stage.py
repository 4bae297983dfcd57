"""One stage as a module that torch's schedules call, and the form in which stages send a tree of tensors.

torch.distributed.pipelining sends tuples of floating-point tensors that all require gradients, and expects a gradient
for each. (Its versions differ in their handling of other tensors.) So integers are sent as the bits of a float, and
tensors that need no gradient are sent as if they did, and get zeros back. Everything else in the tree is not sent: each
rank knows a stage's output, as a tree of tensors on the meta device.

`compute`, if given, is the dtype in which fp32 activations, and their gradients, are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage

from ...errors import InputError
from ...utils.tensors import map_tensors, tensors_of
from ...utils.torch_private import has_no_memory, in_shapes_only
from .partition import Call, Piece

Scope = Callable[[], AbstractContextManager[Any]]
Widen = Callable[[Sequence[nn.Parameter]], None]


@dataclass
class ForwardContext:
    """The context managers that a stage's forward runs in.

    Attributes:
        autocast: around each forward.
        settles: called before each forward, and before the criterion: a backward may have ended early.
        saving: around each forward, for the tensors that autograd saves.
        sent: the dtype in which fp32 activations are sent; None: as they are.
    """

    autocast: Scope
    settles: Sequence[Callable[[], None]]
    saving: Scope
    sent: torch.dtype | None = None


@dataclass
class Batch:
    """The inputs of a rank's stages for one batch.

    Attributes:
        calls: one for each microbatch.
        finish: called as finish(output, index) on the last stage; returns the 0-dim loss for backward.
        begin_last: called with the stage before its last backward, so that gradients can be reduced while that runs.
        widen: called with the stage's parameters before each backward, to add to their gradients in another dtype.
        metadata: each stage's output.
    """

    calls: Sequence[Call]
    finish: Callable[[Any, int], torch.Tensor]
    begin_last: Callable[[StageModule], None]
    widen: Widen | None
    metadata: Sequence[Any] = field(repr=False)


class StageModule(nn.Module):
    """Stage `index` of `count`. It does not register the model's modules, which belong to the user's model.

    torch calls it with the output of the previous stage, and the number of the microbatch.
    """

    def __init__(
        self, model: nn.Module, pieces: Sequence[Piece], index: int, count: int, context: ForwardContext
    ) -> None:
        super().__init__()
        self._model = (model,)  # a tuple hides it from nn.Module
        self.pieces = tuple(pieces)
        self.index = index
        self.is_last = index == count - 1
        self.params: Sequence[nn.Parameter] = ()
        self._context, self.sent = context, context.sent
        self.batch: Any = None  # a Batch, while a schedule runs

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The stage's parameters: torch needs them to split backward into inputs' and weights' gradients."""
        yield from self.params

    def compute(self, call: Call, activations: Any) -> Any:
        """Run the stage's forward. Returns the input of the next stage, or the model's output."""
        call, context = Call(call.args, call.kwargs), self._context  # without results of `once` of other stages
        for settle in context.settles:
            settle()
        with context.autocast(), context.saving():
            for piece in self.pieces:
                activations = piece.run(self._model[0], call, activations)
        if not in_shapes_only() and any(map(has_no_memory, tensors_of(activations))):
            raise InputError("the forward keeps a tensor outside the model (functools.cache?); keep it on a module")
        return activations

    def forward(self, *received: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        batch, number = self.batch, int(index)  # on the CPU: no device is waited for
        activations, link = unpack(received, batch.metadata[self.index - 1]) if received else (None, None)
        activations = self.compute(batch.calls[number], activations)
        if self.is_last:
            # float64 holds any loss and gradient without rounding.
            for settle in self._context.settles:
                settle()
            loss = batch.finish(activations, number)
            return require_gradients([loss.double().reshape(1)], link)
        return require_gradients(pack(activations, batch.metadata[self.index], self.sent), link)


class Stage(PipelineStage):
    """torch's stage around a StageModule.

    Receive buffers are allocated when they are needed, and freed after the microbatch's backward; otherwise they are
    on the meta device. torch would keep one for each microbatch as long as the schedule exists.

    Args:
        metadata: each stage's output, which torch would otherwise send.
    """

    submod: StageModule

    def __init__(
        self, module: StageModule, metadata: Sequence[Any], device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        index, count = module.index, len(metadata)
        received = on_wire(metadata[index - 1], module.sent) if index else ()
        sent = on_wire(metadata[index], module.sent)
        if module.is_last:
            sent = (torch.empty(1, dtype=torch.float64, device="meta", requires_grad=True),)
        super().__init__(module, index, count, device, input_args=received, output_args=sent, group=group)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        """Before the first step torch prepares the forward, then the backward, and allocates all buffers."""
        found = super()._prepare_backward_infra(*args, **kwargs)
        for chunk in self.args_recv_info:
            self._free(chunk)
        return found

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Leave out sends from a rank to itself, which torch 2.11 makes for stages of one rank, and gloo rejects."""
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

    def _get_recv_ops(self, recv_infos: Any, *group: Any) -> Any:
        for info in _received(recv_infos):
            wants = info.buffer.requires_grad
            info.buffer = torch.empty_like(info.buffer, device=self.device, requires_grad=wants)
        return super()._get_recv_ops(recv_infos, *group)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if full_backward:  # else the gradients of the weights still need the received tensors
            self._free(bwd_chunk_id)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
        self._free(bwd_chunk_id)

    def _free(self, chunk: int) -> None:
        """Free the memory of what was received for a microbatch."""
        for info in _received((*self.args_recv_info[chunk], *self.grad_recv_info.get(chunk, ()))):
            buffer = info.buffer
            info.buffer = torch.empty_like(buffer, device="meta", requires_grad=buffer.requires_grad)
            buffer.data = buffer.new_empty(0)  # the losses keep their graphs, and so this leaf, until the step ends

    def backward_maybe_with_nosync(self, backward_type: Any, bwd_kwargs: Any, last_backward: bool = False) -> Any:
        batch = self.submod.batch
        if batch.widen is not None:
            batch.widen(self.submod.params)
        if last_backward:
            batch.begin_last(self.submod)
        return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward=last_backward)


def _received(infos: Iterable[Any]) -> list[Any]:
    """Those with a buffer: the first stage also has entries for its arguments."""
    return [info for info in infos if getattr(info, "buffer", None) is not None]


# -- what stages send -----------------------------------------------------------------------------------------------


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
            f"a stage returned tensors of {found}, where {wanted} was expected: shapes depend on data (pad to fixed "
            "sizes), a module's mode or attributes changed after a batch of these shapes (set them before the first "
            "one), or engine(...) was called inside your own autocast"
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


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_floating_point:
        return dtype
    if dtype.is_complex:
        raise InputError("complex tensors cannot be sent through a pipeline; send torch.view_as_real of them")
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
