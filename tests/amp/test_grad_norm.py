"""Norm, verdict and zeros of gradients, however they are laid out."""

import math

import pytest
import torch
from torch import nn

from halfmesh.amp.recipe import Recipe
from halfmesh.errors import InputError, NonFiniteError
from tests.support.updates import OPTIMIZERS, make_update

HALF = torch.float16


def step_with(*grads, recipe=None, **rules):
    """What an update returns whose parameters have these gradients."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    recipe = recipe or Recipe(grads[0].dtype, grads[0].dtype)
    update = make_update(params, OPTIMIZERS["sgd"], recipe, track_grad_norm=True, **rules)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    return update.step()


def test_norm_does_not_depend_on_the_layout():
    """A plain norm of so many elements on a CPU is 1e-5 off."""
    torch.manual_seed(0)
    whole = torch.randn(1_500_000) * torch.logspace(-6, 3, 1_500_000)
    exact = whole.double().norm().item()
    strided = [whole[::2], whole[1::2]], [whole.view(1000, 1500).t()]
    for grads in ([whole], [*whole[:700].split(7), whole[700:]], list(whole.split(100_003)), *strided):
        assert step_with(*grads).grad_norm == pytest.approx(exact, rel=1e-6)


def test_half_precision_gradients_accumulate_in_fp32():
    grad = torch.full((100_000,), 200.0, dtype=HALF)  # its sum of squares is 4e9, beyond fp16
    assert step_with(grad).grad_norm == pytest.approx(200 * math.sqrt(100_000), rel=1e-6)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("p", [2.0, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_one_bad_element_is_found(bad, p, dtype):
    good, grad = torch.ones(5, dtype=dtype), torch.ones(70_000, dtype=dtype)
    assert not step_with(good, grad, norm_type=p, on_nonfinite="skip").skipped
    grad[69_999] = bad
    assert step_with(good, grad, norm_type=p, on_nonfinite="skip").skipped
    with pytest.raises(NonFiniteError, match="'p1'"):
        step_with(good, grad, norm_type=p, on_nonfinite="raise")


def test_sparse_gradients_are_rejected_where_a_norm_is_needed():
    param = nn.Parameter(torch.zeros(4, 2))
    update = make_update([param], OPTIMIZERS["sgd"], max_norm=1.0)
    param.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(InputError, match=r"gradient of 'p0' is sparse.*sparse=False"):
        update.step()


@pytest.mark.promise("keys of NAIVE and TORCH")
def test_zeros_are_counted_in_every_layout_and_beside_nan():
    recipe = Recipe(torch.float32, torch.float32, count_zeros=True)
    wide = torch.ones(300, 400).t()
    wide[:7, 3] = 0
    bad = torch.tensor([0.0, -0.0, math.nan, math.inf])
    grads = wide, torch.zeros(()), bad, torch.empty(0), torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert step_with(*grads, recipe=recipe, on_nonfinite="skip").num_zeros == 7 + 1 + 2
    large = torch.zeros(7_000_000), torch.ones(7_000_000)  # each more than one bucket
    assert step_with(*large, recipe=recipe).num_zeros == 7_000_000
