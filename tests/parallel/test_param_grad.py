"""Between engine.backward and engine.step the gradients stand in `param.grad`, in every data layout that has them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from tests.support.models import FP16_NAIVE, MLP, MODES, full_weights, make_data, said
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = pytest.mark.distributed

BATCH = make_data(8)


def make(data: str, **config) -> halfmesh.Engine:
    config |= {"parallel": {"data": data}}
    return halfmesh.initialize(
        MLP(), lambda p: torch.optim.SGD(p, lr=0.1), nn.CrossEntropyLoss(), None, config, device=rank_device()
    )


def backward(engine: halfmesh.Engine, rank: int) -> None:
    """Of this rank's half of the batch."""
    engine.zero_grad()
    engine.backward(loss_of_half(engine, rank))


def loss_of_half(engine: halfmesh.Engine, rank: int) -> torch.Tensor:
    x, y = (tensor.chunk(2)[rank] for tensor in here(BATCH))
    return engine.criterion(engine(x), y)


def whole(grad: torch.Tensor) -> torch.Tensor:
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def one_process(change: Callable[[nn.Module], None] = lambda model: None) -> MLP:
    """After a backward of all of the batch in fp32, `change` and a step."""
    model, (x, y) = here((MLP(), BATCH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(x), y).backward()
    change(model)
    optimizer.step()
    return model


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What halfmesh warns of meanwhile."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("halfmesh").addHandler(handler)
    yield texts
    logging.getLogger("halfmesh").removeHandler(handler)


def far(ours: dict[str, torch.Tensor], model: nn.Module) -> float:
    return max((here(whole(ours[name])) - value).abs().max().item() for name, value in model.state_dict().items())


LAYOUTS = [(data, mode) for data in ("replicate", "fsdp") for mode in ("none", "naive_fp16", "naive_bf16")]
WITHHELD = ("fsdp", "naive_fp16")
REJECTED = "To clip, call engine.clip_grad_norm_"


def looked_at(rank, world_size):
    """The largest difference from one process's gradients, and whether they are gone after the step."""
    expected = {name: param.grad for name, param in one_process().named_parameters()}
    found = {}
    for data, mode in LAYOUTS:
        if (data, mode) == WITHHELD:
            continue
        engine = make(data, **MODES[mode])
        for _ in range(2):
            backward(engine, rank)
            grads = {name: param.grad for name, param in engine.model.named_parameters()}
            assert all(grad.dtype == torch.float32 for grad in grads.values()), (data, mode)
            scale = 256 if mode == "naive_fp16" else 1
            largest = max((whole(grad) / scale - expected[name]).abs().max() for name, grad in grads.items())
            found.setdefault((data, mode), largest.item())
            assert engine.step().skipped is False
            assert all(param.grad is None for param in engine.model.parameters())
        backward(engine, rank)
        engine.close()
        if data == "replicate":  # as it came
            assert all(param.grad_dtype == param.dtype == torch.float32 for param in engine.model.parameters())
    engine = make("replicate", gradient_accumulation=2, **MODES["naive_bf16"])
    for microbatch in range(4):
        backward(engine, rank)
        wide = microbatch % 2 == 1
        assert {p.grad.dtype for p in engine.model.parameters()} == {torch.float32 if wide else torch.bfloat16}
        engine.step()
    engine = make("fsdp")
    params, seen = list(engine.model.parameters()), []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append([param.grad for param in params]))
    backward(engine, rank)
    engine.step()
    assert seen == [[None] * len(params)], "their memory goes as they are used"
    return found


def test_gradients_are_those_of_one_process():
    for found in run_ranks(looked_at, 2):
        assert all(most < (1e-6 if mode == "none" else 2e-3) for (_, mode), most in found.items()), found


