"""What a step costs that can be counted: calls of Python, operations of torch, reads by the host. Not seconds."""

from __future__ import annotations

import cProfile
import pstats
import weakref

import pytest
import torch
from torch import nn

import halfmesh
from benchmarks.counts import count_calls as count_calls_of
from benchmarks.harness import Contender
from halfmesh.amp import stepper
from tests.support.updates import CountReads

X, Y = torch.randn(8, 32, generator=torch.Generator().manual_seed(0)), torch.arange(8)
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CASES = [("fp32", 0.0), ("fp32", 1.0), ("bf16", 0.0), ("bf16", 1.0), ("fp16", 0.0), ("fp16", 1.0)]


def make_model():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(32, 32))


def by_hand(precision, clip, fused=None):
    """The loop that torch's documentation shows."""
    model, criterion, dtype = make_model(), nn.CrossEntropyLoss(), DTYPES[precision]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")

    def step():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = criterion(model(X), Y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()

    return step


def through_engine(precision, clip, mode="torch", **config):
    model = make_model()
    if precision != "fp32":
        config[precision] = {"mode": mode}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = halfmesh.initialize(
        model, optimizer, nn.CrossEntropyLoss(), config={"clip_grad_norm": clip, **config}, device="cpu"
    )

    def step():
        engine.zero_grad()
        loss = engine.criterion(engine(X), Y)
        engine.backward(loss)
        engine.step()

    return step


def count_calls(step, steps=20):
    for _ in range(5):
        step()
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(steps):
        step()
    profile.disable()
    return pstats.Stats(profile).total_calls / steps


def count_ops(step):
    for _ in range(3):
        step()
    with CountReads() as counter:
        step()
    return len(counter.ops), counter.reads


@pytest.mark.parametrize(
    ("precision", "clip", "share"),
    [("fp32", 0.0, 0.49), ("bf16", 0.0, 0.53), ("fp16", 0.0, 0.53), ("fp16", 1.0, 0.36)],
)
def test_calls_of_python(precision, clip, share):
    """As a share of those of the loop by hand; nothing that is added to a step may go unnoticed.

    (In a process that has run other tests torch makes four calls more in either.)
    """
    ours, theirs = count_calls(through_engine(precision, clip)), count_calls(by_hand(precision, clip))
    assert ours <= share * theirs, f"{ours:.0f} of {theirs:.0f}"
    assert ours < count_calls(by_hand(precision, clip, fused=True))


def update_calls(mode, depth):
    """Calls of `engine.step` alone (the median: a collection of garbage may call hooks), and how many tensors it
    steps."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = {"fp16": {"mode": mode}, "clip_grad_norm": 1.0}
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), config=config, device="cpu")

    def before():
        engine.zero_grad()
        engine.backward(engine.criterion(engine(X[:, :4]), Y % 4))

    return count_calls_of(Contender("update", engine.step, model, before=before), steps=9), 2 * depth


@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_an_update_calls_nothing_for_each_tensor(mode):
    """But torch's own check of each, in two calls."""
    few, count = update_calls(mode, 3)
    many, more = update_calls(mode, 13)
    assert many - few == 2 * (more - count)


@pytest.mark.parametrize(("precision", "clip"), CASES)
def test_operations_of_torch(precision, clip):
    """Never more than the loop by hand with the fused optimizer."""
    ours, reads = count_ops(through_engine(precision, clip))
    theirs, _ = count_ops(by_hand(precision, clip, fused=True))
    assert ours <= theirs, f"{ours} of {theirs}"
    assert reads == 0


@pytest.mark.parametrize("mode", ["torch", "naive"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_no_reads_by_the_host(mode, precision, accumulation):
    step = through_engine(precision, 1.0, mode, gradient_accumulation=accumulation)
    for _ in range(4):
        step()
    with CountReads() as counter:
        for _ in range(8):
            step()
    assert counter.reads == 0


NAIVE = {"bf16": {"mode": "naive"}}


@pytest.mark.parametrize("config", [{}, NAIVE, {**NAIVE, "clip_grad_norm": 1.0}], ids=["fp32", "naive", "naive-clip"])
def test_memory_of_gradients_is_kept_until_the_next_step(config):
    """As in a loop by hand: given back between two steps, it would go to the system and come back page by page."""
    model = make_model()
    engine = halfmesh.initialize(
        model, torch.optim.AdamW(model.parameters()), nn.CrossEntropyLoss(), config=config, device="cpu"
    )
    engine.backward(engine.criterion(engine(X), Y))
    grads = [weakref.ref(param.grad) for param in model.parameters()]
    engine.step()
    assert all(param.grad is None for param in model.parameters())
    assert all(grad() is not None for grad in grads)
    engine.zero_grad()
    assert all(grad() is None for grad in grads)
    engine.backward(engine.criterion(engine(X), Y))
    grads = [weakref.ref(param.grad) for param in model.parameters()]
    engine.step()
    engine.backward(engine.criterion(engine(X), Y))  # without zero_grad
    assert all(grad() is None for grad in grads)


@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["in parts", "one large part", "all at once"])
def test_memory_of_gradients_is_not_kept_beside_many_copies(monkeypatch, kind, clip):
    """Where fp32 copies are made part by part, or take more than a part should, it would be memory of its own."""
    monkeypatch.setattr(stepper, "STREAM_BYTES", 60)
    model = nn.Linear(32, 32, bias=False) if kind == "one large part" else make_model()
    engine = halfmesh.initialize(
        model,
        torch.optim.AdamW(model.parameters()),
        nn.CrossEntropyLoss(),
        config={**NAIVE, "clip_grad_norm": clip} if clip else NAIVE,
        device="cpu",
    )
    if kind == "all at once":  # for a hook
        engine.optimizer.register_step_post_hook(lambda *_: None)
    engine.backward(engine.criterion(engine(X), Y))
    grads = [weakref.ref(param.grad) for param in model.parameters()]
    engine.step()
    assert all(grad() is None for grad in grads)


def test_autocast_is_made_once(monkeypatch):
    """Making a scope costs more than the calls of a small layer."""
    made, inner = [], torch.autocast.__init__

    def count(self, *args, **kwargs):
        made.append(1)
        inner(self, *args, **kwargs)

    monkeypatch.setattr(torch.autocast, "__init__", count)
    step = through_engine("bf16", 0.0)
    for _ in range(5):
        step()
    assert len(made) == 1


def test_a_model_that_calls_the_engine_has_its_own_scope():
    """Leaving the inner one must leave the outer one as it was."""

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.deep = True

        def forward(self, x):
            if self.deep:
                self.deep = False
                x = engine(x)
                self.deep = True
            return self.inner(x)

    model = Outer()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"bf16": {"mode": "torch"}}, device="cpu"
    )
    assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")
    assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
    assert not torch.is_autocast_enabled("cpu")


