"""The private names of torch that engine relies on do what it needs. Red: torch changed; look there first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh.engine.offload import _is_cast_of_parameter
from halfmesh.engine.recompute import _ATTENTION
from halfmesh.utils import torch_private as _torch


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_forward_is_told_from_what_is_computed_again_in_backward(reentrant):
    layer, seen = nn.Linear(2, 2), []
    layer.register_forward_pre_hook(lambda *_: seen.append(_torch.is_in_backward()))
    x = torch.ones(1, 2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert seen == [False, True]


def test_casts_of_parameters_and_the_dropout_of_attention_are_known():
    param, frozen, x = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2), False), torch.ones(2, 2)
    for cast in (param.to(torch.bfloat16), param.to(torch.bfloat16).t(), param.half()[0]):
        assert _is_cast_of_parameter(cast)
    for other in (param, param.t(), frozen.half(), x.requires_grad_().half(), (param * 2).half(), param.half() * 2):
        assert not _is_cast_of_parameter(other)
    assert {operator._schema.arguments[place].name for operator, place in _ATTENTION.items()} == {"dropout_p"}
