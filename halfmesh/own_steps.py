"""Whose an optimizer's `step` is: torch's, its class's, or one that was put on the object."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import optim

_SOURCES = os.path.dirname(torch.__file__) + os.sep
"""Where torch's own code is."""


def step_of(optimizer: optim.Optimizer) -> Any:
    """What `optimizer.step` is: of the object, or of its class."""
    own = optimizer.__dict__
    return own["step"] if "step" in own else type(optimizer).step


def is_of_torch(step: Any) -> bool:
    """Whether `step`, and all that it wraps, is torch's: its optimizers' own, and the wrappers of its schedulers."""
    return _is_torchs(_innermost(step))


def is_of_class(optimizer: optim.Optimizer) -> bool:
    """Whether `optimizer` steps as its class does. (A scheduler of torch's only notes that it was called.)"""
    return _innermost(step_of(optimizer)) is _innermost(type(optimizer).step)


def _innermost(step: Any) -> Any:
    """What torch's wrappers around `step` come down to."""
    while True:
        step = getattr(step, "__func__", step)
        wrapped = getattr(step, "__wrapped__", None)
        if wrapped is None or not _is_torchs(step):
            return step
        step = wrapped


def _is_torchs(step: Any) -> bool:
    code = getattr(step, "__code__", None)
    return code is not None and code.co_filename.startswith(_SOURCES)