def test_the_cache_of_autocast_is_as_it_is_around():
    seen = []

    class Looks(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_cache_enabled())
            return super().forward(x)

    model = Looks(4, 4)
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"bf16": {"mode": "torch"}}, device="cpu"
    )
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        engine(torch.ones(2, 4))
    engine(torch.ones(2, 4))
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        engine(torch.ones(2, 4))
    assert seen == [False, True, False]


def test_zero_grad_forgets_casts():
    """Within a scope of the user's around the loop, where weights are exchanged without being counted as changed."""
    model = nn.Linear(4, 4, bias=False)
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"bf16": {"mode": "torch"}}, device="cpu"
    )
    x = torch.ones(1, 4)
    with torch.autocast("cpu", torch.bfloat16):
        engine(x)
        model.weight.data.fill_(2.0)
        engine.zero_grad()
        assert engine(x).tolist() == [[8.0] * 4]


def test_autocast_is_left_after_an_error():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            if x.sum() == 0:
                raise LookupError("no data")
            return self.inner(x)

    model = Fails()
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), config={"bf16": {"mode": "torch"}}, device="cpu"
    )
    for _ in range(2):
        with pytest.raises(LookupError, match="no data"):
            engine(torch.zeros(2, 4))
        assert not torch.is_autocast_enabled("cpu")
        assert engine(torch.ones(2, 4)).dtype == torch.bfloat16
