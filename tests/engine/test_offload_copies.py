"""The order of copies of offloaded activations on a GPU, with copies that only note when they are asked for."""

import contextlib
import weakref

import pytest
import torch
from torch import nn

from halfmesh.engine.offload import IN_FLIGHT, Copies, Offload

LAYERS = 12
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


class Noted:
    """What is done, in order: copies, waits for them, and the ends of tensors that were fetched. Their events are
    ("out", n) and ("back", n), where n counts the copies of one direction."""

    def __init__(self) -> None:
        self.done: list[tuple[str, tuple[str, int]]] = []
        self._numbers: dict[int, int] = {}
        self._hosts: list[torch.Tensor] = []  # kept, so that no other tensor gets an id that was seen

    def to_host(self, tensor):
        host = tensor.detach().clone()
        event = "out", len(self._hosts)
        self._numbers[id(host)] = len(self._hosts)
        self._hosts.append(host)
        self.done.append(("copy", event))
        return host, event

    def to_device(self, host):
        event = "back", self._numbers[id(host)]
        self.done.append(("copy", event))
        tensor = host.clone()
        weakref.finalize(tensor, self.done.append, ("end", event))
        return tensor, event

    def wait(self, event):
        self.done.append(("wait", event))

    def copies(self, direction):
        return [number for what, (where, number) in self.done if (what, where) == ("copy", direction)]


def make():
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(64, 64), nn.Tanh())))


def run(copies=None, twice=False):
    model = make()
    offload = Offload(torch.device("cpu"), copies)
    with offload.everything(model):
        loss = model(X.clone().requires_grad_()).square().sum()
    for last in (False, True) if twice else (True,):
        model.zero_grad()
        loss.backward(retain_graph=not last)
    return [param.grad for param in model.parameters()], offload


def test_forward_waits_for_the_copy_before_the_last_few():
    copies = Noted()
    run(copies)
    in_flight = []
    for what, event in copies.done:
        if event[0] == "out":
            in_flight += [event] if what == "copy" else []
            assert what == "copy" or in_flight.pop(0) == event, "the oldest first"
            assert len(in_flight) <= IN_FLIGHT
    assert not in_flight, "backward gives up what forward kept"
    assert len(copies.copies("out")) > 2 * IN_FLIGHT


def test_backward_finds_what_it_needs_under_way():
    copies = Noted()
    found, _ = run(copies)
    expected, _ = run()
    assert all(torch.equal(mine, others) for mine, others in zip(found, expected, strict=True))
    back = copies.copies("back")
    assert back == sorted(back, reverse=True), "in the order in which backward needs them"
    assert len(set(back)) == len(back) == len(copies.copies("out")), "each once"
    waits = [place for place, (what, event) in enumerate(copies.done) if what == "wait" and event[0] == "back"]
    begun = {event: place for place, (what, event) in enumerate(copies.done) if what == "copy"}
    later = waits[1:]  # the first has nobody before it who could have begun it
    for earlier, place in zip(waits, later, strict=False):
        assert begun[copies.done[place][1]] < earlier, "begun before the one before it was waited for"


def test_a_second_backward_copies_again():
    copies = Noted()
    found, _ = run(copies, twice=True)
    expected, _ = run()
    assert all(torch.equal(mine, others) for mine, others in zip(found, expected, strict=True))
    assert len(copies.copies("back")) == 2 * len(copies.copies("out")), "nothing stays on the device in between"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


@pytest.mark.parametrize("drops", [False, True], ids=["used", "dropped"])
def test_no_memory_is_given_back_before_its_copy_has_ended(drops):
    copies = Noted()
    model = make()
    offload = Offload(torch.device("cpu"), copies)
    with offload.everything(model):
        x = model[:LAYERS](X)
        loss = model[LAYERS:](FailsInBackward.apply(x) if drops else x).square().sum()
    with pytest.raises(ZeroDivisionError) if drops else contextlib.nullcontext():
        loss.backward()
    del loss, x
    backs = copies.copies("back")
    for number in backs:
        order = [what for what, event in copies.done if event == ("back", number)]
        assert order == ["copy", "wait", "end"], number
    waited_for_by_use = [event for what, event in copies.done if (what, event[0]) == ("wait", "back")]
    assert len(backs) < len(copies.copies("out")) if drops else len(backs) == len(waited_for_by_use)


class FakeStream:
    """Notes what it does; the host's copies are those of the CPU."""

    def __init__(self, name, done):
        self.name, self.done, self.events = name, done, 0

    def wait_stream(self, other):
        self.done.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.done.append(f"{self.name} waits for {event}")

    def record_event(self):
        self.events += 1
        return f"copy {self.events}"


@pytest.fixture
def streams(monkeypatch):
    """Of the real `Copies`, on the CPU: what its streams do. `record_stream` does not exist."""
    done: list[str] = []
    current = [FakeStream("computation", done)]
    empty_like = torch.empty_like

    def reject(*_):
        raise AssertionError("record_stream keeps memory until the device arrives there")

    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("side", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", reject)
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **given: empty_like(*args, **given))
    return done, current


def test_the_stream_that_owns_the_memory_waits(streams):
    done, current = streams
    copies = Copies(torch.device("cpu"))
    host, event = copies.to_host(X)
    assert torch.equal(host, X)
    copies.wait(event)
    assert done == ["side waits for computation", "computation waits for copy 1"]
    done.clear()
    tensor, event = copies.to_device(host)
    assert torch.equal(tensor, X)
    assert done == ["side waits for computation"]
    current[0] = FakeStream("other", done)  # a graph may be dropped where another stream is current
    copies.wait(event)
    assert sorted(done[1:]) == ["computation waits for copy 2", "other waits for copy 2"]


def test_backward_with_the_real_copies_records_no_stream(streams):
    found, _ = run(Copies(torch.device("cpu")))
    expected, _ = run()
    assert all(torch.equal(mine, others) for mine, others in zip(found, expected, strict=True))
