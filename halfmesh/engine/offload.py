"""Activation offloading: activations are kept in host memory until backward."""

from __future__ import annotations

import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ..utils.torch_private import versions

SMALLEST = 1024  # tensors of fewer bytes stay on the device
# Tensors that are copied at a time during the computation, in each direction. A transformer block saves about ten.
IN_FLIGHT = 4


class Copies:
    """Copies between a GPU and pinned memory, on a separate stream. The device waits for them, not the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy, and the event of its end. Keep `tensor` until `wait` has been called with it."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
        return host, self._copy(host, tensor.detach())

    def to_device(self, host: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy on the device, and the event of its end. Keep it until `wait` has been called with the event."""
        tensor = torch.empty_like(host, device=self._device)
        return tensor, self._copy(tensor, host)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Any:
        """Begin a copy. Memory on the device is the computation's, which has finished with it when the copy begins."""
        computation = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(computation)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event(), computation

    def wait(self, event: Any) -> None:
        """Later computation waits for `event`; so does what reuses the memory, which needs no `record_stream`: with it
        memory would be free only when the device arrives there, and backward is far ahead of the device."""
        done, computation = event
        for stream in {computation, torch.cuda.current_stream(self._device)}:
            stream.wait_event(done)


class Offload:
    """Moves the tensors that autograd saves to the host, and back when backward needs them.

    Weights, casts of weights and tensors already on the host stay. On a GPU copies overlap with computation. At most
    `IN_FLIGHT` copies to the host are pending: the computation waits for the oldest, so that device memory does not
    pile up. When backward needs a tensor, those saved just before it are fetched, too.

    Args:
        device: the model's.
        copies: copies the tensors; by default as the device needs it.
    """

    def __init__(self, device: torch.device, copies: Copies | None = None) -> None:
        self._device = device
        self._copies = copies
        self._leaving: deque[tuple[torch.Tensor, Any]] = deque()  # tensors that are being copied, and the events of it
        self._last: Callable[[], _OnHost | None] = lambda: None

    def inputs(self) -> AbstractContextManager[Any]:
        """The scope for module inputs, among which there are no weights."""
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, frozenset()), operator.call)

    def everything(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The scope around a forward of `model`."""
        own = frozenset(map(_storage, chain(model.parameters(), model.buffers())))
        return saved_tensors_hooks(lambda tensor: self._pack(tensor, own), operator.call)

    def _pack(self, tensor: torch.Tensor, own: frozenset[int]) -> Callable[[], torch.Tensor]:
        is_large = tensor.numel() * tensor.element_size() >= SMALLEST
        moves = tensor.device.type == self._device.type and tensor.layout == torch.strided and is_large
        if not moves or _storage(tensor) in own or _is_cast_of_parameter(tensor):
            return _Kept(tensor)
        if self._copies is None and self._device.type == "cuda":
            self._copies = Copies(self._device)
        if self._copies is None:
            return _OnHost(tensor.detach().clone(), tensor, self, self._last)
        self.wait_for_leaving(IN_FLIGHT - 1)
        host, event = self._copies.to_host(tensor)
        self._leaving.append((tensor.detach(), event))
        packed = _OnHost(host, tensor, self, self._last)
        self._last = weakref.ref(packed)
        return packed

    def wait(self, event: Any) -> None:
        if self._copies is not None:
            self._copies.wait(event)

    def wait_for_leaving(self, count: int) -> None:
        """Wait until at most `count` copies to the host are pending: the computation may reuse the others' memory."""
        while self._copies is not None and len(self._leaving) > count:
            self._copies.wait(self._leaving.popleft()[1])

    def fetch(self, packed: _OnHost) -> torch.Tensor:
        """The tensor that backward needs; those saved just before it, which are next, are begun to be copied."""
        if self._copies is None:
            return packed.host
        self.wait_for_leaving(0)
        tensor, event = packed.fetched or self._copies.to_device(packed.host)
        packed.fetched = None  # a second backward fetches it again
        for _ in range(IN_FLIGHT):
            if (earlier := packed.before()) is None:
                break
            packed = earlier
            packed.fetched = packed.fetched or self._copies.to_device(packed.host)
        self._copies.wait(event)
        return tensor


class _Kept:
    """A tensor that stays on its device. (Detached, or the output of an operation would keep itself alive.)"""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._shape = tensor.detach(), tuple(tensor.shape)
        self._version = versions([tensor])

    def __call__(self) -> torch.Tensor:
        if versions([self._tensor]) != self._version:  # torch does not look where there are hooks
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {self._shape} and dtype {self._tensor.dtype}"
            )
        return self._tensor


class _OnHost(_Kept):
    """A copy of `tensor` in `host`. Later writes to `tensor` are rejected: the copy may not be finished.

    Args:
        before: the tensor that was saved before this one; backward needs it next.

    Attributes:
        fetched: a copy on the device that was begun, and the event of its end.
    """

    def __init__(
        self, host: torch.Tensor, tensor: torch.Tensor, offload: Offload, before: Callable[[], _OnHost | None]
    ) -> None:
        super().__init__(tensor)
        self._tensor.data = tensor.new_empty(0)  # it counts the writes, without the memory
        self.host = host
        self.before = before
        self.fetched: tuple[torch.Tensor, Any] | None = None
        self._offload = offload

    def __call__(self) -> torch.Tensor:
        super().__call__()
        return self._offload.fetch(self)

    def __del__(self) -> None:
        if self.fetched is not None and not sys.is_finalizing():  # begun for nothing: its memory is free when it ends
            self._offload.wait(self.fetched[1])


def _is_cast_of_parameter(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is a trained parameter in another dtype, as autocast makes it, or a view of that."""
    node: Any = (tensor if tensor._base is None else tensor._base).grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    return isinstance(getattr(node.next_functions[0][0], "variable", None), nn.Parameter)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
