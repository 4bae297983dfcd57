"""Parts and wholes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfmesh.parallel.split import Split


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    dim = draw(st.integers(0, len(shape) - 1))
    blocks, size = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    shape[dim] *= blocks * size
    return Split(dim, blocks), size, shape


@given(cases())
def test_parts_join_to_the_whole(case):
    split, size, shape = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [split.cut(whole, rank, size) for rank in range(size)]
    assert torch.equal(split.join(parts), whole)
    assert {split.whole_shape(part.shape, size) for part in parts} == {whole.shape}
    assert len({part.shape for part in parts}) == 1
    assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, whole.flatten())


def test_each_block_is_divided_by_itself():
    whole = torch.tensor([10, 11, 12, 13, 20, 21, 22, 23, 30, 31, 32, 33])  # q, k, v of 4 rows each
    assert Split(0, 3).cut(whole, 0, 2).tolist() == [10, 11, 20, 21, 30, 31]
    assert Split(0, 3).cut(whole, 1, 2).tolist() == [12, 13, 22, 23, 32, 33]
    assert Split(0).cut(whole, 1, 2).tolist() == [22, 23, 30, 31, 32, 33]


def test_columns():
    whole = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    assert Split(1).cut(whole, 1, 2).tolist() == [[3, 4], [7, 8]]
    assert Split(1, 2).cut(whole, 1, 2).tolist() == [[2, 4], [6, 8]]


@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_has_memory_of_its_own(dim):
    whole = torch.zeros(4, 4)
    for tensor in (whole, whole.t(), torch.zeros(4, 4, 2).permute(1, 0, 2)):
        part = Split(dim).cut(tensor, 0, 1)  # even the only one
        assert part.is_contiguous()
        part.fill_(1.0)
    assert whole.sum() == 0


def test_half_precision_is_carried_exactly():
    whole = torch.randn(6, 4).to(torch.bfloat16)
    parts = [Split(0, 3).cut(whole, rank, 2) for rank in range(2)]
    assert parts[0].dtype == torch.bfloat16
    assert torch.equal(Split(0, 3).join(parts), whole)


def test_how_it_reads():
    assert str(Split(1)) == "dim 1"
    assert str(Split(0, 3)) == "dim 0 in 3 blocks"