def clipped(rank, world_size):
    expected = one_process(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    for data, mode in LAYOUTS:
        engine = make(data, **MODES[mode])
        params = list(engine.model.parameters())
        if (data, mode) == WITHHELD:
            backward(engine, rank)
            assert REJECTED in said(nn.utils.clip_grad_norm_, params, 0.1)
            engine.zero_grad()
            for _ in range(2):  # the second one adds to what the first one left
                engine.backward(0.5 * loss_of_half(engine, rank))
            engine.step()
            assert far(full_weights(engine), one_process()) < 1e-3
            continue
        with warnings() as texts:
            for step in range(2):
                backward(engine, rank)
                norm = nn.utils.clip_grad_norm_(params, 0.1)
                assert whole(norm) > 0.1, "there was something to clip"
                engine.step()
                if step == 0 and mode != "naive_fp16":
                    assert far(full_weights(engine), expected) < (1e-6 if mode == "none" else 1e-3), (data, mode)
        told = [text for text in texts if "were changed between" in text]
        assert len(told) == (mode == "naive_fp16" and rank == 0), (data, mode, texts)
        assert all(
            "call engine.clip_grad_norm_(max_norm), or set clip_grad_norm in the config" in text for text in told
        )

    for clips in (False, True):
        engine = make("replicate", gradient_accumulation=2, **MODES["naive_fp16"])
        with warnings() as texts:
            backward(engine, rank)
            engine.step()
            if clips:
                nn.utils.clip_grad_norm_(engine.model.parameters(), 0.1)
            engine.step(last=True)  # which reduces the gradients: others take their place
        assert len(texts) == (clips and rank == 0), texts


def test_torchs_clip_grad_norm_is_right_or_told():
    """With the whole norm under fsdp, too. Multiplied by a loss scale gradients are not what they look like."""
    run_ranks(clipped, 2)


def sets_to_none(model: nn.Module) -> None:
    model.first.weight.grad = None


def halves(model: nn.Module) -> None:
    model.first.weight.grad = model.first.weight.grad * 0.5


def exchanged(rank, world_size):
    """What takes the place of a gradient is what is used, as in a loop by hand."""
    for data in ("replicate", "fsdp", "zero1"):
        for change in (sets_to_none, halves):
            if (data, change) == ("zero1", halves):
                continue
            for mode, most in (("none", 1e-6), ("naive_bf16", 3e-3)):
                engine = make(data, **MODES[mode])
                backward(engine, rank)
                change(engine.model)
                engine.step()
                assert far(full_weights(engine), one_process(change)) < most, (data, mode, change)
    engine = make("zero1", **FP16_NAIVE)
    backward(engine, rank)
    own = here(torch.arange(128.0).view(16, 8).half())  # of which this rank uses its part
    engine.model.first.weight.grad = own
    engine.step()

    def sets(model: nn.Module) -> None:
        model.first.weight.grad = own.float() / 256

    assert far(full_weights(engine), one_process(sets)) < 1e-3


def test_exchanged_gradients_are_used():
    run_ranks(exchanged, 2)


def halved_within_a_cycle(rank, world_size):
    """The first microbatch counts half of the second."""
    weights = []
    for data in ("replicate", "zero1"):
        engine = make(data, gradient_accumulation=2)
        for batch in (0, 1):
            backward(engine, (rank + batch) % 2)
            if batch == 0:
                torch._foreach_mul_([param.grad for param in engine.model.parameters()], 0.5)
            engine.step()
        weights.append(full_weights(engine))
    return max((weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0])


def test_gradients_changed_within_a_cycle_are_summed_once():
    assert max(run_ranks(halved_within_a_cycle, 2)) < 1e-6


def on_ranks(rank, world_size, parallel):
    """What is told of a hook on the last layer, and of gradients that are written through `data`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model[2].register_full_backward_pre_hook(lambda *_: None)
    config = FP16_NAIVE | {"parallel": parallel}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), None, config, device=rank_device())
    with warnings() as texts:
        engine.backward(loss_of_half(engine, engine.context.dp_rank))
        held = [param for param in engine.model.parameters() if param.grad is not None]
        for param in held:
            param.grad.data.mul_(0.5)
        engine.step()
    hooks = any(text.startswith(f"[rank {rank}] hooks on 2 see gradients") for text in texts)
    return hooks, any("were changed between" in text for text in texts), len(texts)


TENSOR = {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["2"]}}


@pytest.mark.sends
def test_ranks_tell_of_what_they_hold():
    assert run_ranks(on_ranks, 2, {"data": "replicate"}) == [(True, True, 2), (False, False, 0)]
    assert run_ranks(on_ranks, 2, TENSOR) == [(True, True, 2), (True, True, 2)]
    first, last = run_ranks(on_ranks, 2, PIPELINE)
    assert (first[1], last) == (True, (True, True, 2))


def scattered(rank, world_size):
    for mode in ("none", "naive_fp16"):
        engine = make("zero1", gradient_accumulation=2, **MODES[mode])
        params = [*engine.model.parameters()]
        backward(engine, rank)
        assert all(type(param.grad) is torch.Tensor for param in params), "this rank's own, until the last microbatch"
        engine.step()
        backward(engine, rank)
        for look in (
            partial(nn.utils.clip_grad_norm_, params, 1.0),
            partial(nn.utils.clip_grad_value_, params, 1.0),
            params[0].grad.norm,
            partial(getattr, params[0].grad, "data"),
            engine(here(BATCH[0])).sum().backward,
        ):
            assert REJECTED in said(look)
        weight = engine.model.first.weight
        assert (weight.grad.shape, weight.grad.dtype) == (weight.shape, weight.dtype)
        assert "the gradient of 'first.weight'" in repr(weight.grad)
        assert all(param.grad is None for param in copy.deepcopy(engine.model).parameters())
        norm = engine.clip_grad_norm_(0.1)
        engine.step()
        assert all(param.grad is None for param in params)
        expected = one_process(lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        assert far(full_weights(engine), expected) < (1e-6 if mode == "none" else 1e-3)
        assert norm > 0.1


def test_zero1_rejects_to_compute_with_gradients_that_are_elsewhere():
    run_ranks(scattered, 2)
