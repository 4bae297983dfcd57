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

    def __init__(self):
        self.done, self._numbers = [], {}
        self._hosts = []  # kept, so that no other tensor gets an id that was seen

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
    with Offload(torch.device("cpu"), copies).everything(model):
        loss = model(X.clone().requires_grad_()).square().sum()
    for last in (False, True) if twice else (True,):
        model.zero_grad()
        loss.backward(retain_graph=not last)
    return [param.grad for param in model.parameters()]


def test_it_is_the_gradient_without_and_each_is_copied_once_for_each_backward():
    copies = Noted()
    assert all(map(torch.equal, run(copies), run()))
    back = copies.copies("back")
    assert back == sorted(back, reverse=True), "in the order in which backward needs them"
    assert len(set(back)) == len(back) == len(copies.copies("out")) > 2 * IN_FLIGHT, "each once"
    copies = Noted()
    assert all(map(torch.equal, run(copies, twice=True), run()))
    assert len(copies.copies("back")) == 2 * len(copies.copies("out")), "nothing stays on the device in between"


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ZeroDivisionError


def test_no_memory_of_a_graph_that_is_dropped_is_given_back_before_its_copy_has_ended():
    copies, model = Noted(), make()
    with Offload(torch.device("cpu"), copies).everything(model):
        x = model[:LAYERS](X)
        loss = model[LAYERS:](FailsInBackward.apply(x)).square().sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    del loss, x
    backs = copies.copies("back")
    for number in backs:
        order = [what for what, event in copies.done if event == ("back", number)]
        assert order == ["copy", "wait", "end"], number
    assert LAYERS // 2 < len(backs) < len(copies.copies("out"))


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


def test_the_stream_that_owns_the_memory_waits(monkeypatch):
    done, empty_like = [], torch.empty_like
    current = [FakeStream("computation", done)]
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: FakeStream("side", done))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: current[0])
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch, "empty_like", lambda *args, pin_memory=False, **given: empty_like(*args, **given))
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
