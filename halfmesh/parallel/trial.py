"""Trials of user code before training: a scope in which they leave no trace, and the difference of two outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..utils.tensors import tensors_of
from ..utils.torch_private import with_memory
from .modules import unchanged
from .rng import random_state, same_state, set_random_state

TOLERANCE, HALF_TOLERANCE = 1e-4, 0.1
"""Of norms, where all is computed in fp32 and where not. Rounding does far less, but may send some tokens to other
experts in half precision."""


@contextmanager
def no_side_effects(modules: Iterable[nn.Module], device: torch.device) -> Iterator[Callable[[], bool]]:
    """A scope without gradients after which all random generators, and the attributes, modes and buffers of `modules`,
    are as before. It gives a function that returns True if random numbers were drawn in the scope so far."""
    held = list(modules)
    state = random_state(device)
    with with_memory(), torch.no_grad(), unchanged(held):
        before = [(buffer, buffer.clone()) for module in held for buffer in module.buffers(recurse=False)]
        try:
            yield lambda: not same_state(state, random_state(device))
        finally:
            set_random_state(state, device)
            for buffer, value in before:  # some cannot be written: expanded, or made in inference mode
                if buffer.layout is not torch.strided or not torch.equal(buffer, value):
                    buffer.copy_(value)


def rounds_products() -> bool:
    """Return True if products of fp32 are rounded, to TF32 or bf16."""
    fp32 = {backend.matmul.fp32_precision for backend in (torch.backends.cuda, torch.backends.mkldnn)}
    return not fp32 <= {"none", "ieee"}


def find_gap(expected: Any, found: Any) -> float:
    """The largest difference of two outputs, relative to the norm of the expected one."""
    gaps = [0.0]
    for one, other in zip(tensors_of(expected), tensors_of(found), strict=True):
        if one.shape != other.shape:
            return float("inf")
        if one.is_floating_point():
            a, b = (x.detach().double().nan_to_num(0.0, 0.0, 0.0) for x in (one, other))
            gaps.append(float((a - b).norm() / a.norm().clamp_min(1e-30)))
    return max(gaps)
