"""What NonFiniteError says of the first inf or nan: the module, weight, batch or loss it began with, the rank, and when
it is told in training without a loss scale."""

import logging

import pytest
import torch
from torch import nn

from halfmesh import NonFiniteError
from tests.support.models import make_data, make_engine
from tests.support.ranks import here, run_ranks

RAISE = {"on_nonfinite": "raise", "debug": "nonfinite"}
TORCH = {"fp16": {"mode": "torch", "init_scale": 16.0}, **RAISE}
NAIVE = {"fp16": {"mode": "naive", "initial_scale": 16.0}, **RAISE}
STAGES = {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}}
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

    def __init__(self, *inner, between=lambda x: x):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), nn.Sequential(*inner), nn.Linear(8, 8)
        self.between = between

    def forward(self, x):
        return self.last(self.between(self.inner(self.first(x))))


def net(*inner, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(*inner, **options), nn.Linear(8, 4))


def cross_entropy(output, y):
    return nn.functional.cross_entropy(output.float(), y)


def step(engine, x, y):
    engine.backward(engine.criterion(engine(x), y))
    return engine.step()


def fail(model, config, *, x=None, criterion=cross_entropy, before=None, batches=1):
    """The error of a run whose batches are all the same."""
    engine = make_engine(config, model=model, criterion=criterion)
    samples, labels = make_data(4)
    if before is not None:
        with torch.no_grad():
            before(engine.model)
    with engine:
        for _ in range(batches - 1):
            step(engine, *here((samples, labels)))
        with pytest.raises(NonFiniteError) as caught:
            step(engine, *here((samples if x is None else x, labels)))
    assert str(caught.value.diagnosis) in str(caught.value)
    return caught.value


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
COMPILED = {"compile": {"backend": "aot_eager"}, **RAISE}
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
    config = {"fp16": {"mode": "torch"}, "max_consecutive_skips": 6}
    engine = make_engine(config, model=net(switch := Times(1.0)), criterion=cross_entropy)
    watched, batch = [], here(make_data(4))
    for factor in (1.0, INF, INF, INF, INF, 1.0, 1.0, INF, INF, INF, INF, INF):
        switch.factor = factor
        step(engine, *batch)
        watched.append(bool(switch._forward_hooks))
    assert watched == [False, False, False, True, True, False, False, False, False, True, True, True]
    with pytest.raises(NonFiniteError) as caught:
        step(engine, *batch)
    assert caught.value.diagnosis.fault.name == "1.inner.0"
    engine.close()
    assert not any(module._forward_hooks for module in engine.model.modules())


def told(*args, **options):
    """The fault, and the words, which are the same on all ranks."""
    diagnosis = fail(*args, **options).diagnosis
    fault = diagnosis.fault
    return (fault.kind, fault.name, fault.ranks), str(diagnosis)


def faults_on_ranks(rank, world_size):
    """In a layer or a part of a weight of data rank 1; and in stages of a pipeline."""
    data, stages = {**NAIVE, "parallel": {"data": "fsdp"}}, {**RAISE, **STAGES}

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


def run_into_nan(config, first=5, is_bad=lambda context: True):
    """The loss of one batch of update `first` is nan, on the ranks of which `is_bad`. Returns the update that raised,
    its error, and by update what was warned of."""
    factor, told, update = [1.0], [], 0
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append((update, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    engine = make_engine(config, model=net(), criterion=lambda output, y: cross_entropy(output, y) * factor[0])
    try:
        with engine:
            for update in range(1, 60):
                for batch in range(engine.config.gradient_accumulation):
                    factor[0] = float("nan") if update == first and batch == 0 and is_bad(engine.context) else 1.0
                    step(engine, *here(make_data(4)))
    except NonFiniteError as error:
        return update, error, [(at, text) for at, text in told if "on_nonfinite='auto'" in text]
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)
    raise AssertionError("it never ended")


@pytest.mark.promise("monitoring the loss scale, inf and nan")
@pytest.mark.parametrize(
    "config", [{}, {"bf16": {"mode": "naive"}}, {"clip_grad_norm": 1.0}, {"gradient_accumulation": 2}], ids=str
)
def test_the_first_nan_is_told_soon_and_counted(config):
    update, error, told = run_into_nan(config)
    assert [at for at, _ in told] == [8], "once, at the next look"
    assert told[0][1].startswith("the loss or the gradient norm was inf or nan in 4 consecutive updates, which were")
    assert update == 54
    assert str(error).startswith("50 updates in a row had inf or nan in their gradients (max_consecutive_skips=50)")
    assert error.diagnosis.began == 5
    assert "has been inf or nan since update 5, not skipped" in str(error)
    assert "bf16" not in str(error).replace("bfloat16", "")


def test_nan_from_the_first_update_on():
    update, error, told = run_into_nan({}, first=1)
    assert (update, [at for at, _ in told], error.diagnosis.began) == (50, [1], 1)
    assert "resume from an older checkpoint" in error.diagnosis.advice


UNSCALED = [{"parallel": {"data": "replicate"}}, {"parallel": {"data": "zero1"}, "bf16": {"mode": "naive"}}, STAGES]


def nan_on_ranks(rank, world_size):
    """On the last data rank."""
    found = []
    for config in UNSCALED:
        update, error, told = run_into_nan(config, is_bad=lambda context: context.dp_rank == context.dp_size - 1)
        told = [(at, text.partition(" or nan in ")[2][:2].strip()) for at, text in told]
        found.append((update, error.diagnosis.began, told))
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_nan_on_one_rank_ends_all_together():
    """The first stage has no loss, and hears of it late."""
    first, second = run_ranks(nan_on_ranks, 2)
    assert first == [(54, 5, [(8, "3")]), (54, 5, [(8, "3")]), (54, 5, [(50, "46")])]
    assert second == [(54, 5, [(8, "4")])] * 3
