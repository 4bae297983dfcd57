"""Activations that wait for backward in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..._torch import edit_stamp, versions

SMALLEST = 1024
"""Tensors of fewer bytes stay: moving them takes longer than it is worth."""


class Offload:
    """Moves what autograd saves to the host, and back when backward asks for it.

    Weights stay, and casts of them that autograd knows as such, and what is on the host already. On a GPU the copies to
    the host run beside the computation, into pinned memory.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None

    def inputs(self) -> AbstractContextManager[Any]:
        """The scope for what is no weight anyway."""
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, frozenset()), _unpack)

    def everything(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The scope around a forward of `model`."""
        own = frozenset(map(_storage, chain(model.parameters(), model.buffers())))
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, own), _unpack)

    def _pack(self, tensor: torch.Tensor, own: frozenset[int]) -> Callable[[], torch.Tensor]:
        if not self._moves(tensor) or _storage(tensor) in own or _is_cast_of_parameter(tensor):
            return _Kept(tensor)
        if self._device.type == "cuda":
            return self._to_pinned(tensor)
        return _OnHost(tensor.detach().clone(), tensor)

    def _moves(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.device.type == self._device.type
            and tensor.layout == torch.strided
            and tensor.numel() * tensor.element_size() >= SMALLEST
        )

    def _to_pinned(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        now = torch.cuda.current_stream(tensor.device)
        if self._stream is None:
            self._stream = torch.cuda.Stream(tensor.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
            host.copy_(tensor.detach(), non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is used until the copy is there
        return _OnHost(host, tensor, self._stream.record_event())


class _Kept:
    """A tensor that stays where it is. (Detached: one that an operation returns would keep itself alive.)"""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._stamp = edit_stamp(tensor)

    def __call__(self) -> torch.Tensor:
        if edit_stamp(self._tensor) != self._stamp:  # torch does not look where there are hooks
            raise _written(self._tensor)
        return self._tensor


class _OnHost:
    """A copy of `tensor` in `host`. Writes to `tensor` after it was saved are refused: the copy may not be over yet."""

    def __init__(self, host: torch.Tensor, tensor: torch.Tensor, copied: Any = None) -> None:
        self.host = host
        self._device = tensor.device
        self._copied = copied
        self._counter = tensor.detach()  # it counts the writes to `tensor`, and gives up the memory
        self._counter.data = tensor.new_empty(0)
        self._version = versions([self._counter])

    def __call__(self) -> torch.Tensor:
        if versions([self._counter]) != self._version:
            raise _written(self.host)
        if self._copied is None:
            return self.host
        torch.cuda.current_stream(self._device).wait_event(self._copied)
        return self.host.to(self._device, non_blocking=True)


def _written(tensor: torch.Tensor) -> RuntimeError:
    """torch's words for a tensor that was written in place between forward and backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype}"
    )


def _unpack(packed: Callable[[], torch.Tensor]) -> torch.Tensor:
    return packed()


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is a trained parameter in another dtype, as autocast makes it, or a view of that."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def host_bytes(packed: Iterable[Any]) -> int:
    """How many bytes of `packed` wait on the host."""
    return sum(one.host.numel() * one.host.element_size() for one in packed if isinstance(one, _OnHost))
