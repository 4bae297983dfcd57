"""A GPU that computes nothing: tensors that say they are on one, and a record of where the host would wait for it.

It shows, in one process and at once, where a step reads from the device or copies, what it could not do within a
capture, and how many kernels it would launch, before any GPU is there. It cannot show numbers (no kernel runs, backward
is replaced), the order of streams, NCCL, or memory. tests/simulated_gpu computes, over ranks too, and sees reads as
well; tests/gpu needs the real thing.
"""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import halfmesh
from halfmesh.engine.executor import ModelRNG

_READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::is_nonzero"}
_NO_KERNEL = {
    *("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"),
    *("aten::detach", "aten::as_strided", "aten::view", "aten::_unsafe_view", "aten::set_", "prim::device"),
    *("aten::split", "aten::split_with_sizes", "aten::unbind", "aten::alias"),
}
_SOURCES = str(Path(halfmesh.__file__).parent)


class FakeGpu(TorchDispatchMode):
    """Where the host reads from the device, or copies to it or back.

    Attributes:
        capturing: whether torch says that a CUDA graph is being captured.
        found: what happened, with the place in halfmesh.
        launched: the names of operations that start kernels on the device.
    """

    def __init__(self):
        super().__init__()
        self.capturing = self.watching = False
        self.found, self.launched = [], []

    @contextmanager
    def watch(self, capturing):
        """A scope in which `found` is filled."""
        self.watching, self.capturing = True, capturing
        try:
            yield
        finally:
            self.watching = self.capturing = False

    def note(self, what):
        if self.watching:
            frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(_SOURCES)]
            places = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames[-3:]]
            self.found.append(f"{what} at {' > '.join(places)}")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func._schema.name, kwargs or {}
        if self.watching and _launches(func, args, kwargs, "cuda"):
            self.launched.append(name)
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


class CountLaunches(TorchDispatchMode):
    """Records in `names` the operations that would start kernels, on whatever device they run. What a DTensor does with
    its local tensor counts, and not it itself."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        if DTensor not in types and _launches(func, args, kwargs or {}, device):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _launches(func, args, kwargs, device):
    """Whether `func` starts work on the device. One `_foreach` operation counts once, as it starts a kernel for a lot
    of tensors at a time; allocations and views start none."""
    if func._schema.name in _NO_KERNEL or (func.is_view and not func._schema.is_mutable):
        return False
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
    return device in devices or torch.device(kwargs.get("device") or "cpu").type == device


@contextmanager
def fake_gpu():
    """A scope in which `device="cuda"` works; gradients are zeros, and no kernel runs."""
    gpu = FakeGpu()

    class Event:
        """Is over when it is asked for the second time; notes whoever waits for it before."""

        def __init__(self, *_, **__):
            self._is_over = False

        def record(self, stream=None): ...

        def query(self):
            if gpu.capturing:
                gpu.note("Event.query within a capture")
            was_over, self._is_over = self._is_over, True
            return was_over

        def synchronize(self):
            gpu.note("Event.synchronize")

    empty = torch.empty

    def pageable(*args, pin_memory=False, **kwargs):
        if pin_memory and gpu.capturing:
            gpu.note("page-locked memory is taken within a capture")
        return empty(*args, **kwargs)

    with torch.device("cpu"):
        torch.empty(0)  # torch remembers now, and not while it is replaced, which functions this scope is for
    device = torch.device("cuda", 0)
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        mock.patch("halfmesh.engine.launch.choose_device", return_value=device),
        mock.patch("halfmesh.engine.inputs.find_device_problem", return_value=None),
        mock.patch("halfmesh.engine.parallelize.ModelRNG", lambda seed, _: ModelRNG(seed, torch.device("cpu"))),
        mock.patch("torch.cuda.device", return_value=mock.MagicMock()),
        mock.patch("torch.cuda.is_current_stream_capturing", side_effect=lambda: gpu.capturing),
        mock.patch("torch.cuda.current_stream", return_value=None),
        mock.patch("torch.cuda.Event", Event),
        mock.patch("torch.empty", pageable),
        gpu,
    ):
        yield gpu


def give_gradients(gpu, params):
    """In place of backward, which runs in threads that fake tensors do not reach: all `params` get gradients, and their
    hooks run."""

    def backward(loss, seed=None, retain_graph=False):
        with torch.no_grad():
            for param in reversed(list(params())):
                watching, gpu.watching = gpu.watching, False  # this is the model's backward
                grad = torch.zeros_like(param)
                param.grad = grad if param.grad is None else param.grad + grad
                gpu.watching = watching
                for hook in list((param._post_accumulate_grad_hooks or {}).values()):
                    hook(param)

    return mock.patch("torch.autograd.backward", backward)
