"""What NonFiniteError says of the first inf or nan: the module, weight, batch or loss it began with, and the rank."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.models import make_data
from tests.support.ranks import here, rank_device, run_ranks

RAISE = {"on_nonfinite": "raise", "debug": "nonfinite"}
TORCH = {"fp16": {"mode": "torch", "init_scale": 16.0}, **RAISE}
NAIVE = {"fp16": {"mode": "naive", "initial_scale": 16.0}, **RAISE}
AGAIN = {"activation_checkpoint": {"patterns": ["1"]}, **RAISE}
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


def fail(model, config, *, x=None, y=None, criterion=cross_entropy, loss=None, before=None, batches=1):
    """The error of a run whose batches are all the same."""
    engine = halfmesh.initialize(model, sgd_of(model), criterion, config=config, device=rank_device())
    samples, labels = make_data(4)
    x, y = here((samples if x is None else x, labels if y is None else y))
    if before is not None:
        with torch.no_grad():
            before(engine.model)
    error = None
    for _ in range(batches):
        engine.zero_grad()
        output = engine(x)
        engine.backward(engine.criterion(output, y) if loss is None else loss(engine, output))
        try:
            engine.step()
        except halfmesh.NonFiniteError as raised:
            error = raised
    engine.close()
    assert error is not None
    assert str(error.diagnosis) in str(error)
    return error


def weight_to(value):
    def spoil(model):
        model[1].last.weight[2, 3] = value

    return spoil


def bad_batch():
    x, _ = make_data(4)
    x[1, 2], x[1, 3] = INF, float("nan")
    return x


def log_of_0(output, y):
    return (output.softmax(-1) * 0).log().mean()


def total(engine, output):
    return output.sum()


def log_of_total(engine, output):
    return (output * 0).sum().log()


NAN_WEIGHT = "the weight '1.last.weight', before the forward, in float32: 1 nan of 64 numbers"
BAD_BATCH = "what the model (Sequential) was given by the loop, in float32: 1 inf and 1 nan of 32 numbers"
CAST = "what the model (Sequential) was given by the loop, in float16: 32 inf of 32 numbers; float16 ends at 65504"
BETWEEN = "what '1.last' (Linear) was given, made by operations in the forward of '1' (Block), in float32"
ROOT = "the gradient of the output of '1.first' (Linear), made by the backward of what follows it"
FAULTS = {  # model, config, how it is run, kind and name of the fault, words
    "a weight": (net(), RAISE, {"before": weight_to(float("nan"))}, ("weight", "1.last.weight"), NAN_WEIGHT),
    "a master fp16 has not": (net(), NAIVE, {"before": weight_to(1e6)}, ("weight", "1.last.weight"), "1 inf of 64"),
    "the batch": (net(), TORCH, {"x": bad_batch()}, ("input", ""), BAD_BATCH),
    "a batch fp16 has not": (net(), NAIVE, {"x": torch.full((4, 8), 1e6)}, ("input", ""), CAST),
    "an activation, torch": (net(Times(1e4), Times(1e4)), TORCH, {}, ("output", "1.inner.1"), "float16 ends at 65504"),
    "an activation, naive": (net(Times(1e4), Times(1e4)), NAIVE, {}, ("output", "1.inner.1"), "advice: use bf16"),
    "between modules": (net(between=lambda x: x / 0), RAISE, {}, ("input", "1.last"), BETWEEN),
    "a backward, naive": (net(Root()), NAIVE, {}, ("gradient", "1.first"), ROOT),
    "computed again": (net(Root()), AGAIN, {}, ("gradient", "1.first"), ROOT),
    "the loss": (net(), RAISE, {"criterion": log_of_0}, ("loss", "the criterion"), "in float32: 1 inf of 1 numbers"),
    "a loss of the loop's own": (net(Root()), RAISE, {"criterion": None, "loss": total}, ("gradient", "1.first"), ROOT),
    "its value": (net(), RAISE, {"criterion": None, "loss": log_of_total}, ("loss", ""), "update: the loss, in"),
    "compiled": (net(Times(INF)), COMPILED, {}, ("output", "1.inner.0"), "the output of '1.inner.0' (Times)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_where_it_began(name):
    model, config, options, expected, words = FAULTS[name]
    error = fail(model, config, **options)
    fault = error.diagnosis.fault
    assert words in str(error)
    assert (None if fault is None else (fault.kind, fault.name)) == expected


def test_the_course_of_the_scale_and_how_to_watch():
    config = {"fp16": {"mode": "torch", "init_scale": 16.0}, "max_consecutive_skips": 4}
    error = fail(net(Times(INF)), config, batches=4)
    assert error.diagnosis.scales == ((16.0, 1), (8.0, 1), (4.0, 1), (2.0, 1))
    assert str(error).startswith("4 updates in a row had gradients with inf or nan (max_consecutive_skips=4)")
    assert "3 of the 3 updates before this one were skipped" in str(error)
    assert "loss scale: 16 -> 8 -> 4 -> 2\n" in str(error)
    error = fail(net(Times(INF)), {"on_nonfinite": "raise"})
    assert str(error).startswith("gradients hold inf or nan; the first parameter with a non-finite gradient is '")
    assert "set debug='nonfinite' in the config" in str(error)
    assert (error.diagnosis.fault, error.diagnosis.was_watched) == (None, False)


def watched_engine(config):
    """And the module in it that goes wrong while its factor is inf; `step(factor)` trains a batch."""
    model = net(switch := Times(1.0))
    engine = halfmesh.initialize(model, sgd_of(model), cross_entropy, config=config, device="cpu")
    x, y = make_data(4)

    def step(factor):
        switch.factor = factor
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
        return bool(switch._forward_hooks)

    return engine, step


def test_modules_are_watched_only_while_a_run_of_skips_nears_its_limit():
    engine, step = watched_engine({"fp16": {"mode": "torch"}, "max_consecutive_skips": 6})
    watched = [step(factor) for factor in (1.0, INF, INF, INF, INF, 1.0, 1.0, INF, INF, INF, INF, INF)]
    assert watched == [False, False, False, True, True, False, False, False, False, True, True, True]
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        step(INF)
    assert caught.value.diagnosis.fault.name == "1.inner.0"
    engine.close()
    assert not any(module._forward_hooks for module in engine.model.modules())


def test_the_first_microbatch_of_a_cycle_is_told():
    _, step = watched_engine({**RAISE, "gradient_accumulation": 2})
    step(INF)
    with pytest.raises(halfmesh.NonFiniteError) as caught:
        step(1.0)
    assert caught.value.diagnosis.fault.name == "1.inner.0"


# -- without a loss scale -----------------------------------------------------------------------------------------

UNSCALED = {
    "fp32": {},
    "naive_bf16": {"bf16": {"mode": "naive"}},
    "clipped": {"clip_grad_norm": 1.0},
    "accumulated": {"gradient_accumulation": 2},
}


def run_into_nan(config, first=5, until=60, is_bad=lambda context: True, model=None, x=None):
    """The loss of one batch of update `first` is nan, on the ranks of which `is_bad`. Returns the update that raised,
    its error, and by update what was warned of."""
    model, factor = net() if model is None else model, [1.0]

    def criterion(output, y):
        return cross_entropy(output, y) * factor[0]

    engine = halfmesh.initialize(model, sgd_of(model), criterion, None, config, device=rank_device())
    x, y = here(make_data(4)) if x is None else (x, torch.arange(4))
    told, update = [], 0
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: told.append((update, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    try:
        for update in range(1, until):
            for batch in range(engine.config.gradient_accumulation):
                bad = update == first and batch == 0 and is_bad(engine.context)
                factor[0] = float("nan") if bad else 1.0
                engine.backward(engine.criterion(engine(x), y))
                engine.step()
    except halfmesh.NonFiniteError as error:
        return update, error, [(at, text) for at, text in told if "on_nonfinite='auto'" in text]
    finally:
        logging.getLogger("halfmesh").removeHandler(handler)
        engine.close()
    raise AssertionError("it never ended")


@pytest.mark.promise(
    "inf or nan without a loss scale",
    "told soon, counted from the first, on all ranks",
    of="PyTorch",
    page="health.md",
)
@pytest.mark.parametrize("name", UNSCALED)
def test_the_first_nan_is_told_soon_and_counted(name):
    update, error, told = run_into_nan(UNSCALED[name])
    assert [at for at, _ in told] == [8], "once, at the next look"
    assert told[0][1].startswith("the loss, or the gradient norm, of the last 4 updates is inf or nan, and they were")
    assert update == 54
    assert str(error).startswith("50 updates in a row had gradients with inf or nan (max_consecutive_skips=50)")
    assert error.diagnosis.began == 5
    assert "is inf or nan since update 5, whose weights were kept; what follows is of the last update" in str(error)
    assert "bf16" not in str(error).replace("bfloat16", "")


def test_nan_from_the_first_update_on_ends_the_run_after_50():
    update, error, told = run_into_nan({}, first=1)
    assert (update, [at for at, _ in told], error.diagnosis.began) == (50, [1], 1)
    assert "resume from an older checkpoint" in error.diagnosis.advice


def test_nan_beside_sparse_gradients_ends_the_run():
    """These have no norm."""

    class MeanOfWords(nn.Sequential):
        def forward(self, words):
            return self[1](self[0](words).mean(1))

    model = MeanOfWords(nn.Embedding(4, 8, sparse=True), nn.Linear(8, 4))
    update, error, told = run_into_nan({}, model=model, x=torch.arange(12).view(4, 3) % 4)
    assert (update, [at for at, _ in told], error.diagnosis.began) == (54, [8], 5)


def test_losses_that_are_dropped_do_not_count(caplog):
    model = net()
    engine = halfmesh.initialize(model, sgd_of(model), cross_entropy, None, {})
    x, y = make_data(4)
    for _ in range(12):
        engine.backward(engine.criterion(engine(x), y) * float("nan"))
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    assert "on_nonfinite='auto'" not in caplog.text


def test_fp16_without_a_scale_is_advised_to_use_bf16():
    _, error, _ = run_into_nan({"fp16": {"mode": "apex", "opt_level": "O3"}})
    assert "or use bf16. on_nonfinite='raise'" in str(error)


LAYOUTS = {
    "dp": {"parallel": {"data": "replicate"}},
    "zero1": {"parallel": {"data": "zero1"}, "bf16": {"mode": "naive"}},
    "pipeline": {"parallel": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}},
}


def nan_on_ranks(rank, world_size):
    """The nan is on the last data rank."""

    def is_last(context):
        return context.dp_rank == context.dp_size - 1

    found = {}
    for name, config in LAYOUTS.items():
        update, error, told = run_into_nan(config, is_bad=is_last)
        told = [(at, text.partition(" of the last ")[2][:2].strip()) for at, text in told]
        found[name] = (update, error.diagnosis.began), told
    return found


@pytest.mark.promise("inf or nan without a loss scale")
@pytest.mark.distributed
@pytest.mark.sends
def test_nan_on_one_rank_ends_all_together():
    for rank, found in enumerate(run_ranks(nan_on_ranks, 2)):
        for name, (ended, told) in found.items():
            assert ended == (54, 5), name
            if rank == 1:
                assert told == [(8, "4")], name
            else:
                assert told == ([(50, "46")] if name == "pipeline" else [(8, "3")]), name


# -- over ranks ------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Goes wrong with samples whose last feature is 1, in forward or in backward, as `what` says."""

    def __init__(self, what=""):
        super().__init__()
        self.inner, self.what = nn.Linear(7, 7), what

    def forward(self, x):
        x, mark = x[:, :7], x[:, 7:]
        fine = (mark != 1).to(x.dtype)
        x = self.inner(x)
        if self.what == "forward":
            x = x / fine
        elif self.what == "backward":
            x = x + (x * 0 + fine).sqrt()
        return torch.cat([x, mark], 1)


