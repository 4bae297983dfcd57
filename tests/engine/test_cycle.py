"""Accumulation cycles: equal to the big batch, left early, broken by errors."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn, optim

from halfmesh.errors import InputError, NonFiniteError
from tests.support.models import (
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    adamw,
    difference,
    full_weights,
    make_data,
    make_engine,
    make_loader,
    reference,
    step_on,
    summed_loss,
    train,
)

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
    wrong = [((lambda: X,), {}), ((), {"closure": lambda: X}), ((True,), {})]
    words = [
        r"engine.step\(<function .*\): it takes no closure",
        "takes no closure",
        r"name the .*: engine.step\(last=True\)",
    ]
    for closed in (False, False, False, True):
        engine.backward(engine.criterion(engine(X), Y))
        for (args, options), message in zip(wrong, words, strict=True):
            with pytest.raises(InputError, match=message):
                engine.step(*args, **options)
        assert (engine.step(None) is not None) == closed


def test_gradients_older_than_the_engine_do_not_count():
    model = MLP()
    nn.functional.cross_entropy(model(X), Y).backward()
    engine = make_engine(FP16_TORCH, model=model)
    step_on(engine, X, Y)
    assert difference(full_weights(engine), reference([(X, Y)])) < 2e-4


def test_two_backwards_through_one_graph_add_up():
    engine = make_engine()
    loss = engine.criterion(engine(X), Y)
    engine.backward(loss * 0.25, retain_graph=True)
    engine.backward(loss * 0.75)
    engine.step()
    assert difference(full_weights(engine), reference([(X, Y)])) < 1e-5


def test_weighted_losses_that_were_discarded_or_weigh_nothing_do_not_count():
    engine = make_engine({"loss_reduction": "weighted"}, criterion=summed_loss)
    engine.backward(engine.criterion(engine(X), Y))
    engine.zero_grad()
    step_on(engine, X, Y)
    assert difference(full_weights(engine), reference([(X, Y)])) < 1e-5
    engine = make_engine({"loss_reduction": "weighted"}, criterion=lambda o, t: (o.sum() * 0, 0))
    before = full_weights(engine)
    step_on(engine, X, Y)
    torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)


@pytest.mark.parametrize("at_once", [True, False])
def test_a_cycle_can_be_closed_early(at_once):
    """With its last batch, or when the loop has been left."""
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


def test_evaluation_over_the_training_loader_inside_an_epoch():
    engine = make_engine(
        {"gradient_accumulation": 3, "lr_interval": "epoch"},
        loader=make_loader(32, 4),
        lr_scheduler=lambda o: optim.lr_scheduler.StepLR(o, 1),
    )
    closed = []
    for i, (x, y) in enumerate(engine.dataloader):
        engine.backward(engine.criterion(engine(x), y))
        if i in (2, 7):
            with torch.no_grad():
                for a, _ in engine.dataloader:
                    engine(a)
        closed.append(engine.step() is not None)
    assert [i for i, done in enumerate(closed) if done] == [2, 5, 7]
    assert engine.lr_scheduler.last_epoch == 1


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


@pytest.mark.parametrize("mode", ["none", "torch_fp16", "naive_fp16"])
def test_close_within_a_cycle_leaves_nothing_behind(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2}, optimizer=adamw)
    step_on(engine, X, Y)
    engine.close()
    group = engine.optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (None, None)
    assert all(p.grad is None for p in engine.model.parameters())
    before = copy.deepcopy(engine.model.state_dict())
    engine.optimizer.step()
    torch.testing.assert_close(engine.model.state_dict(), before, rtol=0, atol=0)


def _every_fourth(step, number):
    if (number + 1) % 4 == 0:
        step()


def _the_first_of_four(step, number):
    if number % 4 == 0:
        step()


def _ends_every_fourth(step, number):
    if (number + 1) % 4 == 0:
        step(last=True)


def _each(step, number):
    step(last=(number + 1) % 4 == 0)


@pytest.mark.parametrize("own_loader", [False, True])
@pytest.mark.parametrize(
    ("stepping", "accumulation", "tells"),
    [
        (_every_fourth, 4, 7),
        (_the_first_of_four, 4, 8),
        (_ends_every_fourth, 4, 7),
        (_each, 4, math.inf),
        (_every_fourth, 1, math.inf),
    ],
)
def test_a_loop_that_counts_its_batches_itself_is_told_once(stepping, accumulation, tells, own_loader, caplog):
    """`if (i + 1) % 4 == 0: engine.step()`, as in most scripts, beside gradient_accumulation=4."""
    engine = make_engine({"gradient_accumulation": accumulation}, loader=make_loader(64, 4))
    batches = [(x.clone(), y) for x, y in make_loader(64, 4)] if own_loader else engine.dataloader
    for number, (x, y) in enumerate(batches):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        stepping(engine.step, number)
        told = caplog.text.count("engine.step() once per 4 batches")
        assert told == (number >= tells), "at the second step after so many"
    assert ("Delete the `if`" in caplog.text) == ("gradient_accumulation=1" in caplog.text) == (tells < math.inf)


@pytest.mark.parametrize("own_loader", [False, True])
def test_several_forwards_or_losses_of_a_batch_are_no_batches(own_loader, caplog):
    """Two views and one loss; a batch with two losses; one in chunks; a batch that is passed over; a leftover."""
    engine = make_engine({"gradient_accumulation": 2}, loader=make_loader(56, 8))
    for number, (x, y) in enumerate(list(make_loader(56, 8)) if own_loader else engine.dataloader):
        if number < 2:
            engine.backward((engine(x) - engine(-x)).square().mean())
        elif number < 4 and not own_loader:
            for half in HALVES:
                engine.backward(engine.criterion(engine(x[half]), y[half]))
        elif number < 5:
            output = engine(x)
            engine.backward(output.square().mean(), retain_graph=True)
            engine.backward(engine.criterion(output, y))
        elif number < 6:
            continue
        else:
            engine.backward(engine.criterion(engine(x), y))
        engine.step(last=number == 6)
    assert "came after" not in caplog.text
