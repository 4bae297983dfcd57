"""A list of optimizers over disjoint parameters is one update, in every precision; one over another is one, too."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import lr_scheduler as lr

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import BF16_NAIVE, FP16_NAIVE, FP16_TORCH, MLP, difference, full_weights, make_data, step_on
from tests.support.models import make_engine as make_any
from tests.support.optimizers import lookahead, muon_and_adamw, sgd_and_adamw
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
UPDATES = 3
MODES = {"none": ({}, 1e-5), "fp16": (FP16_TORCH, 1e-2), "masters": (FP16_NAIVE, 1e-2), "bf16": (BF16_NAIVE, 5e-2)}


def halving(optimizer: optim.Optimizer) -> Any:
    return lr.StepLR(optimizer, 1, gamma=0.5)


def start(optimizers: Any = sgd_and_adamw, config: Any = None, **options: Any) -> Any:
    return make_any({"clip_grad_norm": 0.5, **(config or {})}, optimizer=optimizers, **options)


def train(engine: Any, updates: Any = range(UPDATES)) -> list[float]:
    """Returns the norm of each update."""
    size, norms = len(X) // engine.context.dp_size, []
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for update in updates:
        engine.zero_grad()
        norms.append(float(step_on(engine, X.roll(update, 0)[own], Y.roll(update, 0)[own]).grad_norm))
    return norms


def by_hand(make: Any) -> tuple[nn.Module, list[float]]:
    """The loop that people write: clipped over all, each with a scheduler."""
    model, norms = MLP(), []
    optimizers = make(model.parameters())
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    schedulers = list(map(halving, optimizers))
    for update in range(UPDATES):
        model.zero_grad()
        nn.functional.cross_entropy(model(X.roll(update, 0)), Y.roll(update, 0)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        for each in (*optimizers, *schedulers):
            each.step()
    return model, norms


# -- one update ------------------------------------------------------------------------------------------------------


@pytest.mark.promise("several models (GANs), several optimizers")
@pytest.mark.parametrize(
    ("make", "mode"), [*((sgd_and_adamw, mode) for mode in MODES), (muon_and_adamw, "none"), (muon_and_adamw, "bf16")]
)
def test_two_optimizers_train_as_in_a_plain_loop(make, mode):
    config, tolerance = MODES[mode]
    engine = start(make, config, lr_scheduler=halving)
    norms = train(engine)
    expected, plain_norms = by_hand(make)
    assert norms == pytest.approx(plain_norms, rel=tolerance)
    assert difference(full_weights(engine), expected) <= tolerance
    first, second = engine.optimizer.parts
    _ = engine.lr_scheduler  # settles
    rates = [first.param_groups[0]["lr"], second.param_groups[0]["lr"]]
    assert rates == pytest.approx([(0.02 if make is muon_and_adamw else 0.05) / 8, 0.01 / 8])
    engine.close()
    before = [p.clone() for p in engine.model.parameters()]
    first.step()  # belongs to the user again
    assert all(map(torch.equal, before, engine.model.parameters()))


def test_each_is_stepped_in_its_own_implementation_and_the_plan_says_which():
    engine = start(muon_and_adamw)
    muon, adamw = engine.optimizer.parts
    assert "Muon (not fused) and AdamW (fused automatically), clip norm 0.5" in str(engine.plan)
    train(engine)
    state = [value for values in engine.optimizer.state.values() for value in values.values()]
    held = sum(value.numel() * value.element_size() for value in state if value.dim())
    assert engine.plan.values["bytes"]["optimizer"] == held
    assert adamw.param_groups[0]["fused"] is True
    assert "fused" not in muon.param_groups[0]
    engine.close()
    assert adamw.param_groups[0]["fused"] is None
    fused = "(fused automatically, no host read)"
    assert f"SGD {fused} and AdamW {fused}" in str(start(config=FP16_NAIVE).plan)


def test_an_overflow_skips_both_and_moves_neither_scheduler():
    engine = start(config={"fp16": {**FP16_NAIVE["fp16"], "hysteresis": 1}}, lr_scheduler=halving)
    train(engine)
    before = full_weights(engine)
    assert step_on(engine, X * float("inf"), Y).skipped
    torch.testing.assert_close(full_weights(engine), before, rtol=0, atol=0)
    assert engine.loss_scale == 128.0
    assert [s.last_epoch for s in engine.lr_scheduler] == [UPDATES, UPDATES]


def test_the_optimizers_that_were_given_stay_usable():
    model = MLP()
    given = sgd_and_adamw(model.parameters())
    engine = start(given, model=model)
    assert list(engine.optimizer.parts) == given
    assert [id(group) for group in engine.optimizer.param_groups] == [id(one.param_groups[0]) for one in given]
    calls = []
    engine.optimizer.register_step_post_hook(lambda part, *_: calls.append(part))
    train(engine, [0])
    assert calls == given
    assert set(engine.optimizer.state) == {p for one in given for p in one.state}
    for step in (given[1].step, engine.optimizer.step):
        with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
            step()
    with pytest.raises(InputError, match=r"engine.optimizer.parts\[0\].add_param_group"):
        engine.optimizer.add_param_group({"params": []})
    given[1].param_groups[0]["lr"] = 0.0
    norm = model.norm.weight.clone()
    train(engine, [1])
    assert torch.equal(norm, model.norm.weight)
    engine.close()
    assert list(start(engine.optimizer, model=model).optimizer.parts) == given


@pytest.mark.parametrize("config", [{}, BF16_NAIVE])
def test_a_group_added_to_the_first_is_trained_and_leaves_those_of_the_second(config):
    """The second's were made fused, and are given back."""
    model, late = MLP(), "last.weight"
    first, second = sgd_and_adamw(param for name, param in model.named_parameters() if name != late)
    engine = start([first, second], config, model=model)
    assert "1 trainable parameter not in the optimizer" in str(engine.plan)
    assert second.param_groups[0]["fused"] is True
    before = full_weights(engine)[late]
    train(engine, [0])
    assert torch.equal(full_weights(engine)[late], before)
    first.add_param_group({"params": [model.last.weight]})
    train(engine, [1])
    assert not torch.equal(full_weights(engine)[late], before)
    engine.close()
    assert second.param_groups[0]["fused"] is None


