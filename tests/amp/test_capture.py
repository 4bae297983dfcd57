"""An update can be captured and replayed, as a CUDA graph does it: nothing in it depends on what the host knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfmesh.amp.recipe import FP32, LossScale, Recipe
from tests.support.updates import OPTIMIZERS, give, gradients, make_params, make_update, scale_of

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


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (FP32, "sgd_momentum"),
        (Recipe(loss_scale=SCALE), "adagrad"),
        (Recipe(torch.float16, torch.float16, False, True, TOLERANT), "adamw"),
    ],
    ids=["fp32", "scaled", "naive_fp16"],
)
def test_replays_are_updates(recipe, name):
    """Growth, overflows and clipping that bites or not: decided anew by each replay."""
    factors = [1, 1, torch.inf, 1, 1e3, 1, 1, 1, torch.inf, torch.nan, 1, 1]
    if recipe.loss_scale is None:
        factors = [1 if abs(f) > 1e3 or f != f else f for f in factors]

    def train(captured):
        params = make_params()
        update = make_update(params, OPTIMIZERS[name], recipe, max_norm=2.0, max_consecutive_skips=1000)
        capture, static = Capture(), []
        for step, factor in enumerate(factors):
            give(params, gradients(step), scale_of(update) * factor)
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
        return [p.detach() for p in params], update.state_dict()

    torch.testing.assert_close(train(True), train(False), rtol=0, atol=0)
