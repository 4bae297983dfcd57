"""A tensor gets other memory, and stays the same object."""

from __future__ import annotations

import torch
from torch import nn

from halfmesh.exchange import give_memory


def test_to_and_from_the_meta_device():
    param, buffer = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False), torch.empty(2, device="meta")
    param.tag = "mine"
    holder = nn.Linear(3, 2)
    holder.weight = param
    give_memory(param, torch.ones(2, 3))
    assert (holder.weight is param, param.sum().item(), param.tag, param.requires_grad) == (True, 6, "mine", False)
    give_memory(param, torch.empty(1, 3, device="meta"))
    assert (param.is_meta, param.shape, param.tag) == (True, (1, 3), "mine")
    give_memory(buffer, torch.ones(2))
    assert (type(param), type(buffer), buffer.tolist()) == (nn.Parameter, torch.Tensor, [1, 1])
