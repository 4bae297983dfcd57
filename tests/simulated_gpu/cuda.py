"""`torch.cuda` over device.cpp: a host that says it is 8 GPUs.

Here tests/gpu and the tests of ranks run with tensors that say they are on a device. That shows tensors of two devices
that mix, reads by the host where `set_sync_debug_mode` forbids them, random numbers of a device, and what is sent by a
group that takes no tensors of the host. It cannot show the order of streams (work is done when it is asked for, and
streams have no order to keep), what CUDA's kernels compute (the CPU's do it), what NCCL does (gloo sends), or how much
memory a GPU takes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import types
from typing import Any

import torch
import torch._dynamo.device_interface  # looks for CUDA when it is imported, and must find none
import torch._inductor.utils
import torch.cuda.memory
import torch.cuda.random
import torch.cuda.streams
from torch._decomp import decompositions

device_: Any
"""The compiled module."""
_OPERATIONS = torch.library.Library("aten", "IMPL")


def yes(*_, **__):
    return True


def nothing(*_, **__): ...


def index_of(device=None):
    if device is None or isinstance(device, int):
        return device_.current() if device is None else device
    index = torch.device(device).index
    return device_.current() if index is None else index


class Stream:
    wait_stream = wait_event = synchronize = nothing
    query = yes

    def __init__(self, device=None, **_):
        self.device = torch.device("cuda", index_of(device))
        self.cuda_stream = self.stream_id = 0

    def __eq__(self, other):
        return isinstance(other, Stream)

    def __hash__(self):
        return 0

    def record_event(self, event=None):
        return event or Event()


class Event:
    """Over when the host waits for it or for the device, and else when one asks for the second time: both answers are
    seen."""

    waits = 0
    """How often the host has waited for the device."""
    wait = nothing

    def __init__(self, *_, **__):
        self.record()

    def record(self, stream=None):
        self.is_over, self.begun = False, Event.waits

    def query(self):
        was_over, self.is_over = self.is_over or self.begun < Event.waits, True
        return was_over

    def synchronize(self):
        self.is_over = True

    def elapsed_time(self, other):
        return 1.0


def synchronize(device=None):
    Event.waits += 1


class Device:
    def __init__(self, given):
        self.idx = index_of(given)

    def __enter__(self):
        self.before = device_.current()
        device_.set_current(self.idx)

    def __exit__(self, *_):
        device_.set_current(self.before)


def generator(device=None):
    return device_.default_generator(index_of(device))


def generators():
    return tuple(map(generator, range(device_.DEVICES)))


def manual_seed_all(seed):
    for one in generators():
        one.manual_seed(seed)


def replacements():
    properties = types.SimpleNamespace(
        name="simulated", total_memory=80 << 30, major=8, minor=0, multi_processor_count=1
    )
    return {
        **dict.fromkeys(("is_available", "_is_compiled", "is_initialized", "is_bf16_supported"), yes),
        **dict.fromkeys(("init", "_lazy_init", "set_stream", "empty_cache", "seed_all"), nothing),
        **dict.fromkeys(("current_stream", "default_stream"), lambda device=None: Stream(device)),
        **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda device=None: device_.held()),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda device=None: device_.peak()),
        "_lazy_call": lambda function, **_: function(),
        "synchronize": synchronize,
        "Stream": Stream,
        "Event": Event,
        "stream": lambda stream: contextlib.nullcontext(),
        "device": Device,
        "device_count": lambda: device_.DEVICES,
        "current_device": lambda: device_.current(),
        "set_device": lambda device: device_.set_current(index_of(device)),
        "is_current_stream_capturing": lambda: False,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "reset_peak_memory_stats": lambda device=None: device_.reset_peak(),
        "memory_stats": lambda device=None: {},
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30),
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": lambda state, device=None: generator(device).set_state(state),
        "get_rng_state_all": lambda: [one.get_state() for one in generators()],
        "initial_seed": lambda: generator().initial_seed(),
        "manual_seed": lambda seed: generator().manual_seed(seed) and None,
        "manual_seed_all": manual_seed_all,
        "set_sync_debug_mode": lambda mode: device_.set_no_waits(mode in ("error", 2)),
    }


def install(library):
    """Replace what in torch talks to a GPU."""
    global device_
    spec = importlib.util.spec_from_file_location("simulated_gpu", library)
    device_ = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(device_)

    for name, value in replacements().items():
        for module in (torch.cuda, torch.cuda.random, torch.cuda.memory, torch.cuda.streams):
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.cuda._initialized = True
    torch.cuda.default_generators = generators()
    torch.cuda.nccl.version = lambda: (2, 0, 0)  # for torch's log of errors
    torch._C._cuda_sleep = lambda cycles: None
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    resize = torch.UntypedStorage.resize_

    def resize_(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        device_.resize(storage, size)
        return storage

    def to(storage, device, non_blocking=False):
        size = storage.nbytes()
        held = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (size,), (1,))
        return torch.empty(size, dtype=torch.uint8, device=device).copy_(held).untyped_storage()

    torch.UntypedStorage.resize_ = resize_
    torch.UntypedStorage.clone = lambda storage: to(storage, storage.device)
    torch.storage._to = to
    # A GPU's kernels for attention do not go by way of fp32.
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp(True)
    kernels = {"gru.input": "gru_impl", "gru.data": "gru_impl_data", "lstm.input": "lstm_impl"}
    for name, kernel in {**kernels, "lstm.data": "lstm_data_impl"}.items():  # CUDA's are not the CPU's
        _OPERATIONS.impl(name, getattr(decompositions, kernel), "AutogradCUDA")
    # torchvision is built for CUDA, and cannot load its operators here; timm asks for none of them.
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