def test_convert_to_amp_takes_a_list():
    expected, norms = by_hand(sgd_and_adamw)
    model = here(MLP())
    given = sgd_and_adamw(model.parameters())
    model, optimizer, loss = halfmesh.convert_to_amp(
        model, given, nn.functional.cross_entropy, "apex", {"opt_level": "O0"}
    )
    schedulers = list(map(halving, given))
    for update in range(UPDATES):
        x, y = here((X.roll(update, 0), Y.roll(update, 0)))
        optimizer.backward(loss(model(x), y))
        assert optimizer.clip_grad_norm(0.5).item() == pytest.approx(norms[update], rel=1e-5)
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert difference(model.state_dict(), expected) <= 1e-6


@pytest.mark.parametrize("mode", ["none", "masters"])
def test_an_optimizer_over_another_is_one(mode, tmp_path):
    """In a loop, through a checkpoint, and given back."""
    config, tolerance = MODES[mode]
    expected, norms = by_hand(lookahead)
    engine, again = (start(lookahead, config, lr_scheduler=halving) for _ in range(2))
    assert train(engine, range(UPDATES - 1)) == pytest.approx(norms[:-1], rel=tolerance)
    engine.save(tmp_path)
    again.load(tmp_path)
    for each in (engine, again):
        train(each, [UPDATES - 1])
        assert difference(full_weights(each), expected) <= tolerance
        assert {group["lookahead_step"] for group in each.optimizer.param_groups} == {UPDATES}
        with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine"):
            each.optimizer.step()
        each.close()
        given_back = each.optimizer
        held = {id(param) for group in given_back.param_groups for param in group["params"]}
        assert held == set(map(id, each.model.parameters())) == set(map(id, given_back._base_optimizer.state))


def test_what_cannot_be_joined_is_told():
    model = MLP()
    twice = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([model.norm.weight], lr=0.1)]
    other = [optim.SGD(model.parameters(), lr=0.1), optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1)]
    for optimizers, words in [
        (twice, "several optimizers would step norm.weight; give each parameter to one"),
        (other, r"it holds 1 parameter that the model does not have"),
        ([twice[0], lambda params: None], r"but got a list of \[SGD, function\]"),
        ([], r"but got a list of \[\]"),
    ]:
        for given in (optimizers, lambda _, made=optimizers: made):
            with pytest.raises(InputError, match=words):
                start(given, model=model)
    assert not twice[0]._optimizer_step_pre_hooks


# -- schedulers --------------------------------------------------------------------------------------------------------


