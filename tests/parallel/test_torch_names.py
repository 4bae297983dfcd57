"""The private names of torch that parallel relies on do what it needs. Red: torch changed; look there first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.parallel.sharding.fsdp import FREED


def test_backward_through_memory_that_was_freed():
    """As FSDP2 frees gathered weights."""
    weight = nn.Parameter(torch.ones(3, 3))
    out = (torch.ones(1, 3, requires_grad=True) @ weight.t()).sum()
    weight.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError) as caught:
        out.backward()
    assert FREED in str(caught.value)


def test_a_storage_is_one_object_as_long_as_its_memory():
    param = nn.Parameter(torch.ones(3))
    held = param.untyped_storage()
    with torch.no_grad():
        param.fill_(2.0)
    assert param.untyped_storage() is held
    assert param.view(3, 1).untyped_storage() is held
    for _ in range(20):  # memory that was free would soon be used again
        param.data = torch.zeros(3)
        assert param.untyped_storage() is not held
