"""A tensor gets other memory, and stays the same object."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from halfmesh.exchange import give_memory


def test_to_and_from_the_meta_device():
    param = nn.Parameter(torch.empty(2, 3, device="meta"), requires_grad=False)
    param.tag = "mine"
    holder = nn.Linear(3, 2)
    holder.weight = param
    give_memory(param, torch.ones(2, 3))
    assert (holder.weight is param, param.sum().item(), param.tag, param.requires_grad) == (True, 6, "mine", False)
    assert type(param) is nn.Parameter
    give_memory(param, torch.empty(1, 3, device="meta"))
    assert (param.is_meta, param.shape, param.tag) == (True, (1, 3), "mine")


def test_buffers_stay_buffers():
    buffer = torch.empty(2, device="meta")
    give_memory(buffer, torch.ones(2))
    assert type(buffer) is torch.Tensor
    assert buffer.tolist() == [1, 1]


def test_on_one_device_it_is_data():
    param = nn.Parameter(torch.zeros(2))
    value = torch.ones(3)
    give_memory(param, value)
    assert param.data_ptr() == value.data_ptr()


def test_weak_references_prevent_it():
    param = nn.Parameter(torch.empty(2, device="meta"))
    held = weakref.ref(param)
    with pytest.raises(RuntimeError, match="weakref"):
        give_memory(param, torch.ones(2))
    assert held() is param