def row(early="", late=""):
    torch.manual_seed(0)
    return nn.Sequential(Odd(), Odd(early), Odd(), Odd(late))


def batch(*odd):
    x, y = make_data(4)
    x[:, 7] = 0
    x[list(odd), 7] = 1
    return {"x": x, "y": y, "criterion": lambda output, y: cross_entropy(output[:, :4], y)}


def told(*args, **options):
    """The fault, and the words, which are the same on all ranks."""
    diagnosis = fail(*args, **options).diagnosis
    fault = diagnosis.fault
    return (fault.kind, fault.name, fault.ranks), str(diagnosis)


def faults_on_ranks(rank, world_size):
    """Of a batch or a part of a weight of data rank 1; and in stages of a pipeline, in the second microbatch only."""
    data = {**NAIVE, "parallel": {"data": "fsdp"}}
    stages = {**RAISE, "parallel": LAYOUTS["pipeline"]["parallel"]}
    odd, bad = batch(*([2] if rank else [])), batch()
    bad["x"][0, 0] = INF if rank else 0.0

    def spoil(model):
        if rank == 1:
            model[2].inner.weight.to_local()[-1, -1] = float("nan")

    return {
        "forward": told(row(late="forward"), data, **odd),
        "backward": told(row(late="backward"), data, **odd),
        "input": told(row(), data, **bad),
        "weight": told(row(), data, **batch(), before=spoil),
        "first stage": told(row(early="forward"), stages, **batch(2)),
        "last stage": told(row(late="forward"), stages, **batch(2)),
    }


@pytest.mark.distributed
@pytest.mark.sends
def test_the_fault_of_one_rank_is_told_by_all_with_its_rank():
    """Of a data rank, or of a stage."""
    found, other = run_ranks(faults_on_ranks, 2, timeout=120)
    assert found == other
    assert ", on rank 1" in found["forward"][1]
    faults = {name: fault for name, (fault, _) in found.items()}
    assert faults.pop("backward")[::2] == ("gradient", (1,))
    assert faults == {
        "forward": ("output", "3", (1,)),
        "input": ("input", "", (1,)),
        "weight": ("weight", "2.inner.weight", (1,)),
        "first stage": ("output", "1", (0,)),
        "last stage": ("output", "3", (1,)),
    }
