"""The order of copies of offloaded activations on a GPU, with copies that only note when they are asked for."""

import torch
from torch import nn

from halfmesh.engine.offload import IN_FLIGHT, Offload

LAYERS = 12
X = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))


class Noted:
    """What is done, in order: ("out", n), ("back", n) and ("wait", n), where n counts the copies of one direction."""

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
        return host.clone(), event

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
