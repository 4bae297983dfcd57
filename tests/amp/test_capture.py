"""An update can be captured and replayed, as a CUDA graph does it: nothing in it depends on what the host knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfmesh.amp.recipe import FP32, LossScale, Recipe
from tests.support.updates import OPTIMIZERS, CountReads, give, gradients, make_params, make_update

SCALE = LossScale(initial=64.0, growth_interval=3, hysteresis=1)
TOLERANT = LossScale(initial=64.0, growth_interval=3, hysteresis=2)


class Capture(TorchDispatchMode):
    """Records operations with the tensors that they read and wrote. `replay` runs them on the same memory again."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            new = func(*args, **kwargs)
            for old, value in zip(tree_leaves(out), tree_leaves(new), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)


def held(update):
    state = [v for s in update.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    moving = [update.watch._counters]
    if update.scaler is not None:
        moving += [update.scaler.scale, update.scaler._growth_tracker, update.scaler._hysteresis_left]
    return [*(update.holdings.target(s).detach() for s in update.holdings.shards), *state, *moving]


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adam_amsgrad", "adagrad"])
@pytest.mark.parametrize(
    "recipe",
    [
        FP32,
        Recipe(loss_scale=SCALE),
        Recipe(loss_scale=TOLERANT),
        Recipe(torch.bfloat16, torch.bfloat16, False, True),
        Recipe(torch.float16, torch.float16, False, True, TOLERANT),
    ],
    ids=["fp32", "scaled", "hysteresis", "naive_bf16", "naive_fp16"],
)
def test_replays_are_updates(name, recipe):
    """Growth, overflows and clipping that bites or not: decided anew by each replay."""
    factors = [1, 1, torch.inf, 1, 1e3, 1, 1, 1, torch.inf, torch.nan, 1, 1]
    if recipe.loss_scale is None:
        factors = [1 if abs(f) > 1e3 or f != f else f for f in factors]

    def train(captured):
        params = make_params()
        update = make_update(params, OPTIMIZERS[name], recipe, max_norm=2.0, max_consecutive_skips=1000)
        capture, static = Capture(), []
        for step, factor in enumerate(factors):
            # The scale that backward would have seeded with, in the memory of the captured gradients.
            scale = update.scaler.scale.item() if update.scaler is not None else 1.0
            give(params, gradients(step), scale * factor)
            if not captured or step < 2:
                update.step()
                continue
            grads = [p.grad for p in params]
            if step == 2:
                static = grads
                with capture:
                    update.step()
                assert not [c for c in capture.calls if c[0] is torch.ops.aten._local_scalar_dense.default]
                continue
            for memory, grad in zip(static, grads, strict=True):
                memory.copy_(grad)
            with torch.no_grad():
                capture.replay()
        return held(update), params

    (ours, working), (theirs, expected) = train(True), train(False)
    for a, b in zip((*ours, *working), (*theirs, *expected), strict=True):
        assert torch.equal(a, b)


def test_what_moves_stays_where_it_is():
    """A graph has the addresses of what it reads and writes."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(loss_scale=TOLERANT), max_norm=1.0)
    places = []
    for step in range(8):
        give(params, gradients(step), torch.inf if step in (3, 4) else update.scaler.scale.item())
        with CountReads() as counter:
            update.step()
        assert counter.reads == 0
        places.append([tensor.data_ptr() for tensor in held(update)])
    assert places[1:] == places[1:2] * 7


def test_results_keep_what_they_were_taken_with():
    """The scale moves in place, but not in the result of an earlier step."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(loss_scale=LossScale(initial=8.0, growth_interval=1)))
    results = []
    for step in range(4):
        give(params, gradients(step), update.scaler.scale.item())
        results.append(update.step())
    assert [result.loss_scale for result in results] == [8.0, 16.0, 32.0, 64.0]
    norms = [torch.cat([g.flatten() for g in gradients(step)]).norm().item() for step in range(4)]
    assert [result.grad_norm for result in results] == pytest.approx(norms, rel=1e-6)
