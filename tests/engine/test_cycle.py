"""Accumulation cycles: equal to the big batch, left early, broken by errors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import NonFiniteError
from tests.support.models import (
    MLP,
    MODES,
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    said,
    step_on,
    train,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)
HALVES = (slice(0, 4), slice(4, 8))


@pytest.mark.promise(
    "accumulation, and its rest at the end of an epoch",
    "the rest is divided by its own length",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.promise("accumulation as a size, clipping, user constants")
@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_accumulation_equals_the_big_batch(mode):
    """7 batches of 4 in cycles of 3: the last cycle has a single one, and counts as a batch of its own."""
    config = MODES[mode] | {"gradient_accumulation": 3, "clip_grad_norm": 0.5}
    engine = make_engine(config, loader=make_loader(28, 4))
    results = train(engine, epochs=2)
    assert [r is not None for r in results] == [False, False, True, False, False, True, True] * 2
    x, y = make_data(28)
    big = list(zip(x.split(12), y.split(12), strict=True))
    assert [len(b) for b, _ in big] == [12, 12, 4]
    assert difference(full_weights(engine), reference(big * 2, max_norm=0.5)) < TOLERANCES[mode]


def test_the_last_cycle_of_a_loop_that_fetches_before_the_step():
    """That a batch is the last one holds for its own microbatch, not for the one that is under way."""
    x, y = make_data(20)
    engine = make_engine({"gradient_accumulation": 2}, loader=make_loader(20, 4))
    waiting, closed = iter(engine.dataloader), []
    batch = next(waiting)
    for number in range(5):
        engine.backward(engine.criterion(engine(batch[0]), batch[1]))
        batch = next(waiting) if number < 4 else None
        closed.append(engine.step() is not None)
    assert closed == [False, True, False, True, True]
    assert difference(full_weights(engine), reference(list(zip(x.split(8), y.split(8), strict=True)))) < 1e-5
    assert step_on(engine, x, y) is None, "the end of the loader is over"


def test_a_closure_ends_no_cycle():
    engine = make_engine({"gradient_accumulation": 4})
    engine.backward(engine.criterion(engine(X), Y))
    assert "it takes no closure" in said(engine.step, lambda: X)
    assert "name the argument: engine.step(last=True)" in said(engine.step, True)
    assert engine.step(None) is None


@pytest.mark.parametrize("at_once", [True, False])
def test_a_cycle_can_be_closed_early_or_when_the_loop_has_been_left(at_once):
    engine = make_engine({"gradient_accumulation": 4}, loader=make_loader(16, 4))
    for i, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        result = engine.step(last=at_once and i == 1)
        if i == 1:
            break
    result = result if at_once else engine.step(last=True)
    assert result is not None
    x, y = make_data(16)
    assert difference(full_weights(engine), reference([(x[:8], y[:8])])) < 1e-5
    assert [r is not None for r in train(engine)] == [False, False, False, True]


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("out of memory")


def _fails_in_backward(engine):
    broken = engine.model.last(Fails.apply(engine.model.norm(engine.model.first(X)))).sum()
    with pytest.raises(MemoryError):
        engine.backward(broken)


def _fails_in_step(engine):
    engine.backward(engine.criterion(engine(X), Y) * math.nan)
    with pytest.raises(NonFiniteError):
        engine.step()
    torch.testing.assert_close(full_weights(engine), dict(MLP().state_dict()), rtol=0, atol=0)


def _loads(engine):
    engine.load_state_dict(make_engine({"gradient_accumulation": 2}).state_dict())


@pytest.mark.parametrize("breaks", [_fails_in_backward, _fails_in_step, _loads])
def test_a_cycle_that_was_broken_leaves_nothing_to_the_next(breaks):
    engine = make_engine({"on_nonfinite": "raise", "gradient_accumulation": 2})
    step_on(engine, X, Y)
    breaks(engine)
    for half in HALVES:
        engine.zero_grad()
        result = step_on(engine, X[half], Y[half])
    assert result is not None
    assert difference(full_weights(engine), reference([(X, Y)])) < 1e-5


@pytest.mark.parametrize(
    ("steps", "accumulation", "tells", "own_loader"),
    [
        (lambda step, number: step() if number % 4 == 3 else None, 4, 7, False),
        (lambda step, number: step() if number % 4 == 0 else None, 4, 8, True),
        (lambda step, number: step(last=True) if number % 4 == 3 else None, 4, 7, True),
        (lambda step, number: step(last=number % 4 == 3), 4, math.inf, False),
        (lambda step, number: step() if number % 4 == 3 else None, 1, math.inf, False),
    ],
    ids=["every fourth", "the first of four", "ends every fourth", "each", "not accumulated"],
)
def test_a_loop_that_counts_its_batches_itself_is_told_once(steps, accumulation, tells, own_loader, caplog):
    """`if (i + 1) % 4 == 0: engine.step()`, as in most scripts, beside gradient_accumulation=4."""
    engine = make_engine({"gradient_accumulation": accumulation}, loader=make_loader(64, 4))
    for number, (x, y) in enumerate(list(make_loader(64, 4)) if own_loader else engine.dataloader):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        steps(engine.step, number)
        told = caplog.text.count("engine.step() once per 4 batches")
        assert told == (number >= tells), "at the second step after so many"


@pytest.mark.parametrize("own_loader", [False, True])
def test_two_losses_of_a_batch_are_no_batches(own_loader, caplog):
    engine = make_engine({"gradient_accumulation": 2}, loader=make_loader(32, 4))
    for x, y in list(make_loader(32, 4)) if own_loader else engine.dataloader:
        output = engine(x)
        engine.backward(output.square().mean(), retain_graph=True)
        engine.backward(engine.criterion(output, y))
        engine.step()
    assert "once per" not in caplog.text


TWO_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2, "max_loss_scale": 256.0}}
O2_LOSSES = {"fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2, "max_loss_scale": 256.0}}
ONES = torch.ones(4)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return ((self.first + self.second) * x).sum()


def pair_engine(config):
    """The optimizer holds `first`; a gradient of 1 moves it by 0.25."""
    model = Pair()
    return make_engine(config, model=model, optimizer=lambda _: optim.SGD([model.first], lr=0.25), criterion=None)


@pytest.mark.parametrize("config", [MODES["none"], MODES["naive_fp16"], TWO_LOSSES, O2_LOSSES], ids=str)
def test_parameters_are_added_or_exchanged_between_updates_only(config):
    """And what backward left in one before it was added does not count."""
    engine, exchanged = pair_engine(config), pair_engine(config)
    engine.backward(engine(ONES))
    engine.step()
    engine.backward(engine(ONES))
    engine.optimizer.add_param_group({"params": [engine.model.second]})
    exchanged.backward(exchanged(ONES))
    exchanged.optimizer.param_groups[0]["params"][0] = exchanged.model.second  # which looks the same
    for each in (engine, exchanged):
        assert "parameters were added to the optimizer, or replaced, between backward and" in said(each.step)
    engine.backward(engine(ONES))  # a new update
    engine.step()
    assert engine.state_dict()["model"]["second"].tolist() == [-0.25] * 4


def one_sided(rank, world_size):
    """Loss 1 is used on rank 0 alone, and overflows in the second update."""
    engine, x, scales = pair_engine(O2_LOSSES), here(ONES), []
    for update in range(3):
        engine.backward(engine(x), loss_id=0)
        if rank == 0:
            engine.backward(engine(x) * (math.inf if update == 1 else 1.0), loss_id=1)
        scales.append((engine.step().skipped, engine.loss_scales))
    return scales, engine.state_dict()["update"]["scalers"], engine.state_dict()["model"]["first"].tolist()


@pytest.mark.distributed
def test_a_loss_that_one_rank_uses_moves_the_scale_on_all():
    first, second = run_ranks(one_sided, 2)
    assert first == second
    assert first[0] == [(False, (256.0, 256.0)), (True, (256.0, 128.0)), (False, (256.0, 128.0))]
    assert first[2] == [-0.75] * 4  # two updates of 0.25 * (1 + 1 / 2)
