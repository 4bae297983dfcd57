"""Bytes that one rank holds for the model's state: parameters, gradients, masters, optimizer state."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import nn, optim

from ..amp.master_weights import bucket_bytes
from ..amp.optimizer import MixedPrecisionOptimizer
from ..errors import InputError

# fp32 tensors of a parameter's size that each optimizer keeps.
_STATE_TENSORS = {
    optim.Adam: 2,
    optim.AdamW: 2,
    optim.NAdam: 2,
    optim.RAdam: 2,
    optim.Adamax: 2,
    optim.Adadelta: 2,
    optim.Adagrad: 1,
    optim.RMSprop: 1,
    optim.Rprop: 2,
    optim.ASGD: 1,
}


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank, without activations and communication buffers."""

    parameters: int
    masters: int
    optimizer: int | None
    """None for an optimizer whose state is not known."""
    gradients: int
    """At their peak, with the masters' temporary fp32 gradients."""

    @property
    def known(self) -> int:
        """The sum of the known parts."""
        return self.parameters + self.masters + self.gradients + (self.optimizer or 0)


def state_bytes(
    model: nn.Module, update: MixedPrecisionOptimizer, reduce_dtype: torch.dtype | None = None
) -> StateBytes:
    """Count the bytes of `model` and `update` on this rank; gradients are reduced over dp in `reduce_dtype`."""
    parts: dict[torch.Tensor, torch.Tensor] = {  # of sharded parameters
        shard.source.param: shard.param
        for shard in update.master_weights.trained
        if shard.source is not None and shard.original is not None
    }
    params = [parts.get(tensor, tensor) for tensor in (*model.parameters(), *model.buffers())]
    trained = sum(s.param.numel() for s in update.master_weights.trained if s.param.requires_grad)
    receivers = [parts.get(s.param, s.param) for s in update.master_weights.receivers if s.param.requires_grad]
    grads = sum(param.numel() * param.element_size() for param in receivers)
    temporary = 0
    cuts = update.publisher is not None and not parts
    if reduce_dtype is not None and cuts:  # of all parameters, and reduced ones of this rank's shards
        temporary = trained * reduce_dtype.itemsize
    elif reduce_dtype is not None:  # held in the reduction's buckets, which masters take as they are
        grads = max(grads, trained * reduce_dtype.itemsize)
    elif update.loss_scales.multi is not None:  # the sum in fp32, and the gradients of one backward
        temporary = trained * 4
    elif update.master_weights.masters:
        limit = bucket_bytes(update.device, trained) if update.stepper.can_step_in_buckets else trained * 4
        temporary = min(trained * 4, limit)
    tensors = _state_tensors(update.optimizer)
    return StateBytes(
        parameters=sum(p.numel() * p.element_size() for p in params),
        masters=sum(m.numel() * 4 for m in update.master_weights.masters.values()),
        optimizer=None if tensors is None else trained * 4 * tensors,
        gradients=grads + temporary,
    )


def _state_tensors(optimizer: optim.Optimizer) -> int | None:
    if type(optimizer) is optim.SGD:
        return int(any(group["momentum"] for group in optimizer.param_groups))
    tensors = _STATE_TENSORS.get(type(optimizer))
    if tensors is not None:
        tensors += any(group.get("amsgrad") for group in optimizer.param_groups)
        if type(optimizer) is optim.RMSprop:
            tensors += any(group["momentum"] > 0 for group in optimizer.param_groups)
            tensors += any(group["centered"] for group in optimizer.param_groups)
    return tensors


def parse_bytes(text: str) -> int:
    """The number of bytes in `text`: "80GB" (of 1000**3), "80 GiB" (of 1024**3), "80e9".

    Raises:
        InputError: it is no number with a unit.
    """
    found = re.fullmatch(r"\s*(\d+\.?\d*(?:e\d+)?)\s*([kmgt]?)(i?)b?\s*", text.lower())
    if found is None:
        raise InputError(f"{text!r} is no amount of memory; write 80GB, 80GiB or 80e9")
    number, letter, binary = found.groups()
    return round(float(number) * (1024 if binary else 1000) ** " kmgt".index(letter or " "))
