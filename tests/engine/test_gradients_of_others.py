"""Gradients that somebody else than engine.backward made or changed: told, refused, or nobody's business."""

from __future__ import annotations

import copy
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


def backward(engine: halfmesh.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))


def own_loss(engine: halfmesh.Engine) -> torch.Tensor:
    return engine.criterion(engine(X), Y)


@pytest.mark.promise(
    "one loss scale per update",
    "your own `loss.backward()`, and another engine's gradients, bring a warning or an error",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("config", SCALED)
def test_a_loss_backward_before_the_first_of_an_update_is_refused_under_a_scale(config):
    engine = make_engine(config)
    own_loss(engine).backward()
    with pytest.raises(InputError, match=r"first.weight, .* direct loss.backward\(\).*divide them by the loss scale"):
        backward(engine)
    engine.zero_grad()
    step_on(engine, X, Y)
    assert difference(full_weights(engine), reference([(X, Y)])) < 4e-4, "as if nothing had been"


def test_without_a_scale_it_counts_and_is_told_once(caplog):
    engine = make_engine()
    for _ in range(2):
        own_loss(engine).backward()
        step_on(engine, X, Y)
    assert caplog.text.count("They count in this update as they are") == 1

    def doubled(output, target):
        return 2 * nn.functional.cross_entropy(output, target)

    by_hand = make_engine(criterion=doubled)
    for _ in range(2):
        step_on(by_hand, X, Y)
    torch.testing.assert_close(full_weights(engine), full_weights(by_hand), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("config", SCALED)
def test_a_loss_backward_beside_the_engines_is_told_under_a_scale(config, accumulation, caplog):
    engine = make_engine(config | {"gradient_accumulation": accumulation})
    for _ in range(accumulation):
        backward(engine)
        own_loss(engine).backward()
        engine.step()
    assert caplog.text.count("multiplied by the loss scale") == 1
    assert "in place of loss.backward() call engine.backward(loss)" in caplog.text


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.promise("one loss scale per update")
@pytest.mark.parametrize("config", SCALED)
def test_two_engines_whose_losses_cross(config, caplog):
    ours, theirs = (make_engine(config, model=nn.Linear(8, 4)) for _ in range(2))
    p, q = ours(X), theirs(X)
    ours.backward((p + q).float().square().mean(), retain_graph=True)
    with pytest.raises(InputError, match=r"weight, bias already have gradients .* another engine, left them"):
        theirs.backward((p - q).float().square().mean())
    theirs.zero_grad()
    theirs.backward((p - q).float().square().mean())
    ours.step()
    theirs.step()
    assert caplog.text.count("gradients were changed") == 1, "those of the first engine, by the second one's backward"


@pytest.mark.parametrize("config", SCALED)
def test_two_engines_as_in_a_gan(config, caplog):
    """A loss that goes through both leaves gradients that the other's zero_grad drops."""
    generator, judge = (make_engine(config, model=nn.Linear(8, features)) for features in (8, 4))
    for _ in range(2):
        fake = generator(X)
        judge.zero_grad()
        judge.backward(judge.criterion(judge(X), Y))
        judge.backward(judge.criterion(judge(fake.detach()), Y))
        judge.step()
        generator.zero_grad()
        generator.backward(judge.criterion(judge(fake), Y))
        generator.step()
        assert judge.model.weight.grad is not None
    assert warned(caplog) == []


def exchanges(model):
    model.last.bias.grad = model.last.bias.grad * 0.5


def clamps_the_last(model):
    with torch.no_grad():
        model.last.bias.grad.clamp_(-0.1, 0.1)


def clips(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clips_data(model):
    """As DINO does. torch does not count writes through `data`."""
    for param in model.parameters():
        param.grad.data.mul_(min(1.0, 0.1 / (param.grad.data.norm().item() + 1e-6)))


def adds_to_data(model):
    model.last.weight.grad.data.add_(0.01)


@pytest.mark.promise("`param.grad` between backward and step")
@pytest.mark.parametrize("change", [exchanges, clamps_the_last, clips, clips_data, adds_to_data])
def test_changed_gradients_are_told_under_a_scale_and_right_without(change, caplog):
    for config in SCALED:
        engine = make_engine(config)
        for _ in range(2):
            backward(engine)
            change(engine.model)
            engine.step()
        text = "gradients were changed between engine.backward and engine.step"
        assert caplog.text.count(text) == 1
        assert "multiplied by the loss scale; to clip them use clip_grad_norm" in caplog.text
        caplog.clear()
    for mode in ("none", "naive_bf16"):
        engine = make_engine(MODES[mode])
        backward(engine)
        change(engine.model)
        engine.step()
        assert warned(caplog) == []
    model = MLP()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    engine = make_engine(model=copy.deepcopy(model))
    nn.functional.cross_entropy(model(X), Y).backward()
    change(model)
    optimizer.step()
    backward(engine)
    change(engine.model)
    engine.step()
    assert difference(full_weights(engine), model) < 1e-6


@pytest.mark.parametrize("mode", [{"mode": "naive"}, {"mode": "apex", "opt_level": "O1"}])
def test_gradients_under_a_static_scale_of_1_are_as_in_a_loop_by_hand(mode, caplog):
    engine = make_engine({"fp16": mode | {"loss_scale": 1.0}})
    for _ in range(2):
        backward(engine)
        clips(engine.model)
        engine.step()
    own_loss(engine).backward()
    backward(engine)
    engine.step()
    assert [text for text in warned(caplog) if "changed" in text] == []
    assert caplog.text.count("They count in this update as they are") == 1


@pytest.mark.parametrize("config", SCALED)
def test_gradients_that_are_inf_and_made_finite_through_data_are_told(config, caplog):
    """The first updates of a run overflow: clamped, these gradients would be stepped."""
    mode = config["fp16"] | {"initial_scale" if config is FP16_NAIVE else "init_scale": 2.0**24}
    engine = make_engine({"fp16": mode})
    for _ in range(2):
        backward(engine)
        assert not all(param.grad.isfinite().all() for param in engine.model.parameters())
        for param in engine.model.parameters():
            param.grad.data.nan_to_num_(0.0).clamp_(-0.1, 0.1)
        engine.step()
    assert caplog.text.count("gradients were changed between engine.backward and engine.step") == 1


@pytest.mark.parametrize("config", SCALED)
def test_updates_that_overflow_are_none_of_the_first_three(config, caplog):
    mode = config["fp16"] | {"initial_scale" if config is FP16_NAIVE else "init_scale": 2.0**30, "growth_interval": 100}
    engine = make_engine({"fp16": mode})
    results = []
    for _ in range(30):
        backward(engine)
        if len(results) > 3 and not results[-1].skipped:
            clips_data(engine.model)
        results.append(engine.step())
    assert sum(result.skipped for result in results[:4]) == 4
    assert caplog.text.count("gradients were changed between engine.backward and engine.step") == 1


def test_gradients_that_are_only_read_are_not_told(caplog):
    engine = make_engine(FP16_NAIVE | {"gradient_accumulation": 2})
    for _ in range(8):
        backward(engine)
        for param in engine.model.parameters():
            param.grad.data.norm()
        engine.step()
    assert not any("gradients were changed" in text for text in warned(caplog))


# -- hooks -----------------------------------------------------------------------------------------------------------


def clamps(*args):
    """The gradient, or a module's gradients, within bounds."""
    grad = args[-1]
    return tuple(g.clamp(-0.02, 0.02) for g in grad if g is not None) if isinstance(grad, tuple) else grad.clamp(-1, 1)


def clamps_grad(param):
    param.grad.clamp_(-0.02, 0.02)


HOOKS = {
    "first.weight, last.bias": lambda model: [p.register_hook(clamps) for p in (model.first.weight, model.last.bias)],
    "last.weight": lambda model: model.last.weight.register_post_accumulate_grad_hook(clamps_grad),
    "norm.weight": lambda model: model.norm.weight.register_hook(partial(torch.clamp, min=-0.02, max=0.02)),
    "first": lambda model: model.first.register_full_backward_hook(lambda module, given, grads: None),
    "tied": lambda model: model.tied.register_full_backward_pre_hook(clamps),
    "the model": lambda model: model.register_full_backward_hook(lambda module, given, grads: None),
}
SCALED_MODES = [*SCALED, MODES["apex_o2"], {"fp16": {"mode": "apex", "opt_level": "O1", "num_losses": 2}}]


@pytest.mark.promise(
    "hooks on gradients under a loss scale",
    "a warning with names and the way out",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.parametrize("early", [True, False])
def test_hooks_that_see_scaled_gradients_are_told_once(name, early, caplog):
    for config in SCALED_MODES:
        model = MLP()
        if early:
            HOOKS[name](model)
        engine = make_engine(config, model=model)
        if not early:
            HOOKS[name](model)
        for _ in range(2):
            step_on(engine, X, Y)
        (text,) = [text for text in warned(caplog) if "run in backward" in text]
        assert text.startswith(f"hooks on {name} run in backward"), config
        assert "multiply the bounds (or the noise) in the hook by engine.loss_scale" in text
        caplog.clear()


def test_hooks_without_a_scale_are_nobodys_business(caplog):
    static = {"fp16": {"mode": "naive", "loss_scale": 1.0}}
    for config in ({}, MODES["torch_bf16"], MODES["naive_bf16"], static):
        engine, model = make_engine(config), MLP()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        for each in (engine.model, model):
            HOOKS["last.weight"](each)
        nn.functional.cross_entropy(model(X), Y).backward()
        optimizer.step()
        step_on(engine, X, Y)
        assert difference(full_weights(engine), model) < 4e-3
    assert not any("hooks" in text for text in warned(caplog))


def test_a_hook_whose_bounds_are_multiplied_by_the_loss_scale_is_right():
    """As the warning says. Hooks stay where the weights are cast."""
    for config in SCALED:
        engine, model = make_engine(config), MLP()
        weight = engine.model.last.weight
        weight.register_hook(lambda grad, e=engine: grad.clamp(-0.02 * e.loss_scale, 0.02 * e.loss_scale))
        model.last.weight.register_hook(partial(torch.clamp, min=-0.02, max=0.02))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        nn.functional.cross_entropy(model(X), Y).backward()
        assert model.last.weight.grad.abs().max() == 0.02, "there was something to clamp"
        optimizer.step()
        step_on(engine, X, Y)
        assert difference(full_weights(engine), model) < 4e-4


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


def test_several_backwards_of_an_update_are_nobodys_business(caplog):
    for mode in ("torch_fp16", "naive_fp16", "apex_o1", "apex_o2"):
        losses = {"num_losses": 2} if mode.startswith("apex") else {}
        config = {kind: options | losses for kind, options in MODES[mode].items()}
        engine = make_engine(config | {"gradient_accumulation": 2, "clip_grad_norm": 1.0})
        engine.zero_grad()
        for _ in range(4):
            loss = own_loss(engine)
            engine.backward(loss, retain_graph=True)
            engine.backward(loss, loss_id=len(losses))
            engine.step()
    assert warned(caplog) == []


def test_fp32_sums_are_all_in_param_grad():
    """256 + 1 is 256 in bf16."""
    engine = make_engine(
        {"bf16": {"mode": "naive"}, "gradient_dtype": "float32", "gradient_accumulation": 101}, model=nn.Linear(8, 4)
    )
    bias = engine.model.bias
    for factor in [256.0] + [1.0] * 100:
        engine.backward((engine.model.bias * factor).sum() * 101)
        engine.step() if factor != 1.0 else None
    assert bias.grad.dtype == torch.float32
    assert bias.grad.tolist() == [356.0] * 4


@pytest.mark.parametrize("mode", ["naive_fp16", "naive_bf16"])
def test_weights_clipped_in_place_stay_clipped_under_masters(mode):
    """As a WGAN's; but not through `param.data`, of which torch keeps no count."""
    for through_data in (False, True):
        engine = make_engine(MODES[mode], optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
        step_on(engine, X, Y)
        with torch.no_grad():
            for param in engine.model.parameters():
                (param.data if through_data else param).clamp_(-0.01, 0.01)
        engine.backward(engine.criterion(engine(X), Y) * 0)
        engine.step()
        largest = max(value.abs().max().item() for value in full_weights(engine).values())
        assert (largest < 0.0101) != through_data
