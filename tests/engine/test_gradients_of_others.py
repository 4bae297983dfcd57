"""Gradients that somebody else than engine.backward made or changed: told, rejected, or nobody's business."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import InputError
from tests.support.models import (
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    difference,
    full_weights,
    make_data,
    make_engine,
    reference,
    step_on,
)

X, Y = make_data(8)
SCALED = [FP16_TORCH, FP16_NAIVE]
STATIC = {"fp16": {"mode": "naive", "loss_scale": 1.0}}


def backward(engine: halfmesh.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))


def own_loss(engine: halfmesh.Engine) -> torch.Tensor:
    return engine.criterion(engine(X), Y)


@pytest.mark.promise(
    "one loss scale per update",
    "`loss.backward()` warns or raises, hooks on gradients warn",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("config", SCALED)
def test_a_loss_backward_before_the_first_of_an_update_is_rejected_under_a_scale(config):
    engine = make_engine(config)
    own_loss(engine).backward()
    with pytest.raises(InputError, match=r"first.weight, .* direct loss.backward\(\).*divide them by the loss scale"):
        backward(engine)
    engine.zero_grad()
    step_on(engine, X, Y)
    assert difference(full_weights(engine), reference([(X, Y)])) < 4e-4, "as if nothing had been"


@pytest.mark.parametrize("config", [{}, STATIC])
def test_without_a_scale_it_counts_and_is_told_once(config, caplog):
    engine = make_engine(config)
    for _ in range(2):
        own_loss(engine).backward()
        step_on(engine, X, Y)
    assert caplog.text.count("They count in this update as they are") == 1
    twice = reference([(X, Y)] * 2, lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    assert difference(full_weights(engine), twice) < (4e-4 if config else 1e-5)


@pytest.mark.parametrize("config", SCALED)
def test_a_loss_backward_beside_the_engines_is_told_under_a_scale(config, caplog):
    engine = make_engine(config | {"gradient_accumulation": 2})
    for _ in range(2):
        backward(engine)
        own_loss(engine).backward()
        engine.step()
    assert caplog.text.count("multiplied by the loss scale") == 1
    assert "Replace any loss.backward() by engine.backward(loss)" in caplog.text


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("config", SCALED)
def test_two_engines_whose_losses_cross(config, caplog):
    ours, theirs = (make_engine(config, model=nn.Linear(8, 4)) for _ in range(2))
    p, q = ours(X), theirs(X)
    ours.backward((p + q).float().square().mean(), retain_graph=True)
    with pytest.raises(InputError, match=r"weight, bias already have gradients .* another engine"):
        theirs.backward((p - q).float().square().mean())
    theirs.zero_grad()
    theirs.backward((p - q).float().square().mean())
    ours.step()
    theirs.step()
    assert caplog.text.count("were changed between engine.backward and engine.step") == 1, (
        "those of the first engine, by the second one's backward"
    )


def exchanges(model):
    model.last.bias.grad = model.last.bias.grad * 0.5


def clips(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clips_data(model):
    """As DINO does. torch does not count writes through `data`."""
    for param in model.parameters():
        param.grad.data.mul_(min(1.0, 0.1 / (param.grad.data.norm().item() + 1e-6)))


CHANGED = "were changed between engine.backward and engine.step"


@pytest.mark.parametrize("change", [exchanges, clips, clips_data])
def test_changed_gradients_are_told_under_a_scale_and_right_without(change, caplog):
    for config in (*SCALED, {}, MODES["naive_bf16"], STATIC):
        engine = make_engine(config)
        for _ in range(2):
            backward(engine)
            change(engine.model)
            engine.step()
        told = [text for text in warned(caplog) if CHANGED in text]
        assert len(told) == (config in SCALED)
        assert all("multiplied by the loss scale. To clip them, set clip_grad_norm" in text for text in told)
        caplog.clear()
    engine, model = make_engine(), MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    nn.functional.cross_entropy(model(X), Y).backward()
    change(model)
    optimizer.step()
    backward(engine)
    change(engine.model)
    engine.step()
    assert difference(full_weights(engine), model) < 1e-6


@pytest.mark.parametrize("config", SCALED)
def test_changes_beside_updates_that_overflow_are_told(config, caplog):
    """They are none of the first, in which changes through `data` are seen."""
    key = "initial_scale" if config is FP16_NAIVE else "init_scale"
    engine = make_engine({"fp16": config["fp16"] | {key: 2.0**30, "growth_interval": 100}})
    results = []
    for _ in range(30):
        backward(engine)
        if len(results) > 3 and not results[-1].skipped:
            clips_data(engine.model)
        results.append(engine.step())
    assert sum(result.skipped for result in results[:4]) == 4
    assert caplog.text.count(CHANGED) == 1


# -- hooks -----------------------------------------------------------------------------------------------------------


def same(*args):
    """The last gradients that a hook is given."""
    return args[-1]


HOOKS = {
    "first.weight, last.bias": lambda model: [p.register_hook(same) for p in (model.first.weight, model.last.bias)],
    "last.weight": lambda model: model.last.weight.register_post_accumulate_grad_hook(lambda param: None),
    "tied": lambda model: model.tied.register_full_backward_pre_hook(same),
    "the model": lambda model: model.register_full_backward_hook(lambda module, given, grads: None),
}
SCALED_MODES = [*SCALED, MODES["apex_o2"], {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2}}]


@pytest.mark.promise("one loss scale per update")
@pytest.mark.parametrize("name", HOOKS)
def test_hooks_that_see_scaled_gradients_are_told_once(name, caplog):
    for number, config in enumerate(SCALED_MODES):
        model = MLP()
        if number % 2:  # else they are registered later
            HOOKS[name](model)
        engine = make_engine(config, model=model)
        if not number % 2:
            HOOKS[name](model)
        for _ in range(2):
            step_on(engine, X, Y)
        (text,) = [text for text in warned(caplog) if "see gradients multiplied" in text]
        assert text.startswith(f"hooks on {name} see gradients multiplied by the loss scale"), config
        assert "multiply the bounds (or the noise) in the hook by engine.loss_scale" in text
        caplog.clear()


@pytest.mark.parametrize("config", [{}, MODES["naive_bf16"], STATIC, *SCALED])
def test_hooks_are_right_without_a_scale_and_with_bounds_that_are_multiplied_by_it(config, caplog):
    """As the warning says. Hooks stay where the weights are cast."""
    engine, model = make_engine(config), MLP()
    engine.model.last.weight.register_hook(lambda g: g.clamp(-0.02 * engine.loss_scale, 0.02 * engine.loss_scale))
    model.last.weight.register_hook(partial(torch.clamp, min=-0.02, max=0.02))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    nn.functional.cross_entropy(model(X), Y).backward()
    assert model.last.weight.grad.abs().max() == 0.02, "there was something to clamp"
    optimizer.step()
    step_on(engine, X, Y)
    assert difference(full_weights(engine), model) < (4e-3 if "bf16" in config else 4e-4)
    assert any("hooks" in text for text in warned(caplog)) == (config in SCALED)


@pytest.mark.parametrize("config", [{}, *SCALED])
def test_a_gradient_dropped_before_the_step_is_left_out(config, caplog):
    engine = make_engine(config)
    before = full_weights(engine)
    backward(engine)
    engine.model.first.weight.grad = None
    engine.step()
    after = full_weights(engine)
    assert torch.equal(after["first.weight"], before["first.weight"])
    assert not torch.equal(after["last.weight"], before["last.weight"])
    assert warned(caplog) == []


@pytest.mark.parametrize("mode", ["torch_fp16", "naive_fp16", "apex_o1"])
def test_several_backwards_of_an_update_are_nobodys_business(mode, caplog):
    losses = {"num_losses": 2} if mode.startswith("apex") else {}
    config = {kind: options | losses for kind, options in MODES[mode].items()}
    engine = make_engine(config | {"gradient_accumulation": 2, "clip_grad_norm": 1.0})
    for _ in range(4):
        loss = own_loss(engine)
        engine.backward(loss, retain_graph=True)
        engine.backward(loss, loss_id=len(losses))
        engine.step()
    assert warned(caplog) == []
