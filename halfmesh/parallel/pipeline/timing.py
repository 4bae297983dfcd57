"""How long the pieces of a model take, for stages that take alike."""

from __future__ import annotations

import inspect
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ...tensors import map_tensors, tensors_of
from .pieces import Call, Piece
from .stage import Scope

REPEATS = 3


def measure(
    model: nn.Module, pieces: Sequence[Piece], call: Call, device: torch.device, scope: Scope
) -> dict[str, float]:
    """Seconds of one forward and backward of each piece on `device`, by its name: the median of a few, after one that
    does not count. The model's parameters, buffers and the random numbers are afterwards as they were.

    Args:
        model: whole, on any device; its pieces are moved to `device` one by one.
        call: with tensors on `device`.
        scope: what the forward runs in.
    """
    times: dict[str, float] = {}
    carry: Any = None
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.enable_grad(), _as_it_was(model):
        for piece in pieces:
            with _moved(model, piece, device):
                seconds = []
                for _ in range(1 + REPEATS):
                    entered = map_tensors(_entered, carry)
                    begin = _now(device)
                    with scope():
                        result = piece.run(model, call.afresh(), entered)
                    outputs = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
                    if outputs:
                        torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
                    seconds.append(_now(device) - begin)
                times[piece.name] = statistics.median(seconds[1:])
                carry = map_tensors(torch.Tensor.detach, result)
    return times


def sample_call(model: nn.Module, loader: Any, rows: int, device: torch.device) -> Call:
    """The first rows of a loader's dataset as the model would be called with them: a dict by name, of a tuple as many
    items as the forward needs. The loader itself is not iterated."""
    rows = min(rows, len(loader.dataset))
    batch = loader.collate_fn([loader.dataset[index] for index in range(rows)])
    batch = map_tensors(lambda tensor: tensor.to(device), batch)
    parameters = inspect.signature(model.forward).parameters
    if isinstance(batch, Mapping):
        return Call((), {name: value for name, value in batch.items() if name in parameters})
    if not isinstance(batch, (tuple, list)):
        return Call((batch,))
    needed = [p for p in parameters.values() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    return Call(tuple(batch[: max(1, len(needed))]))


def _entered(tensor: torch.Tensor) -> torch.Tensor:
    """As a stage gets it: no leaf, so that it may be changed in place."""
    tensor = tensor.detach()
    return tensor.requires_grad_().clone() if tensor.is_floating_point() else tensor.clone()


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@contextmanager
def _as_it_was(model: nn.Module) -> Iterator[None]:
    """Whatever runs within, buffers have their values afterwards, and parameters no gradients."""
    before = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    training = [(module, module.training) for module in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, was in training:
            module.training = was
        for buffer, value in before:
            buffer.copy_(value)
        for param in model.parameters():
            param.grad = None


@contextmanager
def _moved(model: nn.Module, piece: Piece, device: torch.device) -> Iterator[None]:
    """The tensors of a piece are on `device`."""
    used = [
        tensor
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
        if any(name == use or name.startswith(f"{use}.") for use in piece.uses)
    ]
    before = [tensor.data for tensor in used]
    for tensor in used:
        tensor.data = tensor.data.to(device)
    try:
        yield
    finally:
        for tensor, data in zip(used, before, strict=True):
            tensor.grad = None
            if tensor.data.device != data.device:
                data.copy_(tensor.data)
            tensor.data = data
