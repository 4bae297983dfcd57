"""Whether an optimizer may step a part of a parameter: found by trying."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim

from .. import torch_private

_STEPS = 3


def find_problem(optimizer: optim.Optimizer) -> str | None:
    """Why `optimizer` cannot step divided parameters, if it cannot.

    One that looks at a parameter as a whole (its norm, its rows, its singular values: LAMB, Adafactor, Muon) takes
    another step on the parts than on the whole. A small matrix is stepped whole and in parts, and compared.
    """
    name = type(optimizer).__name__
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            apart = any(_differs(optimizer, group, dim) for group in optimizer.param_groups for dim in (0, 1))
    except Exception as error:
        return (
            f"optimizer: whether {name} can step divided parameters could not be tried out on a small matrix "
            f"({type(error).__name__}: {error}); use SGD, Adam, AdamW or another optimizer that steps dense float32 "
            "matrices"
        )
    if apart:
        return (
            f"optimizer: {name} steps a parameter as a whole (its norm, rows or columns count), so parts of it would "
            "be stepped otherwise; use SGD, Adam, AdamW or another elementwise optimizer, or tensor=1"
        )
    return None


def _differs(optimizer: optim.Optimizer, group: dict[str, Any], dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 4, generator=generator) for _ in range(_STEPS + 1))
    # Halves of different size, or their norms would hardly differ.
    tensors = [tensor * torch.tensor([1.0, 1.0, 9.0, 9.0]).view((4, 1) if dim == 0 else (1, 4)) for tensor in grads]
    whole = _stepped(optimizer, group, start, tensors)
    parts = zip(*(tensor.chunk(2, dim) for tensor in (start, *tensors)), strict=True)
    halves = [_stepped(optimizer, group, part, list(grads)) for part, *grads in parts]
    return not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: optim.Optimizer, group: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor:
    """`start` after a step with each of `grads`, by a copy of `optimizer` that has the settings of `group`."""
    param = nn.Parameter(start.clone())
    lr = {"lr": 0.1} if "lr" in group else {}  # 0 at the start of a warm-up, where nothing would be seen
    trial = torch_private.bare_copy(optimizer, [{**group, **lr, "params": [param]}])
    for grad in grads:
        param.grad = grad.clone()
        type(optimizer).step(trial)  # not the instance's: a scheduler may have wrapped it
    return param.detach()
