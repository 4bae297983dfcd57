"""What is the user's own around an optimizer of torch: its `step`, hooks, schedulers, and its state."""

import math

import pytest
import torch
from torch import nn, optim
from torch.optim.optimizer import register_optimizer_step_pre_hook

from halfmesh.amp.recipe import FP32, Recipe
from tests.support.updates import (
    DYNAMIC,
    OPTIMIZERS,
    assert_close,
    by_hand,
    give,
    make_params,
    make_update,
    scale_of,
    take,
)

SCALED = Recipe(loss_scale=DYNAMIC)


@pytest.mark.parametrize("everywhere", [False, True], ids=["its own", "of all optimizers"])
@pytest.mark.parametrize("recipe", [FP32, SCALED], ids=["fp32", "scaled"])
def test_hooks_before_the_step_see_gradients_as_they_are_used(recipe, everywhere):
    """Unscaled and clipped. They do not run in a skipped update."""
    norms, params = [], make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=0.5)
    register = register_optimizer_step_pre_hook if everywhere else update.optimizer.register_step_pre_hook
    handle = register(lambda *_: norms.append(nn.utils.get_total_norm([param.grad for param in params]).item()))
    try:
        take(update, params, 0)
        assert recipe is FP32 or take(update, params, 0, math.inf).skipped
    finally:
        handle.remove()
    assert norms == pytest.approx([0.5], rel=1e-5)
    assert_close(params, by_hand(OPTIMIZERS["adamw"], 1, 0.5)[0])


@pytest.mark.parametrize("change", ["load", "settings"])
def test_state_that_others_change_is_what_the_next_update_uses(change):
    def train(fused):
        params = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.full((3,), 2.0))]
        update = make_update(params, OPTIMIZERS["adamw"], fused=fused)
        optimizer = update.optimizer
        for step in range(4):
            if step == 2 and change == "load":
                optimizer.load_state_dict(optimizer.state_dict())
            elif step == 2:
                optimizer.param_groups[0].update(lr=0.2, weight_decay=0.5)
            for number, param in enumerate(params):
                param.grad = torch.full((3,), 1.0 + number - 3 * step * number)
            update.step()
        return params

    assert_close(train("auto"), train(False))


# -- fused where that is exact, and the user's choice otherwise -------------------------------------------------------


@pytest.mark.parametrize("choice", ["auto", False])
def test_fused_leaves_the_users_choice(choice):
    chosen = {}
    for name in ("adamw", "sgd_momentum", "adam_foreach", "sgd_dampening", "rmsprop"):
        group = make_update(make_params(), OPTIMIZERS[name], fused=choice).optimizer.param_groups[0]
        chosen[name] = (group.get("fused"), group.get("foreach"))
    assert chosen == {
        "adamw": (True, False) if choice == "auto" else (None, None),
        "sgd_momentum": (True, False) if choice == "auto" else (None, None),
        "adam_foreach": (None, True),
        "sgd_dampening": (None, None),
        "rmsprop": (None, None),
    }


def test_a_subclass_with_its_own_step_is_not_trusted_with_the_scale():
    class MyAdam(optim.Adam):
        def step(self, closure=None):
            assert not hasattr(self, "grad_scale")
            super().step()

    params = make_params()
    update = make_update(params, lambda p: MyAdam(p, lr=0.01, fused=True), SCALED)
    for step in range(3):
        take(update, params, step)
    assert_close(params, by_hand(OPTIMIZERS["adam"], 3)[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_parameters_with_gaps_or_a_changed_layout(name):
    """The CPU's fused kernels ignore strides: they must not be chosen where those of parameters or state differ."""

    def run(with_update):
        torch.manual_seed(0)
        gaps, image, conv = (
            nn.Parameter(torch.randn(4, 8)[:, :5]),
            nn.Parameter(torch.randn(4, 3, 3, 3)),
            nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last),
        )
        params = [gaps, image, conv.weight]
        make = OPTIMIZERS[name]
        update = make_update(params, make, SCALED) if with_update else None
        optimizer = update.optimizer if with_update else make(params)
        for step in range(5):
            if step == 2:
                image.data = image.data.to(memory_format=torch.channels_last)
            if step == 3:  # as from a file without strides
                state = optimizer.state[conv.weight]
                state.update({key: value.clone().contiguous() for key, value in state.items()})
            generator = torch.Generator().manual_seed(step)
            scale = scale_of(update) if with_update else 1.0
            give(params, [torch.randn(p.shape, generator=generator) for p in params], scale)
            update.step() if with_update else optimizer.step()
        return params

    assert_close(run(True), run(False))


def test_momentum_that_begins_later_survives_a_first_step_that_is_skipped(uninitialised_is_nan):
    """As under a scheduler that cycles momentum."""
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], SCALED)
    update.optimizer.param_groups[0]["momentum"] = 0.9
    assert take(update, params, 0, math.inf).skipped
    for step in range(4):
        take(update, params, step)
    assert_close(params, by_hand(lambda params: optim.SGD(params, lr=0.1, momentum=0.9), 4)[0])
