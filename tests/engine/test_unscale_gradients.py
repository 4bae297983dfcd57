"""engine.unscale_gradients: what scripts read and change between backward and step is what it would be in fp32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    step_on,
    summed_loss,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
Params = Iterable[nn.Parameter]


def clip_each(params: Params) -> None:
    """DINO's: per parameter, through `.data`."""
    for param in params:
        norm = param.grad.data.norm(2)
        if norm > 0.02:
            param.grad.data.mul_(0.02 / (norm + 1e-6))


def clip_by_value(params: Params) -> None:
    nn.utils.clip_grad_value_(list(params), 0.01)


def clip_adaptively(params: Params) -> None:
    """timm's AGC, for whole parameters."""
    for param in params:
        most = param.detach().float().norm().clamp(min=1e-3) * 0.02
        norm = param.grad.detach().norm()
        param.grad.detach().copy_(torch.where(norm < most, param.grad, param.grad * (most / norm.clamp(min=1e-6))))


def clip_all(params: Params) -> None:
    nn.utils.clip_grad_norm_(list(params), 0.05)


def cancel(params: Params) -> None:
    """DINO's freeze of the last layer."""
    next(iter(params)).grad = None


Change = Callable[[Params], None]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(X.roll(step, 0), Y.roll(step, 0)) for step in range(3)]


def by_hand(change: Change) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A plain fp32 loop; the model, and the gradients before each change."""
    model, seen = MLP(), []
    optimizer = sgd(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        seen.append({name: param.grad.clone() for name, param in model.named_parameters()})
        change(model.parameters())
        optimizer.step()
    return model, seen


def train(engine: Any, change: Change, parts: int = 1) -> list[dict[str, torch.Tensor]]:
    """This rank's samples, in `parts` microbatches of an update. Returns the gradients before each change."""
    seen, size = [], len(X) // engine.context.dp_size
    for x, y in batches():
        engine.zero_grad()
        own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
        pieces = list(zip(here(x[own]).chunk(parts), here(y[own]).chunk(parts), strict=True))
        for piece in pieces[:-1]:
            assert step_on(engine, *piece) is None
        engine.backward(engine.criterion(engine(pieces[-1][0]), pieces[-1][1]))
        engine.unscale_gradients()
        held = {name: param.grad for name, param in engine.model.named_parameters() if param.grad is not None}
        seen.append(
            {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().cpu().clone() for name, grad in held.items()}
        )
        change(engine.model.parameters())
        assert not engine.step().skipped
    return seen


def check(seen: Any, weights: Any, mode: str, change: Change, names: Any = None) -> None:
    model, expected = by_hand(change)
    close = 1e-6 if TOLERANCES[mode] == 1e-5 else 2e-2 if "bf16" in mode else 2e-3
    for found, right in zip(seen, expected, strict=True):
        torch.testing.assert_close(found, {name: right[name] for name in names or right}, rtol=0, atol=close)
    assert difference(weights, model) < TOLERANCES[mode]


@pytest.mark.promise(
    "gradients of your own between backward and step",
    "after `engine.unscale_gradients()` they are those of fp32, and no overflow is hidden",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.parametrize(
    ("mode", "change"),
    [
        *((mode, clip_each) for mode in MODES),
        *(("naive_fp16", change) for change in (clip_by_value, clip_adaptively, clip_all, cancel)),
    ],
)
def test_changes_have_the_effect_of_fp32(mode, change, caplog):
    engine = make_engine(MODES[mode])
    check(train(engine, change), engine.full_state_dict(), mode, change)
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
    check(train(engine, clip_by_value, 2), engine.full_state_dict(), mode, clip_by_value)


CELLS: list[tuple[dict[str, Any], str]] = [
    ({}, "naive_fp16"),
    ({"data": "fsdp"}, "none"),  # gradients are DTensors, whose norms are of all ranks
    ({"pipeline": {"size": 2, "microbatches": 2, "partition": ["last"]}}, "naive_fp16"),
]


def in_layouts(rank: int, world_size: int) -> list[Any]:
    found = []
    for parallel, mode in CELLS:
        engine = make_engine({"parallel": parallel} | MODES[mode])
        seen = train(engine, clip_each)
        found.append((seen, engine.full_state_dict(rank0_only=False), list(dict(engine.model.named_parameters()))))
        engine.close()
    return found


@pytest.mark.promise("gradients of your own between backward and step")
@pytest.mark.distributed
def test_layouts_with_whole_gradients():
    for found in run_ranks(in_layouts, 2):
        for (_, mode), (seen, weights, names) in zip(CELLS, found, strict=True):
            check(seen, weights, mode, clip_each, names)


WITHOUT: list[tuple[dict[str, Any], str]] = [
    ({"parallel": {"data": "zero1"}}, "parallel.data='zero1'"),
    ({"parallel": {"data": "fsdp"}} | FP16_TORCH, "parallel.data='fsdp'"),
    ({"parallel": {"tensor": {"size": 2, "plan": {"first": "colwise_gather"}}}}, "parallel.tensor"),
]


def refused(rank: int, world_size: int) -> list[str]:
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
    for found in run_ranks(refused, 2):
        for (_, where), message in zip(WITHOUT, found, strict=True):
            assert f"under {where} a rank has only its part" in message
            assert "clip_grad_norm in the config" in message


# -- inf and nan, and the order of calls ------------------------------------------------------------------------------


@pytest.mark.promise("gradients of your own between backward and step")
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
    with pytest.raises(InputError, match=r"call it then, or with last=True to end the cycle here"):
        engine.clip_grad_norm_(0.05)


def test_the_order_of_calls():
    engine = make_engine({"gradient_accumulation": 2} | BF16_NAIVE)
    with pytest.raises(
        InputError, match=r"unscale_gradients\(\) was called before engine.backward\(loss\) of a cycle's last"
    ):
        engine.unscale_gradients()
    engine.backward(engine.criterion(engine(X), Y))
    with pytest.raises(InputError, match=r"after 1 of 2.*gradients are incomplete"):
        engine.unscale_gradients()
    engine.step()
    engine.backward(engine.criterion(engine(X), Y))
    engine.unscale_gradients()
    with pytest.raises(InputError, match=r"after engine.unscale_gradients\(\) of the same update"):
        engine.backward(engine.criterion(engine(X), Y))
