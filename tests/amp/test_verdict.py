"""Norm, verdict and zeros of gradients, however they are laid out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfmesh.amp.collected import Gradients
from halfmesh.amp.verdict import first_nonfinite, measure
from halfmesh.errors import InputError
from halfmesh.shard import OneRank, ParamShard

CPU = torch.device("cpu")


def of(*grads: torch.Tensor, weight: float = 1.0) -> Gradients:
    params = [nn.Parameter(torch.empty(grad.shape, dtype=grad.dtype)) for grad in grads]
    return Gradients.of((ParamShard(f"p{i}", p, weight), g) for i, (p, g) in enumerate(zip(params, grads, strict=True)))


def norm_of(*grads: torch.Tensor, p: float = 2.0, weight: float = 1.0) -> float:
    return measure(of(*grads, weight=weight), OneRank(), CPU, p).norm.item()


def test_norm_of_40_million_elements():
    torch.manual_seed(0)
    grad = torch.randn(40_000_000)
    exact = grad.double().norm().item()
    assert norm_of(grad) == pytest.approx(exact, rel=1e-6)


def test_norm_does_not_depend_on_the_layout():
    torch.manual_seed(0)
    whole = torch.randn(1_500_000) * torch.logspace(-6, 3, 1_500_000)
    exact = whole.double().norm().item()
    layouts = [
        [whole],
        [*whole.split(7)[:100], whole[700:]],
        list(whole.split(100_003)),
        [whole[::2], whole[1::2]],
        [whole.view(1000, 1500).t()],
    ]
    for grads in layouts:
        assert norm_of(*grads) == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, math.inf])
def test_norm_types(p):
    torch.manual_seed(0)
    a, b = torch.randn(70_000), torch.randn(3, 5)
    expected = torch.linalg.vector_norm(torch.cat([a, b.flatten()]).double(), p).item()
    assert norm_of(a, b, p=p) == pytest.approx(expected, rel=1e-6)


def test_half_precision_gradients_accumulate_in_fp32():
    grad = torch.full((100_000,), 200.0, dtype=torch.float16)  # its sum of squares is 4e9, beyond fp16
    assert norm_of(grad) == pytest.approx(200 * math.sqrt(100_000), rel=1e-6)


def test_norm_of_double_gradients_is_a_double():
    grad = torch.tensor([1.0, 1e-9], dtype=torch.float64) * 1e100
    assert norm_of(grad) == pytest.approx(1e100, rel=1e-12)


def test_weight_counts_copies_once():
    grad = torch.tensor([3.0, 4.0])
    assert norm_of(grad, grad, weight=0.5) == pytest.approx(5.0)


def test_no_gradients_at_all():
    verdict = measure(of(), OneRank(), CPU)
    assert (verdict.norm.item(), verdict.found_inf.item()) == (0.0, 0.0)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_found_inf(bad, p, dtype):
    good = torch.ones(5, dtype=dtype)
    grad = torch.ones(70_000, dtype=dtype)
    assert measure(of(good, grad), OneRank(), CPU, p).found_inf.item() == 0.0
    grad[69_999] = bad
    assert measure(of(good, grad), OneRank(), CPU, p).found_inf.item() == 1.0
    assert first_nonfinite(of(good, grad)) == "p1"


def test_zeros_are_counted():
    verdict = measure(of(torch.tensor([0.0, 1.0, 0.0]), torch.zeros(2, 2)), OneRank(), CPU, count_zeros=True)
    assert verdict.num_zeros is not None
    assert verdict.num_zeros.item() == 6


def test_sparse_gradients_are_refused():
    grad = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (4, 2), check_invariants=True)
    with pytest.raises(InputError, match=r"gradient of 'p0' is sparse .*sparse=False"):
        measure(of(grad), OneRank(), CPU)
