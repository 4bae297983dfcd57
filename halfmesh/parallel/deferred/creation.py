"""How a user builds a model whose values are made later, by `initialize`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...utils.torch_private import outside_of_dry_run
from .recording import Recording


@contextmanager
def deferred_init() -> Iterator[None]:
    """Models built within have shapes and no memory; `initialize` makes the values that this rank holds.

    The values are the same in every layout, and in one process: each random tensor has its own seed, drawn from torch's
    generator. They are not those of an ordinary build, but have the same distribution.

    Example:
        with halfmesh.deferred_init():
            model = LlamaForCausalLM(config)
        engine = halfmesh.initialize(model, lambda params: AdamW(params, lr=1e-4), config="config.py")
    """
    with outside_of_dry_run():
        recording = Recording()
        with warnings.catch_warnings():
            # Copies of tensors ask for their address first.
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")
            with recording:
                yield


@contextmanager
def model_creation(dtype: torch.dtype | str | None = None, *, deferred: bool = False) -> Iterator[None]:
    """Models built within have parameters of `dtype`; with `deferred`, no memory either, see `deferred_init`.

    Args:
        dtype: of floating-point tensors that are made without one: float32, float16, bfloat16 or float64; None: torch's
            default. Mode NAIVE takes a model in its own dtype, and its fp32 masters start from the rounded weights.
    """
    chosen = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    before = torch.get_default_dtype()
    with deferred_init() if deferred else nullcontext():
        if chosen is not None:
            torch.set_default_dtype(chosen)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def build(model: Callable[[], Any]) -> nn.Module:
    """What `model()` returns, built without memory.

    Raises:
        InputError: it raised something.
    """
    try:
        with deferred_init():
            built: nn.Module = model()
    except Exception as error:
        name = getattr(model, "__qualname__", type(model).__name__)
        raise InputError(
            f"model: the callable {name} raised {type(error).__name__}: {error}. It is called without arguments, and "
            "what it builds has no memory (halfmesh.deferred_init); if that is the reason, build the model first and "
            "pass the model itself"
        ) from error
    return built
