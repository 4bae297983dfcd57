"""All ranks start from the weights, buffers and optimizer state of rank 0; their models must match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn, optim

from ..distributed.env import RankNames
from ..errors import InputError, shorten
from .rank_checks import same_on_ranks, same_trained


def broadcast_initial_state(
    model: nn.Module,
    optimizer: optim.Optimizer,
    broadcast: Callable[[torch.Tensor], Any],
    ranks: RankNames,
) -> None:
    """See `ParallelContext.broadcast_initial_state`, whose `broadcast` this is."""
    sparse = [name for name, buffer in model.named_buffers() if buffer.layout != torch.strided]
    if sparse:
        raise InputError(f"the buffers {shorten(sparse)} are sparse, which several ranks cannot share; make them dense")
    state = list(_state_tensors(optimizer))
    _refuse_differences(model, optimizer, state, ranks)
    # state_dict would miss non-persistent buffers, and parameters() alone would miss all buffers.
    for tensor in (*model.parameters(), *model.buffers(), *state):
        if not tensor.is_meta:  # a deferred tensor gets its value later
            broadcast(tensor)


def _refuse_differences(
    model: nn.Module, optimizer: optim.Optimizer, state: list[torch.Tensor], ranks: RankNames
) -> None:
    mine = {
        "the model's parameters": [(n, tuple(p.shape), str(p.dtype)) for n, p in model.named_parameters()],
        "the model's buffers": [(n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()],
        "the optimizer": [type(optimizer).__name__, *map(plain_settings, optimizer.param_groups)],
        "the optimizer's state": [(tuple(t.shape), str(t.dtype)) for t in state],
    }
    for what, value in mine.items():
        same_on_ranks(
            value,
            what=f"{what} must be the same on all ranks, but names, shapes, dtypes or settings on {{ranks}} differ "
            "from rank 0's; build the same model and optimizer, and load the same checkpoint, on every rank before "
            "initialize",
        )
    names, trained = zip(*((name, param.requires_grad) for name, param in model.named_parameters()), strict=True)
    same_trained(names, bytes(trained), None, ranks)


def _state_tensors(optimizer: optim.Optimizer) -> Iterator[torch.Tensor]:
    """Tensors of the optimizer's state in the order of its parameters."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in optimizer.state:
                yield from (v for v in optimizer.state[param].values() if isinstance(v, torch.Tensor))


def plain_settings(group: dict[str, Any]) -> list[tuple[str, Any]]:
    """The plain values of a parameter group. (Reprs of objects may have addresses, which differ between ranks.)"""
    values = {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in group.items()}
    return [(name, value) for name, value in sorted(values.items()) if name != "params" and is_plain(value)]


def is_plain(value: Any) -> bool:
    """Return True if `value` is a number, a string or None, or a tuple or list of these: equal if their reprs are."""
    return (
        value is None
        or isinstance(value, (int, float, str))
        or (isinstance(value, (tuple, list)) and all(map(is_plain, value)))
    )
