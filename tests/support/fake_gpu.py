"""A GPU that computes nothing: tensors that say they are on one, and a record of where the host would wait for it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfmesh

_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
_SOURCES = str(Path(halfmesh.__file__).parent)


class FakeGpu(TorchDispatchMode):
    """Where the host reads from the device, or copies to it or back.

    Attributes:
        capturing: whether torch says that a CUDA graph is being captured.
        found: what happened, with the place in halfmesh.
    """

    def __init__(self) -> None:
        super().__init__()
        self.capturing = False
        self.watching = False
        self.found: list[str] = []

    @contextmanager
    def watch(self, capturing: bool) -> Iterator[None]:
        """A scope in which `found` is filled."""
        self.watching, self.capturing = True, capturing
        try:
            yield
        finally:
            self.watching = self.capturing = False

    def note(self, what: str) -> None:
        if self.watching:
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_SOURCES)]
            places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
            self.found.append(f"{what} at {' > '.join(places)}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors}
        asked_for = kwargs.get("device")
        if name in _READS:
            if "cuda" in devices:
                self.note(f"{name} reads")
            return tensors[0].dtype.is_floating_point and 1.0
        if asked_for is not None and devices and torch.device(asked_for).type not in devices:
            self.note(f"{name} from {devices} to {asked_for}")
        elif "copy" in name and len(devices) > 1 and not (name == "aten::copy_" and tensors[1].is_cuda and args[2:]):
            self.note(f"{name} between {devices}")  # a copy to the host holds nothing up if it is non-blocking
        if name.startswith("aten::_fused_"):
            return None  # a kernel without an implementation for fake tensors
        return func(*args, **kwargs)


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """A scope in which `device="cuda"` works; gradients are zeros, and no kernel runs."""
    gpu = FakeGpu()

    class Event:
        """Notes whoever waits for it without having asked whether it is over."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self._is_over = False

        def record(self, stream: Any = None) -> None: ...

        def query(self) -> bool:
            if gpu.capturing:
                gpu.note("Event.query within a capture")
            self._is_over = True
            return True

        def synchronize(self) -> None:
            if not self._is_over:
                gpu.note("Event.synchronize")

    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory and gpu.capturing:
            gpu.note("page-locked memory is taken within a capture")
        return empty(*args, **kwargs)

    with torch.device("cpu"):
        torch.empty(0)  # torch remembers now, and not while it is replaced, which functions this scope is for
    device = torch.device("cuda", 0)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch("halfmesh.launchers.choose_device", return_value=device),
        mock.patch("halfmesh.inputs.find_device_problem", return_value=None),
        mock.patch("torch.cuda.device", return_value=mock.MagicMock()),
        mock.patch("torch.cuda.is_current_stream_capturing", side_effect=lambda: gpu.capturing),
        mock.patch("torch.cuda.current_stream", return_value=None),
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.empty", pageable),
        gpu,
    ):
        yield gpu


def give_gradients(params: Callable[[], Iterator[torch.nn.Parameter]]) -> Any:
    """In place of backward, which runs in threads that fake tensors do not reach: all `params` get gradients."""

    def backward(loss: torch.Tensor, seed: torch.Tensor | None = None, retain_graph: bool = False) -> None:
        with torch.no_grad():
            for param in params():
                param.grad = torch.zeros_like(param)

    return mock.patch("torch.autograd.backward", backward)
