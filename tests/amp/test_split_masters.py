"""The bits of split masters: weights and remainders make them again."""

from __future__ import annotations

import torch

from halfmesh.amp.split_masters import join_, split_


def every_kind() -> torch.Tensor:
    """fp32 of all upper halves, each with the lower ones at the edges, and some of a million others."""
    low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    high = torch.arange(2**16)
    bits = ((high[:, None] << 16) + low).flatten()
    others = torch.randint(2**32, (2**20,), generator=torch.Generator().manual_seed(0))
    return torch.cat([bits, others]).to(torch.int32).view(torch.float32)


def test_every_number_comes_back_bit_for_bit():
    masters = every_kind()
    weights = masters.clone()
    remainders = split_(weights)
    held = weights.bfloat16()
    assert remainders.dtype == torch.int16
    again = held.float()
    join_(again, remainders)
    numbers = ~masters.isnan() & ((masters == 0) | (masters.abs() >= 2**-134))
    assert torch.equal(again.view(torch.int32)[numbers], masters.view(torch.int32)[numbers])
    nans = masters.isnan()
    assert again[nans].isnan().all()
    assert held[nans].isnan().all()
    small = ~numbers & ~nans
    assert small.any()
    assert torch.equal(again[small], torch.zeros(()).copysign(masters[small]))
    # The weights are the nearest ones, as torch rounds; but ties go away from 0.
    bits = masters.view(torch.int32).long() & 0xFFFFFFFF
    tie = (bits & 0xFFFF) == 0x8000
    assert torch.equal(held[~tie & ~nans], masters.bfloat16()[~tie & ~nans])
    found = held[tie & ~nans].view(torch.int16).long() & 0xFFFF
    assert torch.equal(found, (bits[tie & ~nans] >> 16) + 1)


def test_a_zero_that_was_written_is_no_nan():
    """As a mask writes it into a weight: with a negative remainder its bits would be a nan."""
    weights = torch.tensor([0.0, -0.0, 0.0, 1.0])
    join_(weights, torch.tensor([-5, -5, 5, -5], dtype=torch.int16))
    assert weights[:3].tolist() == [0.0, 0.0, 0.0]
    assert 1 - 2**-20 < float(weights[3]) < 1
