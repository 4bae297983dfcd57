"""Gradients that somebody else than engine.backward made or changed: told, rejected, or nobody's business."""

from __future__ import annotations

from typing import Any

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
    TOLERANCES,
    difference,
    full_weights,
    make_data,
    make_engine,
    reference,
    said,
    sgd,
    step_on,
    summed_loss,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(8)
SCALED = [FP16_TORCH, FP16_NAIVE]


def backward(engine: halfmesh.Engine) -> None:
    engine.backward(engine.criterion(engine(X), Y))


@pytest.mark.promise(
    "one loss scale per update",
    "`loss.backward()` warns or raises, hooks on gradients warn",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize("config", SCALED)
def test_a_loss_backward_before_the_first_of_an_update_is_rejected_under_a_scale(config):
    engine = make_engine(config)
    engine.criterion(engine(X), Y).backward()
    with pytest.raises(InputError, match=r"first.weight, .* direct loss.backward\(\).*divide them by the loss scale"):
        backward(engine)
    engine.zero_grad()
    step_on(engine, X, Y)
    assert difference(full_weights(engine), reference([(X, Y)])) < 4e-4, "as if nothing had been"


def clip_each(params: Any) -> None:
    """DINO's: per parameter, through `.data`."""
    for param in params:
        norm = param.grad.data.norm(2)
        if norm > 0.02:
            param.grad.data.mul_(0.02 / (norm + 1e-6))


def clip_all(params: Any) -> None:
    nn.utils.clip_grad_norm_(list(params), 0.05)


def by_hand(change: Any) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A plain fp32 loop; the model, and the gradients before each change."""
    model, seen = MLP(), []
    optimizer = sgd(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(X.roll(step, 0)), Y.roll(step, 0)).backward()
        seen.append({name: param.grad.clone() for name, param in model.named_parameters()})
        change(model.parameters())
        optimizer.step()
    return model, seen


def warned(caplog):
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("change", [clip_all, clip_each])
def test_changed_gradients_are_told_under_a_scale_and_right_without(change, caplog):
    """torch does not count writes through `data`."""
    for config in (*SCALED, {}, {"fp16": {"mode": "naive", "loss_scale": 1.0}}):
        engine = make_engine(config)
        for step in range(3):
            engine.zero_grad()
            engine.backward(engine.criterion(engine(X.roll(step, 0)), Y.roll(step, 0)))
            change(engine.model.parameters())
            engine.step()
        told = [text for text in warned(caplog) if "were changed between engine.backward and engine.step" in text]
        assert len(told) == (config in SCALED)
        assert all("multiplied by the loss scale. To clip them, call engine.clip" in text for text in told)
        assert config or difference(full_weights(engine), by_hand(change)[0]) < 1e-6
        caplog.clear()


def same(*args):
    """The last gradients that a hook is given."""
    return args[-1]


HOOKS = {
    "first.weight": lambda model: model.first.weight.register_hook(same),
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
        caplog.clear()


def train(engine: Any, change: Any, parts: int = 1) -> Any:
    """This rank's samples, in `parts` microbatches of an update. Returns the gradients before each change, and the
    weights."""
    seen, context = [], engine.context
    for step in range(3):
        engine.zero_grad()
        x, y = (here(full.roll(step, 0).chunk(context.dp_size)[context.dp_rank]) for full in (X, Y))
        for number, piece in enumerate(zip(x.chunk(parts), y.chunk(parts), strict=True)):
            assert number == 0 or engine.step() is None
            engine.backward(engine.criterion(engine(piece[0]), piece[1]))
        engine.unscale_gradients()
        held = {name: param.grad for name, param in engine.model.named_parameters() if param.grad is not None}
        seen.append(
            {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().cpu().clone() for name, grad in held.items()}
        )
        change(engine.model.parameters())
        assert not engine.step().skipped
    return seen, {name: value.cpu() for name, value in engine.full_state_dict(rank0_only=False).items()}


def check(trained: Any, mode: str, change: Any) -> None:
    model, expected = by_hand(change)
    close = 1e-6 if TOLERANCES[mode] == 1e-5 else 2e-2 if "bf16" in mode else 2e-3
    for found, right in zip(trained[0], expected, strict=True):
        torch.testing.assert_close(found, {name: right[name] for name in found}, rtol=0, atol=close)
    assert difference(trained[1], model) < TOLERANCES[mode]


@pytest.mark.promise("unscaling before you clip or change gradients")
@pytest.mark.parametrize(
    ("mode", "change", "config", "criterion"),
    [
        *((mode, clip_each, {}, nn.functional.cross_entropy) for mode in MODES),
        ("naive_fp16", clip_all, {}, nn.functional.cross_entropy),
        ("naive_fp16", clip_all, {"gradient_accumulation": 2, "loss_reduction": "weighted"}, summed_loss),
    ],
)
def test_changes_have_the_effect_of_fp32(mode, change, config, criterion, caplog):
    engine = make_engine(MODES[mode] | config, criterion=criterion)
    check(train(engine, change, config.get("gradient_accumulation", 1)), mode, change)
    assert "were changed" not in caplog.text


CELLS: list[tuple[dict[str, Any], str]] = [
    ({}, "naive_fp16"),
    ({"data": "fsdp"}, "none"),  # gradients are DTensors, whose norms are of all ranks
    ({"pipeline": {"size": 2, "microbatches": 2, "partition": ["last"]}}, "naive_fp16"),
]


WITHOUT: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"data": "zero1"}}, "parallel.data='zero1'"),
    ({"parallel": {"data": "fsdp"}} | FP16_TORCH, "parallel.data='fsdp'"),
    ({"parallel": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}}, "parallel.tensor"),
]


def in_layouts(rank: int, world_size: int) -> list[str]:
    """What is said where gradients are not whole."""
    for parallel, mode in CELLS:
        engine = make_engine({"parallel": parallel} | MODES[mode])
        check(train(engine, clip_each), mode, clip_each)
        engine.close()
    found = []
    for config, _ in WITHOUT:
        engine = make_engine(config)
        engine.backward(engine.criterion(engine(here(X)), here(Y)))
        found.append(said(engine.unscale_gradients))
        assert not engine.step().skipped, "the update can be taken"
        engine.close()
    return found


@pytest.mark.distributed
@pytest.mark.sends
def test_layouts_with_whole_gradients_and_without():
    for found in run_ranks(in_layouts, 2):
        for (_, where), message in zip(WITHOUT, found, strict=True):
            assert f"under {where} each rank holds only a part" in message
            assert "clip_grad_norm in the config" in message


def test_a_clip_by_value_hides_no_overflow():
    engine = make_engine({"fp16": FP16_NAIVE["fp16"] | {"hysteresis": 1}})
    before, scale = engine.full_state_dict(), engine.loss_scale
    engine.backward(engine.criterion(engine(X * 1e30), Y) * torch.inf)
    engine.unscale_gradients()
    for param in engine.model.parameters():
        param.grad.nan_to_num_(0.0, 0.0, 0.0)
    assert engine.step().skipped
    assert engine.loss_scale < scale
    torch.testing.assert_close(engine.full_state_dict(), before, rtol=0, atol=0)


def test_the_norm_is_of_what_step_uses():
    engine = make_engine(FP16_NAIVE)
    backward(engine)
    before = engine.clip_grad_norm_(1e9)
    engine.unscale_gradients()
    engine.unscale_gradients()  # the same
    grads = [param.grad for param in engine.model.parameters()]
    torch.testing.assert_close(nn.utils.get_total_norm(grads), before.float(), rtol=1e-5, atol=0)
    for grad in grads:
        grad.zero_()
    assert engine.step().grad_norm == 0
    backward(engine)  # scaled again
    assert engine.model.last.bias.grad.norm() > 10 * engine.clip_grad_norm_(1.0)


@pytest.mark.parametrize("call", ["unscale", "clip"])
def test_the_last_batch_of_ones_own_loader_ends_a_cycle(call):
    """Three batches, two in a cycle: as each cycle alone."""
    engine = make_engine({"gradient_accumulation": 2})
    model = MLP()
    optimizer = sgd(model.parameters())
    for count in (2, 1):
        optimizer.zero_grad()
        for number in range(count):
            x, y, last = X[number::4], Y[number::4], number == count - 1
            (nn.functional.cross_entropy(model(x), y) / count).backward()
            engine.backward(engine.criterion(engine(x), y))
            if last and call == "unscale":
                engine.unscale_gradients(last=True)
                clip_all(engine.model.parameters())
            elif last:
                engine.clip_grad_norm_(0.05, last=True)
            assert (engine.step() is not None) == last, "step knows"
        clip_all(model.parameters())
        optimizer.step()
    assert difference(engine.full_state_dict(), model) < TOLERANCES["none"]


def test_the_order_of_calls():
    engine = make_engine({"gradient_accumulation": 2})
    backward(engine)
    for call in (engine.unscale_gradients, lambda: engine.clip_grad_norm_(0.05)):
        with pytest.raises(InputError, match=r"before the last .*after microbatch 1 of 2.*with last=True to end the"):
            call()
    engine.unscale_gradients(last=True)
    assert "after engine.unscale_gradients() of the same update" in said(backward, engine)
