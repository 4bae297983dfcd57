"""engine.unscale_gradients: what scripts read and change between backward and step is what it would be in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import (
    BF16_NAIVE,
    FP16_NAIVE,
    FP16_TORCH,
    MLP,
    MODES,
    TOLERANCES,
    difference,
    make_data,
    make_engine,
    said,
    sgd,
    summed_loss,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)


def clip_each(params: Any) -> None:
    """DINO's: per parameter, through `.data`."""
    for param in params:
        norm = param.grad.data.norm(2)
        if norm > 0.02:
            param.grad.data.mul_(0.02 / (norm + 1e-6))


def clip_by_value(params: Any) -> None:
    nn.utils.clip_grad_value_(list(params), 0.01)


def clip_all(params: Any) -> None:
    nn.utils.clip_grad_norm_(list(params), 0.05)


def cancel(params: Any) -> None:
    """DINO's freeze of the last layer."""
    next(iter(params)).grad = None


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
    ("mode", "change"),
    [
        *((mode, clip_each) for mode in MODES),
        *(("naive_fp16", change) for change in (clip_by_value, clip_all, cancel)),
    ],
)
def test_changes_have_the_effect_of_fp32(mode, change, caplog):
    engine = make_engine(MODES[mode])
    check(train(engine, change), mode, change)
    assert "were changed" not in caplog.text


@pytest.mark.parametrize(
    ("mode", "config", "criterion"),
    [
        ("none", {"gradient_accumulation": 2}, nn.functional.cross_entropy),
        ("naive_fp16", {"gradient_accumulation": 2}, nn.functional.cross_entropy),
        ("naive_fp16", {"gradient_accumulation": 2, "loss_reduction": "weighted"}, summed_loss),
    ],
)
def test_a_cycle(mode, config, criterion):
    """Whose divisors are others than the loss scale."""
    engine = make_engine(MODES[mode] | config, criterion=criterion)
    check(train(engine, clip_by_value, 2), mode, clip_by_value)


CELLS: list[tuple[dict[str, Any], str]] = [
    ({}, "naive_fp16"),
    ({"data": "fsdp"}, "none"),  # gradients are DTensors, whose norms are of all ranks
    ({"pipeline": {"size": 2, "microbatches": 2, "partition": ["last"]}}, "naive_fp16"),
]


def in_layouts(rank: int, world_size: int) -> None:
    for parallel, mode in CELLS:
        engine = make_engine({"parallel": parallel} | MODES[mode])
        check(train(engine, clip_each), mode, clip_each)
        engine.close()


@pytest.mark.distributed
def test_layouts_with_whole_gradients():
    run_ranks(in_layouts, 2)


WITHOUT: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"data": "zero1"}}, "parallel.data='zero1'"),
    ({"parallel": {"data": "fsdp"}} | FP16_TORCH, "parallel.data='fsdp'"),
    ({"parallel": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}}, "parallel.tensor"),
]


def rejected(rank: int, world_size: int) -> list[str]:
    found = []
    for config, _ in WITHOUT:
        engine = make_engine(config)
        engine.backward(engine.criterion(engine(here(X)), here(Y)))
        found.append(said(engine.unscale_gradients))
        assert not engine.step().skipped, "the update can be taken"
        engine.close()
    return found


@pytest.mark.distributed
def test_layouts_without():
    for found in run_ranks(rejected, 2):
        for (_, where), message in zip(WITHOUT, found, strict=True):
            assert f"under {where} each rank holds only a part" in message
            assert "clip_grad_norm in the config" in message


# -- inf and nan, and the order of calls ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [FP16_TORCH, {"fp16": FP16_NAIVE["fp16"] | {"hysteresis": 1}}])
def test_a_clip_by_value_hides_no_overflow(config):
    engine = make_engine(config)
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
    engine.backward(engine.criterion(engine(X), Y))
    before = engine.clip_grad_norm_(1e9)
    engine.unscale_gradients()
    engine.unscale_gradients()  # the same
    grads = [param.grad for param in engine.model.parameters()]
    torch.testing.assert_close(nn.utils.get_total_norm(grads), before.float(), rtol=1e-5, atol=0)
    torch.testing.assert_close(engine.clip_grad_norm_(1e9), before, rtol=1e-5, atol=0)
    for grad in grads:
        grad.mul_(0.5)
    assert engine.step().grad_norm == pytest.approx(before.item(), rel=1e-5), "before clipping"
    engine.backward(engine.criterion(engine(X), Y))  # scaled again
    assert engine.model.last.bias.grad.dtype == torch.float16
    assert engine.model.last.bias.grad.norm() > 10 * engine.clip_grad_norm_(1.0)
    engine.zero_grad()
    engine.backward(engine.criterion(engine(X), Y))
    engine.unscale_gradients()
    for param in engine.model.parameters():
        param.grad.zero_()
    assert engine.step().grad_norm == 0


@pytest.mark.parametrize(("call", "change"), [("unscale", clip_each), ("clip", clip_all)])
def test_the_last_batch_of_ones_own_loader_ends_a_cycle(call, change):
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
                change(engine.model.parameters())
            elif last:
                engine.clip_grad_norm_(0.05, last=True)
            assert (engine.step() is not None) == last, "step knows"
        change(list(model.parameters()))
        optimizer.step()
    assert difference(engine.full_state_dict(), model) < TOLERANCES["none"]
    engine.backward(engine.criterion(engine(X), Y))
    with pytest.raises(InputError, match=r"or with last=True to end the cycle here"):
        engine.clip_grad_norm_(0.05)


def test_the_order_of_calls():
    engine = make_engine({"gradient_accumulation": 2} | BF16_NAIVE)
    with pytest.raises(InputError, match=r"unscale_gradients\(\) was called before the last engine.backward\(loss\)"):
        engine.unscale_gradients()
    engine.backward(engine.criterion(engine(X), Y))
    with pytest.raises(InputError, match=r"after microbatch 1 of 2.*gradients are incomplete"):
        engine.unscale_gradients()
    engine.step()
    engine.backward(engine.criterion(engine(X), Y))
    engine.unscale_gradients()
    with pytest.raises(InputError, match=r"after engine.unscale_gradients\(\) of the same update"):
        engine.backward(engine.criterion(engine(X), Y))
