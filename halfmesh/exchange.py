"""Give a tensor other memory, while it stays the same object."""

from __future__ import annotations

import torch
from torch import nn


def give_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """`tensor.data = value`, also where one of them is on the meta device, for which torch refuses that.

    Raises:
        RuntimeError: one of them is on the meta device, and somebody holds a weak reference to `tensor`.
    """
    if tensor.is_meta == value.is_meta:
        tensor.data = value
        return
    new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value.view(value.shape)
    vars(new).update(vars(tensor))
    torch.utils.swap_tensors(tensor, new)
