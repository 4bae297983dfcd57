"""The engine's dataloader in one process: the last batch, epochs; how batches of any structure come to the device, and
on a GPU in which order their copies are waited for."""

from collections import UserDict, namedtuple
from unittest import mock

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

import halfmesh
from halfmesh.config.schema import ParallelConfig
from halfmesh.data.loader import ToDevice
from halfmesh.data.sharding import ShardedLoader
from halfmesh.errors import InputError
from halfmesh.parallel.mesh import ParallelContext
from tests.support.models import make_engine, make_loader

from .loaders import Numbers


def dataloader(loader):
    """With accumulation: the end of an epoch has to be known before it comes."""
    return make_engine({"gradient_accumulation": 2}, loader=loader).dataloader


class Wrong(Sampler):
    """A sampler that gives another number of samples than its length says."""

    def __init__(self, gives, says):
        self.gives, self.says = gives, says

    def __iter__(self):
        return iter(range(self.gives))

    def __len__(self):
        return self.says


class Queue(IterableDataset):
    """What was read is gone."""

    def __init__(self, length):
        self.left = list(range(length))

    def __iter__(self):
        while self.left:
            yield self.left.pop(0)


class Counted(Queue):
    def __len__(self):
        return 17


def test_inputs_and_labels_of_a_buffer_that_is_used_again_stay_together():
    """As a collate_fn or a reader of large files may have. Under accumulation this one is fetched ahead."""
    buffer = torch.empty(3)

    def collate(samples):
        return buffer.fill_(samples[0]), torch.tensor(samples[0])

    given = DataLoader(range(5), sampler=Wrong(5, 5), collate_fn=collate)
    assert [(x.tolist(), y.item()) for x, y in dataloader(given)] == [([n] * 3, n) for n in range(5)]


def test_a_batch_is_fetched_when_it_is_asked_for():
    """So that a dataset or a sampler may look at what training did with the batch before."""
    data = Numbers()
    loader = dataloader(DataLoader(data, 4))
    assert [(len(data.read), loader.at_end) for _ in loader] == [(4, False), (8, False), (12, False), (16, True)]
    assert not loader.at_end


LENGTHS = {
    "no length": lambda: DataLoader(Queue(5)),
    "stream": lambda: DataLoader(Counted(5)),
    "more": lambda: DataLoader(range(9), sampler=Wrong(5, 9)),
    "workers": lambda: DataLoader(range(5), num_workers=1),
}


@pytest.mark.parametrize("name", LENGTHS)
def test_the_last_cycle_is_stepped_whatever_the_length_says(name):
    engine = make_engine({"gradient_accumulation": 2}, loader=LENGTHS[name]())
    updates = []
    for _ in engine.dataloader:
        engine.backward(engine.model.last.bias.sum())
        updates.append(engine.step() is not None)
    assert updates == [False, True, False, True, True]


@pytest.mark.parametrize("kind", [BatchSampler, type("Grouped", (BatchSampler,), {})])
def test_epochs_count_up_and_can_be_set(kind):
    class Sampler(SequentialSampler):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs += (epoch,)

    sampler = Sampler(range(8))
    loader = dataloader(DataLoader(range(8), batch_sampler=kind(sampler, 4, False)))
    assert (loader.epoch, len(loader)) == (-1, 2)
    list(loader)
    loader.set_epoch(7)
    next(iter(loader))
    assert (sampler.epochs, loader.epoch) == ((0, 7), 7)


@pytest.mark.promise(
    "`get_dataloader`, LinearWarmupLR, the loop", "the same names", of="Colossal-AI", page="../README.md"
)
def test_get_dataloader():
    def order(seed):
        return [y.tolist() for _, y in halfmesh.get_dataloader(data, batch_size=4, shuffle=True, seed=seed)]

    data = make_loader(16).dataset
    assert order(1) == order(1) != order(2)
    assert len(halfmesh.get_dataloader(data, batch_size=5, drop_last=True)) == 3
    assert halfmesh.get_dataloader(Queue(4), batch_size=4).batch_size == 4
    with pytest.raises(InputError, match="add_sampler=False would give every data rank the same samples"):
        halfmesh.get_dataloader(data, add_sampler=False)


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
    """Tells `calls` what is done with it, as a tensor that is copied to a GPU."""

    calls = mock.MagicMock()

    def to(self, device, non_blocking=False):
        if non_blocking:
            self.calls.copy(self.item())
        return self

    def pin_memory(self):
        self.calls.pin(self.item())
        return self

    def record_stream(self, stream):
        stream.uses(self.item())

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def test_a_batch_on_a_gpu_waits_for_its_own_copy_only(monkeypatch):
    """Which is of pinned memory."""
    monkeypatch.setattr(OnGPU, "calls", calls := mock.MagicMock())
    events = iter([calls.event_1, calls.event_2])
    monkeypatch.setattr(torch.cuda, "Event", lambda: next(events))
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: calls.copies)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: calls.compute)
    monkeypatch.setattr(torch.cuda, "stream", calls.on)
    to_device = ToDevice(torch.device("cuda"))
    one, two, three = (torch.tensor(float(value)).as_subclass(OnGPU) for value in (1, 2, 3))
    first, second = to_device.start({"x": one}), to_device.start((two, three))
    to_device.finish(first)
    to_device.finish(second)
    to_device.wait()
    to_device.wait()
    call = mock.call
    begin, end = (call.on(calls.copies), call.on().__enter__()), call.on().__exit__(None, None, None)
    assert calls.mock_calls == [
        *(*begin, call.pin(1), call.copy(1), call.event_1.record(calls.copies), end),
        *(*begin, call.pin(2), call.copy(2), call.pin(3), call.copy(3), call.event_2.record(calls.copies), end),
        *(call.compute.wait_event(calls.event_1), call.compute.uses(1)),
        *(call.compute.wait_event(calls.event_2), call.compute.uses(2), call.compute.uses(3)),
        call.event_2.synchronize(),
    ]


def test_on_a_gpu_a_thread_of_the_loader_pins_and_the_one_that_was_given_is_left_alone():
    """Without workers it has no such thread, and a dataset may be on the GPU itself, which cannot be pinned."""
    for device, workers, pins in (("cuda", 1, True), ("cuda", 0, False), ("cpu", 1, False)):
        given = DataLoader(range(4), 2, num_workers=workers)
        sharded = ShardedLoader(given, ParallelContext(ParallelConfig().dims(1), torch.device(device)), training=True)
        assert (sharded.loader.pin_memory, given.pin_memory) == (pins, False)
