"""The gradients of an update, and what is remembered of how they are laid out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from halfmesh.amp.collected import Gradients
from halfmesh.amp.recipe import FP32, Recipe
from halfmesh.amp.verdict import measure
from halfmesh.shard import OneRank, ParamShard
from tests.support.updates import OPTIMIZERS, give, gradients, make_params, make_update


def make(make_optimizer="adamw", **rules):
    params = make_params()
    update = make_update(params, OPTIMIZERS[make_optimizer], FP32, **rules)
    give(params, gradients(0))
    return params, update


def lose_one(params, update):
    params[1].grad = None


def lay_one_out_anew(params, update):
    params[0].grad = params[0].grad.t().contiguous().t()


def widen_one(params, update):
    update.holdings.trained[0].main_grad, params[0].grad = params[0].grad.double(), None


def make_one_sparse(params, update):
    params[0].grad = params[0].grad.to_sparse()


def refresh(params, update):
    update.holdings.refresh()


def test_the_layout_is_the_same_object_until_something_changes():
    params, update = make()
    layout = update.gradients().layout
    give(params, gradients(1))
    assert update.gradients().layout is layout


@pytest.mark.parametrize("max_norm", [0.0, 1.0])
def test_kinds_are_found_out_where_a_norm_is_asked_for(max_norm):
    _, update = make(max_norm=max_norm)
    layout = update.gradients().layout
    update.step()
    assert (layout.kinds is None) == (max_norm == 0)


@pytest.mark.parametrize("change", [lose_one, lay_one_out_anew, widen_one, make_one_sparse, refresh])
def test_what_changes_the_layout(change):
    params, update = make()
    layout = update.gradients().layout
    change(params, update)
    grads = update.gradients()
    assert grads.layout is not layout
    assert grads.layout.fits == (change is refresh), "the others are not what the optimizer can take as it is"
    assert grads.layout.is_sparse == (change is make_one_sparse)
    assert [shard.name for shard, _ in grads] == (["p0", "p2"] if change is lose_one else ["p0", "p1", "p2"])
    assert [len(kind.sizes) for kind in grads.find_kinds()] == {widen_one: [1, 2], lose_one: [2]}.get(change, [3])


def test_another_parameter_without_a_gradient():
    params = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
    update = make_update(params, OPTIMIZERS["adamw"])
    ones = torch.ones(3)
    for missing in (0, 2):
        give(params, [None if place == missing else ones for place in range(3)])
        assert [shard.param is params[missing] for shard, _ in update.gradients()] == [False, False]


@pytest.mark.parametrize("wide", [False, True])
def test_gradients_of_what_has_masters_never_fit(wide):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(torch.bfloat16, torch.bfloat16, False, True))
    give(params, gradients(0))
    for shard in update.holdings.trained if wide else ():  # in the masters' own dtype, but not attached to them
        shard.main_grad, shard.param.grad = shard.param.grad.float(), None
    assert not update.gradients().layout.fits


def test_a_wide_gradient_of_the_parameters_own_dtype_is_the_parameters():
    shard = ParamShard("p", nn.Parameter(torch.zeros(2)))
    shard.param.grad, shard.main_grad = torch.ones(2), torch.full((2,), 2.0)
    grad = shard.take_grad()
    assert grad is shard.param.grad
    assert shard.main_grad is None
    assert grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("rows", [0, 1, 3, 70_000])
def test_parameters_of_another_size_have_the_same_strides(rows, norm_type):
    """A layout does not know sizes: SGD goes on with a parameter that was pruned, or has grown."""
    params, update = make("sgd", max_norm=1.0, norm_type=norm_type)
    update.step()
    params[0].data = torch.zeros(rows, 5)
    update.zero_grad()
    give(params, [torch.ones_like(params[0]), *gradients(1)[1:]])
    layout = update.gradients().layout
    verdict = measure(Gradients(layout, [p.grad for p in params]), OneRank(), torch.device("cpu"), norm_type)
    whole = torch.cat([p.grad.flatten().double() for p in params])
    torch.testing.assert_close(verdict.norm, torch.linalg.vector_norm(whole, norm_type), rtol=1e-6, atol=0)
    update.step()
