"""What NonFiniteError says of the first inf or nan: the module, weight, batch or loss it began with, and the rank."""

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import make_data
from tests.support.ranks import here, rank_device, run_ranks

RAISE = {"on_nonfinite": "raise", "debug": "nonfinite"}
TORCH = {"fp16": {"mode": "torch", "init_scale": 16.0}, **RAISE}
NAIVE = {"fp16": {"mode": "naive", "initial_scale": 16.0}, **RAISE}
COMPILED = {"compile": {"backend": "aot_eager"}, **RAISE}
INF = float("inf")


class Times(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


class Root(nn.Module):
    """Its value at 0 is finite, its derivative is not."""

    def forward(self, x):
        return (x * 0).abs().sqrt()


class Block(nn.Module):
    """`between` is done by its own forward, between two modules."""

    def __init__(self, *inner, between=None):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(*inner), nn.Linear(8, 8)
        self.between = between

    def forward(self, x):
        x = self.inner(self.first(x))
        return self.last(x if self.between is None else self.between(x))


def net(*inner, between=None):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(*inner, between=between), nn.Linear(8, 4))


def sgd_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def cross_entropy(output, y):
    return nn.functional.cross_entropy(output.float(), y)


def fail(model, config, *, x=None, criterion=cross_entropy, before=None, batches=1):
    """The error of a run whose batches are all the same."""
    engine = halfmesh.initialize(model, sgd_of(model), criterion, config=config, device=rank_device())
    samples, labels = make_data(4)
    x, y = here((samples if x is None else x, labels))
    if before is not None:
        with torch.no_grad():
            before(engine.model)
    error = None
    for _ in range(batches):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        try:
            engine.step()
        except halfmesh.NonFiniteError as raised:
            error = raised
    engine.close()
    assert error is not None
    assert str(error.diagnosis) in str(error)
    return error


def spoil(model):
    model[1].last.weight[2, 3] = float("nan")


def bad_batch():
    x, _ = make_data(4)
    x[1, 2], x[1, 3] = INF, float("nan")
    return x


def log_of_0(output, y):
    return (output.softmax(-1) * 0).log().mean()


NAN_WEIGHT = "the weight '1.last.weight', before the forward, in float32: 1 nan of 64 numbers"
BAD_BATCH = "what the model (Sequential) was given by the loop, in float32: 1 inf and 1 nan of 32 numbers"
BETWEEN = "what '1.last' (Linear) was given in the forward of '1' (Block), in float32"
ROOT = "the gradient of the output of '1.first' (Linear), made by the backward of what follows it"
FAULTS = {  # model, config, how it is run, kind and name of the fault, words
    "a weight": (net(), RAISE, {"before": spoil}, ("weight", "1.last.weight"), NAN_WEIGHT),
    "the batch": (net(), TORCH, {"x": bad_batch()}, ("input", ""), BAD_BATCH),
    "an activation, naive": (net(Times(1e4), Times(1e4)), NAIVE, {}, ("output", "1.inner.1"), "advice: use bf16"),
    "between modules": (net(between=lambda x: x / 0), RAISE, {}, ("input", "1.last"), BETWEEN),
    "a backward, naive": (net(Root()), NAIVE, {}, ("gradient", "1.first"), ROOT),
    "the loss": (net(), RAISE, {"criterion": log_of_0}, ("loss", "the criterion"), "in float32: 1 inf of 1 numbers"),
    "compiled": (net(Times(INF)), COMPILED, {}, ("output", "1.inner.0"), "the output of '1.inner.0' (Times)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_where_it_began(name):
    model, config, options, expected, words = FAULTS[name]
    error = fail(model, config, **options)
    assert words in str(error)
    assert (error.diagnosis.fault.kind, error.diagnosis.fault.name) == expected


def test_the_course_of_the_scale_and_how_to_watch():
    config = {"fp16": {"mode": "torch", "init_scale": 16.0}, "max_consecutive_skips": 4}
    error = fail(net(Times(INF)), config, batches=4)
    assert error.diagnosis.scales == ((16.0, 1), (8.0, 1), (4.0, 1), (2.0, 1))
    assert str(error).startswith("4 updates in a row had inf or nan in their gradients (max_consecutive_skips=4)")
    assert "3 of the 3 updates before this one were skipped" in str(error)
    assert "loss scale: 16 -> 8 -> 4 -> 2\n" in str(error)
    error = fail(net(Times(INF)), {"on_nonfinite": "raise"})
    assert str(error).startswith("gradients hold inf or nan; the first parameter with a non-finite gradient is '")
    assert "set debug='nonfinite' in the config" in str(error)
    assert (error.diagnosis.fault, error.diagnosis.was_watched) == (None, False)


def test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit():
    model, (x, y) = net(switch := Times(1.0)), make_data(4)
    config = {"fp16": {"mode": "torch"}, "max_consecutive_skips": 6}
    engine = halfmesh.initialize(model, sgd_of(model), cross_entropy, config=config, device="cpu")

    def step(factor):
        switch.factor = factor
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        return bool(switch._forward_hooks)

    watched = [step(factor) for factor in (1.0, INF, INF, INF, INF, 1.0, 1.0, INF, INF, INF, INF, INF)]
    assert watched == [False, False, False, True, True, False, False, False, False, True, True, True]
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        step(INF)
    assert caught.value.diagnosis.fault.name == "1.inner.0"
    engine.close()
    assert not any(module._forward_hooks for module in engine.model.modules())


# -- over ranks ------------------------------------------------------------------------------------------------------


def told(*args, **options):
    """The fault, and the words, which are the same on all ranks."""
    diagnosis = fail(*args, **options).diagnosis
    fault = diagnosis.fault
    return (fault.kind, fault.name, fault.ranks), str(diagnosis)


def faults_on_ranks(rank, world_size):
    """In a layer or a part of a weight of data rank 1; and in stages of a pipeline."""
    data = {**NAIVE, "parallel": {"data": "fsdp"}}
    stages = {**RAISE, "parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}}

    def spoil(model):
        if rank == 1:
            model[1].last.weight.to_local()[-1, -1] = float("nan")

    return {
        "forward": told(net(Times(INF if rank else 1.0)), data),
        "backward": told(net(Root() if rank else Times(1.0)), data),
        "weight": told(net(), data, before=spoil),
        "first stage": told(net(Times(INF)), stages),
        "last stage": told(net().append(Times(INF)), stages),
    }


@pytest.mark.distributed
@pytest.mark.sends
def test_the_fault_of_one_rank_is_told_by_all_with_its_rank():
    found, other = run_ranks(faults_on_ranks, 2, timeout=120)
    assert found == other
    assert ", on rank 1" in found["forward"][1]
    assert {name: fault for name, (fault, _) in found.items()} == {
        "forward": ("output", "1.inner.0", (1,)),
        "backward": ("gradient", "1.first", (1,)),
        "weight": ("weight", "1.last.weight", (1,)),
        "first stage": ("output", "1.inner.0", (0,)),
        "last stage": ("output", "3", (1,)),
    }
