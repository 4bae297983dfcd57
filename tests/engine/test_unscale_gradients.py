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
    summed_loss,
)
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
SCALED = {"fp16_torch": FP16_TORCH, "fp16_naive": FP16_NAIVE}
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


CHANGES: dict[str, Callable[[Params], None]] = {
    change.__name__: change for change in (clip_each, clip_by_value, clip_adaptively, clip_all, cancel)
}


def batches(updates: int = 3) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(X.roll(step, 0), Y.roll(step, 0)) for step in range(updates)]


def by_hand(change: str) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """A plain fp32 loop; the model, and the gradients before each change."""
    model, seen = MLP(), []
    optimizer = sgd(model.parameters())
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        seen.append({name: param.grad.clone() for name, param in model.named_parameters()})
        CHANGES[change](model.parameters())
        optimizer.step()
    return model, seen


def train(engine: Any, change: str, parts: int = 1) -> list[dict[str, torch.Tensor]]:
    """This rank's samples, in `parts` microbatches of an update. Returns the gradients before each change."""
    seen, size = [], len(X) // engine.context.dp_size // parts
    for x, y in batches():
        engine.zero_grad()
        for part in range(parts):
            own = slice(
                (engine.context.dp_rank * parts + part) * size, (engine.context.dp_rank * parts + part + 1) * size
            )
            engine.backward(engine.criterion(engine(here(x[own])), here(y[own])))
            if part < parts - 1:
                assert engine.step() is None
        engine.unscale_gradients()
        held = {name: param.grad for name, param in engine.model.named_parameters() if param.grad is not None}
        seen.append(
            {name: getattr(grad, "full_tensor", lambda grad=grad: grad)().cpu().clone() for name, grad in held.items()}
        )
        CHANGES[change](engine.model.parameters())
        assert not engine.step().skipped
    return seen


def check(seen: Any, weights: Any, mode: str, change: str, names: Any = None) -> None:
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
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("mode", MODES)
def test_changes_have_the_effect_of_fp32(mode, change, caplog):
    engine = make_engine(MODES[mode])
    check(train(engine, change), engine.full_state_dict(), mode, change)
    assert "were changed" not in caplog.text


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_a_cycle(mode):
    engine = make_engine(MODES[mode] | {"gradient_accumulation": 2})
    check(train(engine, "clip_each", 2), engine.full_state_dict(), mode, "clip_each")


def test_a_short_cycle_and_weighted_losses():
    """Whose divisors are others than the loss scale."""
    for config, criterion in (
        ({"gradient_accumulation": 1}, nn.functional.cross_entropy),
        ({"loss_reduction": "weighted", "gradient_accumulation": 2}, summed_loss),
    ):
        engine = make_engine(FP16_NAIVE | config, criterion=criterion)
        parts = config["gradient_accumulation"]
        check(train(engine, "clip_by_value", parts), engine.full_state_dict(), "naive_fp16", "clip_by_value")


def in_a_layout(rank: int, world_size: int, config: dict[str, Any], change: str) -> Any:
    engine = make_engine(config)
    seen = train(engine, change)
    return seen, engine.full_state_dict(rank0_only=False), list(dict(engine.model.named_parameters()))


LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "fsdp": {"data": "fsdp"},  # gradients are DTensors, whose norms are of all ranks
    "pipeline": {"pipeline": {"size": 2, "microbatches": 2, "partition": ["last"]}},
}


@pytest.mark.promise("gradients of your own between backward and step")
@pytest.mark.distributed
@pytest.mark.parametrize("change", ["clip_each", "clip_by_value"])
@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        *[("replicate", mode) for mode in ("none", "torch_fp16", "naive_fp16")],
        *[("pipeline", mode) for mode in ("none", "naive_fp16")],
        ("fsdp", "none"),
    ],
)
def test_layouts_with_whole_gradients(layout, mode, change):
    for seen, weights, names in run_ranks(in_a_layout, 2, {"parallel": LAYOUTS[layout]} | MODES[mode], change):
        check(seen, weights, mode, change, names)


def refused(rank: int, world_size: int, config: dict[str, Any]) -> tuple[str, bool]:
    torch.manual_seed(0)
    engine = make_engine(config, model=nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    engine.backward(engine.criterion(engine(here(X)), here(Y)))
    message = said(engine.unscale_gradients)
    return message, bool(engine.step().skipped)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("parallel", "config", "why"),
    [
        ({"data": "zero1"}, {}, "under parallel.data='zero1' a rank has only its part"),
        ({"data": "fsdp"}, FP16_TORCH, "under parallel.data='fsdp' a rank has only its part"),
        (
            {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
            {},
            "under parallel.tensor a rank has only its part",
        ),
    ],
)
def test_layouts_without(parallel, config, why):
    for message, skipped in run_ranks(refused, 2, {"parallel": parallel} | config):
        assert why in message, "and the update can be taken"
        assert "clip_grad_norm in the config" in message
        assert not skipped


# -- inf and nan, and the order of calls ------------------------------------------------------------------------------


@pytest.mark.promise("gradients of your own between backward and step")
@pytest.mark.parametrize("config", SCALED.values(), ids=SCALED)
def test_a_clip_by_value_hides_no_overflow(config):
    engine = make_engine(config | {"fp16": config["fp16"] | ({"hysteresis": 1} if config is FP16_NAIVE else {})})
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
    engine.backward(engine.criterion(engine(X), Y))
    engine.unscale_gradients()
    for param in engine.model.parameters():
        param.grad.zero_()
    assert engine.step().grad_norm == 0


def test_a_clip_before_it_holds():
    engine = make_engine(FP16_NAIVE)
    engine.backward(engine.criterion(engine(X), Y))
    norm = engine.clip_grad_norm_(0.01)
    engine.unscale_gradients()
    assert engine.step().grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_the_next_update_is_scaled_again():
    engine = make_engine(FP16_NAIVE)
    train(engine, "cancel")
    engine.backward(engine.criterion(engine(X), Y))
    assert engine.model.last.bias.grad.dtype == torch.float16
    assert engine.model.last.bias.grad.norm() > 10 * engine.clip_grad_norm_(1.0)


@pytest.mark.parametrize("call", ["unscale", "clip"])
def test_the_last_batch_of_ones_own_loader_ends_a_cycle(call):
    """Three batches, two in a cycle: as each cycle alone."""

    def run(cycles):
        engine = make_engine({"gradient_accumulation": 2})
        for batches in cycles:
            for number in range(batches):
                engine.backward(engine.criterion(engine(X[number::4]), Y[number::4]))
                last = number == batches - 1
                if last and call == "unscale":
                    engine.unscale_gradients(last=True)
                    clip_each(engine.model.parameters())
                elif last:
                    engine.clip_grad_norm_(0.05, last=True)
                stepped = engine.step()  # which knows
                assert (stepped is not None) == last
        return engine.full_state_dict()

    def by_hand():
        torch.manual_seed(0)
        model = MLP()
        optimizer = sgd(model.parameters())
        for batches in (2, 1):
            optimizer.zero_grad()
            for number in range(batches):
                (nn.functional.cross_entropy(model(X[number::4]), Y[number::4]) / batches).backward()
            (clip_each if call == "unscale" else clip_all)(list(model.parameters()))
            optimizer.step()
        return model

    assert difference(run((2, 1)), by_hand()) < TOLERANCES["none"]
    engine = make_engine({"gradient_accumulation": 2})
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
