"""The private names of torch that several rooms rely on do what they need. Red: torch changed; look there first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from halfmesh import _torch


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("factor", [1 / 3, 1.3 * 2.0**-26, 7.7])
def test_a_product_rounds_once(dtype, factor):
    factor = torch.tensor(factor)
    tensors = [torch.full(shape, 3e4, dtype=dtype) for shape in ((), (5,), (3, 4), (0, 2))]
    tensors.append(torch.full((4, 6), 3e4, dtype=dtype).t()[::2])
    wide = torch.promote_types(dtype, torch.float32)
    expected = [(tensor.to(wide) * factor).to(dtype) for tensor in tensors]
    _torch.foreach_mul_(tensors, factor)
    assert all(map(torch.equal, tensors, expected))


def test_operations_on_lists_of_several_dtypes():
    kinds = (torch.float16, torch.float32, torch.bfloat16, torch.float16)
    targets = [torch.zeros(2, dtype=dtype) for dtype in kinds]
    _torch.foreach_copy_(targets, [torch.full((2,), value) for value in (1.0, 2.0, 3.0, 4.0)])
    _torch.foreach_mul_(targets, torch.tensor(3.0))
    assert [(t.dtype, t.tolist()) for t in targets] == [
        (dtype, [value, value]) for dtype, value in zip(kinds, (3.0, 6.0, 9.0, 12.0), strict=True)
    ]
    _torch.foreach_copy_([], [])
    _torch.foreach_mul_([], torch.tensor(3.0))


def test_edit_stamps_see_every_kind_of_edit():
    param = nn.Parameter(torch.ones(3))
    stamps = [_torch.edit_stamp(param)]
    with torch.no_grad():
        param.fill_(2.0)
    stamps.append(_torch.edit_stamp(param))
    param.data = torch.zeros(3)
    stamps.append(_torch.edit_stamp(param))
    assert len(set(stamps)) == 3
    param.sum().backward()
    param.grad = None
    assert _torch.edit_stamp(param) == stamps[-1]


def test_versions_count_in_place_writes():
    with torch.inference_mode():
        uncounted = torch.ones(2)
    assert _torch.version(uncounted) == 0
    assert _torch.edit_stamp(uncounted) == (0, uncounted.data_ptr())
    for tensor in (torch.ones(2), torch.ones(2).to_sparse()):
        before = _torch.version(tensor)
        tensor.mul_(2)
        assert _torch.version(tensor) > before


@pytest.mark.parametrize("assign", [True, False])
def test_load_hooks_are_told_of_assign(assign):
    seen, layer = [], nn.Linear(2, 2)
    layer.register_load_state_dict_pre_hook(lambda m, s, p, metadata, *_: seen.append(_torch.assigns(metadata)))
    layer.load_state_dict(layer.state_dict(), assign=assign)
    assert seen == [assign]
