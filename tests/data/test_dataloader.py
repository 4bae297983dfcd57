"""The engine's dataloader in one process: devices, batch structures, the last batch, epochs, waiting for data."""

from __future__ import annotations

import itertools
from collections import UserDict, namedtuple
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, SequentialSampler

import halfmesh
from halfmesh.config.schema import ParallelConfig
from halfmesh.data.loader import EngineDataLoader, ToDevice
from halfmesh.data.sharding import ShardedLoader
from halfmesh.errors import InputError
from halfmesh.parallel.mesh import ParallelContext
from halfmesh.utils.tensors import tensors_of
from tests.support.models import MLP, make_engine, make_loader, sgd

Pair = namedtuple("Pair", ["image", "label"])
TENSOR = torch.ones(2)


def dataloader(loader, accumulation=1):
    """With accumulation the end of an epoch has to be known before it comes."""
    return make_engine({"gradient_accumulation": accumulation}, loader=loader).dataloader


@pytest.mark.parametrize(
    "item",
    [
        {"image": TENSOR, "extra": {"mask": TENSOR, "name": "a"}},
        (TENSOR, (TENSOR, [TENSOR, 3])),
        Pair(TENSOR, torch.tensor(1)),
    ],
    ids=["dicts", "nested tuples", "named tuples"],
)
def test_batches_of_any_structure_are_moved(item):
    context = ParallelContext(ParallelConfig().dims(1), torch.device("meta"))
    sharded = ShardedLoader(DataLoader([item] * 4, 2), context, training=True)
    batch = next(iter(EngineDataLoader(sharded, context, 0)))
    tensors = tensors_of(batch)
    assert tensors
    assert all(t.is_meta for t in tensors)
    assert type(batch) is (Pair if isinstance(item, Pair) else dict if isinstance(item, dict) else list)


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


class Boxes(list):
    """A list with a method of its own, as detection models have."""

    def to(self, device, **options):
        return Boxes(box.to(device) for box in self[:1])


@pytest.mark.parametrize("moves", ["in place", "new", "device only"])
def test_objects_move_their_own_tensors(moves):
    moved = ToDevice(torch.device("meta"))
    batch = moved.finish(moved.start({"graph": Graph(TENSOR, moves), "x": TENSOR, "boxes": [Boxes([TENSOR, TENSOR])]}))
    assert type(batch["graph"]) is Graph
    assert [batch["graph"].x.is_meta, batch["graph"].lengths.is_meta, batch["x"].is_meta] == [True, False, True]
    assert [box.is_meta for box in batch["boxes"][0]] == [True]


class Encoding(UserDict):
    """A mapping with a method `to` that moves in place, and only tensors at the top, as transformers' BatchEncoding."""

    def to(self, device, **options):
        self.data = {key: value.to(device) if hasattr(value, "to") else value for key, value in self.data.items()}
        return self


def test_a_mapping_is_moved_with_all_it_holds_and_stays_as_it_was():
    moved, given = ToDevice(torch.device("meta")), Encoding(ids=TENSOR, more={"mask": TENSOR})
    batch = moved.finish(moved.start(given))
    assert [batch["ids"].is_meta, batch["more"]["mask"].is_meta] == [True, True]
    assert not given["ids"].is_meta


def test_a_packed_sequence_keeps_its_lengths_on_the_host():
    moved = ToDevice(torch.device("meta"))
    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    packed = moved.finish(moved.start((packed, TENSOR)))[0]
    assert packed.data.is_meta
    assert packed.batch_sizes.tolist() == [2, 1, 1]


class Reader(IterableDataset):
    """Gives one buffer again and again, as readers of large files do; the second number says what should be in it."""

    def __iter__(self):
        buffer = torch.empty(3)
        for number in range(5):
            yield buffer.fill_(number), torch.tensor(number)


class Joined:
    """A collate_fn with one buffer for all batches."""

    def __init__(self) -> None:
        self.buffer = torch.empty(3)

    def __call__(self, samples):
        return self.buffer.fill_(samples[0]), torch.tensor(samples[0])


class Wrong(Sampler):
    """A sampler that gives another number of samples than its length says."""

    def __init__(self, gives: int, says: int) -> None:
        self.gives, self.says = gives, says

    def __iter__(self):
        return iter(range(self.gives))

    def __len__(self) -> int:
        return self.says


class Queue(IterableDataset):
    """What was read is gone."""

    def __init__(self, length: int) -> None:
        self.left = list(range(length))

    def __iter__(self):
        while self.left:
            yield self.left.pop(0)


class Counted(Queue):
    def __len__(self) -> int:
        return 17


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    "make",
    [lambda: DataLoader(Reader(), None), lambda: DataLoader(range(5), sampler=Wrong(5, 5), collate_fn=Joined())],
    ids=["whole batches", "collate_fn"],
)
def test_inputs_and_labels_of_a_buffer_that_is_used_again_stay_together(make, accumulation):
    seen = [(buffer.tolist(), number.item()) for buffer, number in dataloader(make(), accumulation)]
    assert seen == [([number] * 3, number) for number in range(5)]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_batch_is_fetched_when_it_is_asked_for(accumulation):
    """So that a dataset or a sampler may look at what training did with the batch before."""
    read = []

    class Noted(Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            read.append(index)
            return index

    loader = dataloader(DataLoader(Noted(), 4), accumulation)
    assert [(len(read), loader.at_end) for _ in loader] == [(4, False), (8, False), (12, True)]
    assert not loader.at_end


def test_a_stream_that_is_left_loses_nothing():
    loader = dataloader(DataLoader(Queue(12)))
    seen = []
    for _ in range(4):
        for number, batch in enumerate(loader):
            seen.append(batch.item())
            if number == 2:
                break
    assert seen == list(range(12))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Queue(5)),
        lambda: DataLoader(Counted(5)),
        lambda: DataLoader(range(9), sampler=Wrong(5, 9)),
        lambda: DataLoader(range(9), sampler=Wrong(5, 3)),
        lambda: DataLoader(range(9), batch_sampler=BatchSampler(Wrong(5, 9), 1, False)),
        lambda: DataLoader(range(9), sampler=range(5)),
        lambda: DataLoader(range(5), num_workers=1),
    ],
    ids=["no length", "stream", "more", "fewer", "batches", "range", "workers"],
)
def test_the_last_cycle_is_stepped_whatever_the_length_says(make):
    engine = make_engine({"gradient_accumulation": 2}, loader=make())
    updates = []
    for _ in engine.dataloader:
        engine.backward(engine.model.last.bias.sum())
        updates.append(engine.step() is not None)
    assert updates == [False, True, False, True, True]


