"""How batches of any structure come to the device, and on a GPU in which order their copies are waited for."""

from __future__ import annotations

import itertools
from collections import UserDict, namedtuple
from contextlib import contextmanager

import pytest
import torch
from torch.utils.data import DataLoader

from halfmesh.config.schema import ParallelConfig
from halfmesh.data.loader import ToDevice
from halfmesh.data.sharding import ShardedLoader
from halfmesh.parallel.mesh import ParallelContext

Pair = namedtuple("Pair", ["image", "label"])
TENSOR = torch.ones(2)


class Graph:
    """An object that moves its own tensors, in place or to a new one, with or without `non_blocking`."""

    def __init__(self, x, moves):
        self.x, self.moves, self.lengths = x, moves, torch.ones(2)

    def to(self, device, **options):
        if self.moves == "device only" and options:
            raise TypeError("unexpected keyword argument 'non_blocking'")
        if self.moves == "in place":
            self.x = self.x.to(device)
            return None
        return Graph(self.x.to(device), self.moves)


class Encoding(UserDict):
    """A mapping with a method `to` that moves in place, and only tensors at the top, as transformers' BatchEncoding."""

    def to(self, device, **options):
        self.data = {key: value.to(device) if hasattr(value, "to") else value for key, value in self.data.items()}
        return self


def moved(batch):
    to_device = ToDevice(torch.device("meta"))
    return to_device.finish(to_device.start(batch))


def test_batches_of_any_structure_and_objects_that_move_their_own_tensors():
    pair = moved(Pair(TENSOR, [TENSOR, "a"]))
    assert (type(pair), pair.image.is_meta, pair.label[0].is_meta, pair.label[1]) == (Pair, True, True, "a")
    for moves in ("in place", "new", "device only"):
        graph = moved({"graph": Graph(TENSOR, moves)})["graph"]
        assert (type(graph), graph.x.is_meta, graph.lengths.is_meta) == (Graph, True, False)
    batch = moved(given := Encoding(ids=TENSOR, more={"mask": TENSOR}))
    assert [batch["ids"].is_meta, batch["more"]["mask"].is_meta] == [True, True]
    assert not given["ids"].is_meta
    packed = moved((torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)]), TENSOR))[0]
    assert packed.data.is_meta
    assert packed.batch_sizes.tolist() == [2, 1, 1], "lengths stay on the host"


class OnGPU(torch.Tensor):
    """Notes what is done with it, as a tensor that is copied to a GPU."""

    stream, log = "compute", []

    def to(self, *_, **__):
        if self.stream == "copies":
            self.log.append(f"copy {self.item():g} on {self.stream}")
        return self

    def pin_memory(self, *_):
        self.log.append(f"pin {self.item():g}")
        return self

    def record_stream(self, stream):
        self.log.append(f"{self.item():g} used on {stream.name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def log(monkeypatch):
    """Of streams and events, by name, in the order of the calls. Events are numbered."""
    monkeypatch.setattr(OnGPU, "log", [])
    count = itertools.count(1)

    class Stream:
        def __init__(self, device=None, name="copies"):
            self.name = name

        def wait_event(self, event):
            OnGPU.log.append(f"{self.name} waits for {event.number}")

    class Event:
        def record(self, stream):
            self.number = next(count)
            OnGPU.log.append(f"event {self.number} on {stream.name}")

        def synchronize(self):
            OnGPU.log.append(f"host waits for {self.number}")

    @contextmanager
    def on(stream):
        monkeypatch.setattr(OnGPU, "stream", stream.name)
        yield
        monkeypatch.setattr(OnGPU, "stream", "compute")

    for name, fake in (("Stream", Stream), ("Event", Event), ("stream", on)):
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(name="compute"))
    return OnGPU.log


def test_a_batch_on_a_gpu_waits_for_its_own_copy_only(log):
    """Which is of pinned memory."""
    to_device = ToDevice(torch.device("cuda"))
    one, two, three = (torch.tensor(float(value)).as_subclass(OnGPU) for value in (1, 2, 3))
    first, second = to_device.start({"x": one}), to_device.start((two, three))
    to_device.finish(first)
    to_device.finish(second)
    to_device.wait()
    to_device.wait()
    assert log == [
        *("pin 1", "copy 1 on copies", "event 1 on copies"),
        *("pin 2", "copy 2 on copies", "pin 3", "copy 3 on copies", "event 2 on copies"),
        *("compute waits for 1", "1 used on compute"),
        *("compute waits for 2", "2 used on compute", "3 used on compute", "host waits for 2"),
    ]


def test_on_a_gpu_a_thread_of_the_loader_pins_and_the_one_that_was_given_is_left_alone():
    """Without workers it has no such thread, and a dataset may be on the GPU itself, which cannot be pinned."""
    for device, workers, pins in (("cuda", 1, True), ("cuda", 0, False), ("cpu", 1, False)):
        given = DataLoader(range(4), 2, num_workers=workers)
        sharded = ShardedLoader(given, ParallelContext(ParallelConfig().dims(1), torch.device(device)), training=True)
        assert (sharded.loader.pin_memory, given.pin_memory) == (pins, False)
