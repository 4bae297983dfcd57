"""Between engine.backward and engine.step the gradients stand in `param.grad`, in every data layout that has them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from tests.support.models import FP16_NAIVE, MLP, MODES, full_weights, make_data, make_engine, said
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed

BATCH = make_data(8)
REJECTED = "To clip, call engine.clip_grad_norm_"


def make(data: str, **config) -> halfmesh.Engine:
    return make_engine(config | {"parallel": {"data": data}}, optimizer=partial(torch.optim.SGD, lr=0.1))


def backward(engine: halfmesh.Engine, rank: int) -> None:
    """Of this rank's half of the batch."""
    engine.zero_grad()
    x, y = (tensor.chunk(2)[rank] for tensor in here(BATCH))
    engine.backward(engine.criterion(engine(x), y))


def one_process(change: Callable[[nn.Module], None]) -> MLP:
    """After a backward of all of the batch in fp32, `change` and a step."""
    model, (x, y) = here((MLP(), BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(x), y).backward()
    change(model)
    optimizer.step()
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(model: nn.Module) -> torch.Tensor:
    return whole(nn.utils.clip_grad_norm_(model.parameters(), 0.1))


def far(engine: halfmesh.Engine, model: nn.Module) -> float:
    ours = full_weights(engine)
    return max((here(whole(ours[name])) - value).abs().max().item() for name, value in model.state_dict().items())


def clipped(rank, world_size):
    expected = one_process(clip)
    for data, mode in product(("replicate", "fsdp"), ("none", "naive_fp16", "naive_bf16")):
        engine = make(data, **MODES[mode])
        backward(engine, rank)
        if (data, mode) == ("fsdp", "naive_fp16"):
            assert REJECTED in said(clip, engine.model)
            continue
        with redirect_stderr(StringIO()) as told:
            assert clip(engine.model) > 0.1, "there was something to clip"
            engine.step()
        if mode != "naive_fp16":
            assert far(engine, expected) < (1e-6 if mode == "none" else 1e-3), (data, mode)
        words = "were changed between", "engine.clip_grad_norm_(max_norm), or set clip_grad_norm in the config"
        for text in words:
            assert told.getvalue().count(text) == (mode == "naive_fp16" and rank == 0), (data, mode, told.getvalue())


def test_torchs_clip_grad_norm_is_right_or_told():
    """With the whole norm under fsdp, too. Multiplied by a loss scale gradients are not what they look like."""
    run_ranks(clipped, 2)


def sets_to_none(model: nn.Module) -> None:
    model.first.weight.grad = None


def halves(model: nn.Module) -> None:
    model.first.weight.grad = model.first.weight.grad * 0.5


def exchanged(rank, world_size):
    """What takes the place of a gradient is what is used, as in a loop by hand."""
    for data, change in (("replicate", halves), ("fsdp", halves), ("fsdp", sets_to_none), ("zero1", sets_to_none)):
        for mode, most in (("none", 1e-6), ("naive_bf16", 3e-3)):
            engine = make(data, **MODES[mode])
            backward(engine, rank)
            change(engine.model)
            engine.step()
            assert far(engine, one_process(change)) < most, (data, mode, change)
    engine = make("zero1", **FP16_NAIVE)
    backward(engine, rank)
    own = here(torch.arange(128.0).view(16, 8).half())  # of which this rank uses its part
    engine.model.first.weight.grad = own
    engine.step()
    assert far(engine, one_process(lambda model: setattr(model.first.weight, "grad", own.float() / 256))) < 1e-3


def test_exchanged_gradients_are_used():
    run_ranks(exchanged, 2)


def scattered(rank, world_size):
    engine = make("zero1", gradient_accumulation=2, **MODES["naive_fp16"])
    params = [*engine.model.parameters()]
    backward(engine, rank)
    assert all(type(param.grad) is torch.Tensor for param in params), "this rank's own, until the last microbatch"
    engine.step()
    backward(engine, rank)
    looks = partial(nn.utils.clip_grad_value_, params, 1.0), params[0].grad.norm, engine(here(BATCH[0])).sum().backward
    for look in (partial(clip, engine.model), *looks):
        assert REJECTED in said(look)
    engine.clip_grad_norm_(0.1)
    engine.step()
    assert all(param.grad is None for param in params)
    assert far(engine, one_process(clip)) < 1e-3


def test_zero1_rejects_to_compute_with_gradients_that_are_elsewhere():
    run_ranks(scattered, 2)