def test_epochs_count_up_and_can_be_set():
    class Sampler(SequentialSampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    sampler = Sampler(range(8))
    loader = dataloader(DataLoader(range(8), 4, sampler=sampler))
    assert (loader.epoch, len(loader)) == (-1, 2)
    list(loader), list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert sampler.epochs == (0, 1, 7)
    assert loader.epoch == 7


def test_an_empty_stream():
    engine = halfmesh.initialize(MLP(), sgd, None, DataLoader(Queue(0), 4), {}, eval_dataloader=DataLoader(Queue(0)))
    with pytest.raises(InputError, match="epoch 0: the dataloader gave no batch on this rank; give it at"):
        list(engine.dataloader)
    assert list(engine.eval_dataloader) == []


@pytest.mark.promise(
    "`get_dataloader`, LinearWarmupLR, the loop",
    "the same names",
    of="Colossal-AI",
    page="../README.md",
)
def test_get_dataloader():
    def order(seed):
        return [y.tolist() for _, y in halfmesh.get_dataloader(data, batch_size=4, shuffle=True, seed=seed)]

    data = make_loader(16).dataset
    assert order(1) == order(1) != order(2)
    assert len(halfmesh.get_dataloader(data, batch_size=5, drop_last=True)) == 3
    assert halfmesh.get_dataloader(Queue(4), batch_size=4).batch_size == 4
    with pytest.raises(InputError, match="add_sampler=False would let every data rank see the same samples"):
        halfmesh.get_dataloader(data, add_sampler=False)


def test_the_time_that_a_loop_waits_is_counted(monkeypatch):
    now = [0]
    monkeypatch.setattr("halfmesh.data.loader.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            now[0] += 2
            return index

    loader = dataloader(DataLoader(Slow(), 2))
    for _ in loader:
        now[0] += 100
    assert loader.waited_s == 4 * 2


class OnGPU(torch.Tensor):
    """Notes what is done with it, as a tensor that is copied to a GPU."""

    stream, log, pinned = "compute", [], True

    def to(self, *_, **__):
        if self.stream == "copies":
            self.log.append(f"copy {self.item():g} on {self.stream}")
        return self

    def pin_memory(self, *_):
        if not self.pinned:
            self.log.append(f"pin {self.item():g}")
        return self

    def record_stream(self, stream):
        self.log.append(f"{self.item():g} used on {stream.name}")

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    """Streams and events by name, in the order of the calls. Events are numbered."""
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
    return ToDevice(torch.device("cuda")), OnGPU.log


def on_gpu(value):
    return torch.tensor(float(value)).as_subclass(OnGPU)


def test_a_batch_on_a_gpu_waits_for_its_own_copy_only(gpu):
    to_device, log = gpu
    first = to_device.start({"x": on_gpu(1)})
    second = to_device.start((on_gpu(2), on_gpu(3)))
    to_device.finish(first)
    to_device.finish(second)
    assert log == [
        *("copy 1 on copies", "event 1 on copies", "copy 2 on copies", "copy 3 on copies", "event 2 on copies"),
        *("compute waits for 1", "1 used on compute", "compute waits for 2", "2 used on compute", "3 used on compute"),
    ]
    to_device.wait()
    to_device.wait()
    assert log[10:] == ["host waits for 2"]


def test_an_object_is_moved_on_the_stream_that_uses_it(gpu):
    log = gpu[1]

    class Sentences:
        def pin_memory(self):
            log.append("pin sentences")
            return self

        def to(self, device, non_blocking):
            log.append(f"{OnGPU.stream} moves to {device}, {non_blocking=}")
            return self

    gpu[0].finish(gpu[0].start(Sentences()))
    assert log == [
        *("pin sentences", "event 1 on copies", "compute waits for 1", "compute moves to cuda, non_blocking=True"),
    ]


def test_batches_are_pinned_where_no_worker_did_it(gpu, monkeypatch):
    monkeypatch.setattr(OnGPU, "pinned", False)
    gpu[0].start((on_gpu(1), on_gpu(2)))
    assert gpu[1] == ["pin 1", "copy 1 on copies", "pin 2", "copy 2 on copies", "event 1 on copies"]


def test_on_a_gpu_a_thread_of_the_loader_pins_and_the_one_that_was_given_is_left_alone():
    """Without workers it has no such thread, and a dataset may be on the GPU itself, which cannot be pinned."""
    for device, workers, pins in (("cuda", 1, True), ("cuda", 0, False), ("cpu", 1, False)):
        given = DataLoader(range(4), 2, num_workers=workers)
        sharded = ShardedLoader(given, ParallelContext(ParallelConfig().dims(1), torch.device(device)), training=True)
        assert (sharded.loader.pin_memory, given.pin_memory) == (pins, False)