def make_warmup(optimizer: optim.Optimizer) -> Any:
    return halfmesh.LinearWarmupLR(optimizer, warmup_steps=2, total_steps=9)


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda first, second: halving, [halving, halving]),
        (lambda first, second: [make_warmup, halving], [make_warmup, halving]),
        (lambda first, second: [None, halving], [None, halving]),
        (lambda first, second: [halving(first), make_warmup(second)], [halving, make_warmup]),
        (lambda first, second: halving(second), [None, halving]),
    ],
)
def test_schedulers_are_one_each_or_a_list(make, alone):
    model = MLP()
    optimizers, twins = (sgd_and_adamw(model.parameters()) for _ in range(2))
    engine = start(optimizers, lr_scheduler=make(*optimizers), model=model)
    schedulers = [make(twin) for make, twin in zip(alone, twins, strict=True) if make]
    for update in range(UPDATES):
        train(engine, [update])
        for scheduler in schedulers:
            scheduler.optimizer.step()
            scheduler.step()
    held = engine.lr_scheduler  # settles
    assert [group["lr"] for group in engine.optimizer.param_groups] == [t.param_groups[0]["lr"] for t in twins]
    assert list(map(type, held if isinstance(held, list) else [held])) == list(map(type, schedulers))


def test_schedulers_that_do_not_fit_are_told():
    other = optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    for given, words in [
        ([halving], r"a list of 1 was given for 2 optimizers"),
        ([halving(other)], r"lr_scheduler: it was built on another optimizer"),
        (lr.ReduceLROnPlateau, r"ReduceLROnPlateau.step needs a metric"),
    ]:
        with pytest.raises(InputError, match=words):
            start(lr_scheduler=given)
    engine = start(lr_scheduler=halving)
    train(engine, [0])
    engine.lr_scheduler[1].step()
    with pytest.raises(InputError, match=r"its last_epoch was 1 and is 2"):
        train(engine, [1])


# -- state -------------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}},
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ("last",)}},
}


def go_on(rank: int, world_size: int, folder: Any, layouts: dict[str, Any]) -> dict[str, Any]:
    """By layout: what one process has saved is saved again, and trained on."""
    found = {}
    for name, parallel in layouts.items():
        engine = start(config={"parallel": parallel}, lr_scheduler=halving)
        train(engine, [7])  # a state of its own, to be overwritten
        engine.load(folder / "one")
        engine.save(folder / name)
        train(engine, [2])
        found[name] = engine.full_state_dict(optimizer=True, rank0_only=False)
        engine.close()
    return found


@pytest.mark.distributed
def test_state_is_resharded_by_parameter(tmp_path):
    """From one process to each layout, and back."""
    engine = start(lr_scheduler=halving)
    train(engine, [0, 1])
    engine.save(tmp_path / "one")
    train(engine, [2])
    expected = engine.full_state_dict(optimizer=True)
    by_layout = run_ranks(go_on, 2, tmp_path, LAYOUTS)[1]
    for name in LAYOUTS:
        again = start(lr_scheduler=halving)
        again.load(tmp_path / name)
        train(again, [2])
        for found in (by_layout[name], again.full_state_dict(optimizer=True)):
            torch.testing.assert_close(found["model"], expected["model"], rtol=1e-5, atol=2e-6)
            torch.testing.assert_close(
                found["optimizer"]["state"], expected["optimizer"]["state"], rtol=1e-4, atol=1e-6
            )


def test_a_state_dict_resumes_exactly_and_has_the_form_of_one_optimizers():
    engine, again = (start(config=FP16_NAIVE, lr_scheduler=halving) for _ in range(2))
    train(engine)
    saved, state = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()))
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    assert set(state["state"]) == set(numbers) == set(range(len(list(engine.model.parameters()))))
    again.load_state_dict(saved)
    for each in (engine, again):
        train(each, [5, 6])
    torch.testing.assert_close(full_weights(again), full_weights(engine), rtol=0, atol=0)
    joined = again.optimizer
    joined.load_state_dict(state)
    torch.testing.assert_close(joined.state_dict()["state"], state["state"], rtol=0, atol=0)
    with pytest.raises(ValueError, match=r"other parameter groups"):
        joined.load_state_dict(optim.SGD(again.model.parameters(), lr=0.1).state_dict())


def test_a_checkpoint_of_other_optimizers_is_rejected(tmp_path):
    engine = start()
    train(engine)
    engine.save(tmp_path)
    other = start(lambda params: sgd_and_adamw(params)[::-1])
    words = "torch.optim.sgd.SGD and torch.optim.adamw.AdamW, but this is torch.optim.adamw.AdamW and torch.optim.sgd"
    with pytest.raises(InputError, match=re.escape(words)):
        other.load(tmp_path)
