"""Tests that an optimizer may step a shard of a parameter."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict
from typing import Any

import torch
from torch import nn, optim

from ..errors import InputError
from ..utils.tensors import is_compound
from .rng import CPU
from .trial import no_side_effects

_STEPS = 2
_SIDE = 256  # of the matrix; some optimizers look at rows and columns of large ones only


def refuse_other_state(optimizer: optim.Optimizer) -> None:
    """Raise InputError if `optimizer`, whose parameters are shards, holds state of another shape: fused optimizers
    would read beyond the shard's memory."""
    for param, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != param.shape:
                raise InputError(
                    f"the loaded optimizer state has {name!r} of shape {tuple(value.shape)} for a parameter of "
                    f"which this rank holds {tuple(param.shape)}; load what the same rank saved in the same layout, or "
                    "load the whole state into the optimizer before initialize"
                )


def find_problem(optimizer: optim.Optimizer) -> str | None:
    """The reason why `optimizer` cannot step sharded parameters; None if it can.

    LAMB, Adafactor and Muon, for example, use a parameter's norm, rows or singular values: for two halves of a matrix
    their steps differ from that for the full matrix. So a matrix is stepped both ways, and the results are compared.
    """
    name = type(optimizer).__name__
    try:
        with no_side_effects((), CPU), torch.enable_grad():
            cells = itertools.product(optimizer.param_groups, (0, 1))
            differs = any(_differs(optimizer, group, dim) for group, dim in cells)
    except Exception as error:
        return (
            f"optimizer: could not test on a matrix whether {name} can step sharded parameters "
            f"({type(error).__name__}: {error}); use SGD, Adam, AdamW or another optimizer that steps dense matrices"
        )
    if differs:
        return (
            f"optimizer: {name} steps a parameter as a whole (its norm, rows or columns count), so a shard would get "
            "another step; use an elementwise one (SGD, Adam, AdamW), or tensor=1 and data='replicate'"
        )
    return None


def _differs(optimizer: optim.Optimizer, group: dict[str, Any], dim: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    start, *grads = tensors = [torch.randn(_SIDE, _SIDE, generator=generator) for _ in range(_STEPS + 1)]
    # Halves of different magnitude, or their norms would hardly differ; another one in the weights than in gradients.
    for tensor in tensors:
        tensor.narrow(dim, 0, _SIDE // 2).mul_(3.0 if tensor is start else 9.0)
    whole = _stepped(optimizer, group, start, grads)
    parts = zip(*(tensor.chunk(2, dim) for tensor in tensors), strict=True)
    halves = [_stepped(optimizer, group, part, list(grads)) for part, *grads in parts]
    return not torch.allclose(torch.cat(halves, dim), whole, rtol=1e-4, atol=1e-6)


def _stepped(
    optimizer: optim.Optimizer, group: dict[str, Any], start: torch.Tensor, grads: list[torch.Tensor]
) -> torch.Tensor:
    """`start` after a step with each of `grads`, by a copy of `optimizer` with the settings of `group`."""
    param = nn.Parameter(start.clone())
    trial = copy.copy(optimizer)
    # Not the group's learning rate, which may be 0 at the start of a warm-up.
    lr = torch.tensor(0.1) if isinstance(group.get("lr"), torch.Tensor) else 0.1
    trial.state, trial.param_groups = defaultdict(dict), [{**group, "lr": lr, "params": [param]}]
    for name, value in vars(optimizer).items():  # settings that an optimizer keeps outside of its groups
        if isinstance(value, (bool, int, float, str)):
            vars(trial).setdefault(name, value)
    for grad in grads:
        param.grad = grad.clone()
        type(optimizer).step(trial)  # not the instance's: a scheduler may have wrapped it
    for key, value in trial.state[param].items():
        if is_compound(value):
            raise InputError(f"it keeps {key!r} as a {type(value).__name__}, in blocks that shards would cut elsewhere")
    return param.detach()
