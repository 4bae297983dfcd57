"""Which implementation of the optimizer steps, what it reads, and on which layouts."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn, optim

from halfmesh.amp import fused
from halfmesh.amp.convert import convert
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.amp.rules import UpdateRules
from halfmesh.errors import InputError
from halfmesh.shard import ParamShard
from tests.support.updates import (
    DYNAMIC,
    OPTIMIZERS,
    CountReads,
    assert_close,
    by_hand,
    give,
    gradients,
    make_params,
    make_update,
)


@pytest.mark.parametrize(
    ("name", "recipe", "rules", "reads"),
    [
        ("adamw", Recipe(loss_scale=DYNAMIC), {"max_norm": 1.0}, 0),
        ("sgd_momentum", Recipe(torch.float16, torch.float16, False, True, DYNAMIC), {}, 0),
        ("adamw", FP32, {"max_norm": 1.0}, 0),
        ("adamw", FP32, {"on_nonfinite": "raise"}, 1),
        ("rmsprop", FP32, {"max_norm": 1.0}, 0),
    ],
)
def test_host_reads_per_step(name, recipe, rules, reads):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], recipe, **rules)
    for step in range(2):
        scale = update.scaler.scale.item() if update.scaler else 1.0
        give(params, gradients(step), scale)
        with CountReads() as counter:
            update.step()
    assert counter.reads == reads


def test_host_reads_of_an_optimizer_that_cannot_take_the_verdict_along():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adam_foreach"], Recipe(loss_scale=DYNAMIC))
    plain = make_update(make_params(), OPTIMIZERS["adam_foreach"])
    counts = []
    for each in (update, plain):
        held = [s.param for s in each.holdings.shards]
        give(held, gradients(0))
        each.step()
        give(held, gradients(1))
        with CountReads() as counter:
            each.step()
        counts.append(counter.reads)
    assert counts[0] == counts[1] + 1


def test_no_norm_pass_when_nothing_asks_for_it():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"])
    give(params, gradients(0))
    with CountReads() as counter:
        result = update.step()
    assert not [op for op in counter.ops if "norm" in op]
    assert result.grad_norm is None
    assert result.loss_scale == 1.0


def test_track_grad_norm():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], track_grad_norm=True)
    give(params, gradients(0))
    expected = torch.cat([g.flatten() for g in gradients(0)]).norm().item()
    assert update.step().grad_norm == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("choice", ["auto", False])
def test_fused_leaves_the_users_choice(choice):
    chosen = {}
    for name in ("adamw", "adam_foreach", "sgd_dampening", "rmsprop"):
        update = make_update(make_params(), OPTIMIZERS[name], fused=choice)
        group = update.optimizer.param_groups[0]
        chosen[name] = (group.get("fused"), group.get("foreach"), update.holdings.folds)
    expected_adamw = (True, False, True) if choice == "auto" else (None, None, False)
    assert chosen == {
        "adamw": expected_adamw,
        "adam_foreach": (None, True, False),
        "sgd_dampening": (None, None, False),
        "rmsprop": (None, None, False),
    }


@pytest.mark.parametrize("name", ["sgd", "sgd_momentum", "adam", "adamw", "adagrad"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_parameters_without_masters_move(name, dtype):
    """torch 2.13's fused SGD does not move them; whichever implementation is chosen has to."""

    def run(scaled):
        params = [nn.Parameter(torch.ones(40, dtype=dtype))]
        scale = LossScale(64.0, dynamic=False) if scaled else None
        recipe = Recipe(dtype, dtype, loss_scale=scale)
        update = make_update(params, OPTIMIZERS[name], recipe)
        for _ in range(3):
            params[0].grad = torch.full_like(params[0], 0.5 * (64 if scaled else 1))
            update.step()
        return params[0].detach().float()

    expected = nn.Parameter(torch.ones(40))
    optimizer = OPTIMIZERS[name]([expected])
    for _ in range(3):
        expected.grad = torch.full_like(expected, 0.5)
        optimizer.step()
    for scaled in (False, True):
        torch.testing.assert_close(run(scaled), expected.detach(), rtol=0, atol=2e-2)


def test_the_trial_of_a_fused_kernel_sees_what_is_wrong():
    class DoesNotMove(optim.SGD):
        def step(self, closure=None):
            if not self.param_groups[0]["fused"]:
                super().step()

    class IgnoresTheScale(optim.SGD):
        def step(self, closure=None):
            if getattr(self, "found_inf", 0) == 0:
                self.__dict__.pop("grad_scale", None)
                super().step()

    class IgnoresTheVerdict(optim.SGD):
        def step(self, closure=None):
            self.__dict__.pop("found_inf", None)
            super().step()

    device = torch.device("cpu")
    assert fused._equals_plain(optim.SGD, device, torch.float32)
    for broken in (DoesNotMove, IgnoresTheScale, IgnoresTheVerdict):
        assert not fused._equals_plain(broken, device, torch.float32), broken


def test_a_fused_kernel_that_does_not_work_is_not_chosen_and_refused_if_asked_for(monkeypatch):
    monkeypatch.setattr(fused, "_equals_plain", lambda *_, **__: False)
    update = make_update(make_params(), OPTIMIZERS["adamw"])
    assert not update.holdings.folds
    assert update.optimizer.param_groups[0]["fused"] is None
    with pytest.raises(InputError, match=r"AdamW\(fused=True\) does not work for parameters of torch.float32 on cpu"):
        make_update(make_params(), lambda p: optim.AdamW(p, fused=True))


def test_a_subclass_with_its_own_step_is_not_trusted_with_the_scale():
    class MyAdam(optim.Adam):
        pass

    update = make_update(make_params(), lambda p: MyAdam(p, fused=True), Recipe(loss_scale=DYNAMIC))
    assert not update.holdings.folds


def test_wide_gradients_add_up_in_fp32():
    """256 + 1 is 256 in bf16: 100 times 1 added to 256 stays 256 there, and is 356 in fp32."""
    for wide, expected in ((False, 256.0), (True, 356.0)):
        param = nn.Parameter(torch.zeros(1))
        recipe = Recipe(torch.bfloat16, torch.bfloat16, False, True)
        update = make_update([param], lambda p: optim.SGD(p, lr=1.0), recipe, wide_gradients=wide)
        update.backward((param * 256).sum())
        for _ in range(100):
            update.backward(param.sum())
        update.step()
        assert -update.holdings.masters[param].item() == expected


def test_an_fp16_loss_is_seeded_in_fp32():
    param = nn.Parameter(torch.ones(1))
    update = make_update([param], OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True, DYNAMIC))
    loss = (param * 2).sum()
    assert loss.dtype == torch.float16
    update.backward(loss, 3.0)
    assert param.grad is not None
    assert param.grad.item() == pytest.approx(1024 / 3 * 2, rel=1e-3)


def test_momentum_that_begins_later_is_seeded():
    """A scheduler that cycles momentum: the first step with it may be one that is skipped."""
    params = make_params()
    update = make_update(params, lambda p: optim.SGD(p, lr=0.1), Recipe(loss_scale=DYNAMIC))
    update.optimizer.param_groups[0]["momentum"] = 0.9
    give(params, [torch.full_like(p, math.inf) for p in params])
    assert update.step().skipped
    for step in range(4):
        give(params, gradients(step), update.scaler.scale.item())
        update.step()
    assert_close(params, by_hand(lambda p: optim.SGD(p, lr=0.1, momentum=0.9), 4)[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad"])
def test_parameters_with_gaps_or_a_changed_layout(name):
    """The CPU's fused kernels ignore strides: they must not be chosen where strides differ."""

    def run(with_update):
        torch.manual_seed(0)
        gaps = nn.Parameter(torch.randn(4, 8)[:, :5])
        image = nn.Parameter(torch.randn(4, 3, 3, 3))
        params = [gaps, image]
        make = OPTIMIZERS[name]
        update = make_update(params, make, Recipe(loss_scale=DYNAMIC)) if with_update else None
        optimizer = None if with_update else make(params)
        for step in range(4):
            if step == 2:
                image.data = image.data.to(memory_format=torch.channels_last)
            generator = torch.Generator().manual_seed(step)
            give(params, [torch.randn(p.shape, generator=generator) for p in params])
            if update is None:
                optimizer.step()
            else:
                for p in params:
                    p.grad = p.grad * update.scaler.scale
                update.step()
        return params

    assert_close(run(True), run(False))


def test_sparse_gradients_without_scaling_work_as_in_torch():
    for make in (lambda p: optim.SGD(p, lr=0.1), lambda p: optim.Adagrad(p, lr=0.1), optim.SparseAdam):
        results = []
        for with_update in (True, False):
            torch.manual_seed(0)
            embedding = nn.Embedding(5, 3, sparse=True)
            optimizer = make(list(embedding.parameters()))
            if with_update:
                shards = [ParamShard(n, p) for n, p in embedding.named_parameters()]
                update = convert(embedding, optimizer, shards, FP32, rules=UpdateRules(max_consecutive_skips=2))
            for index in (1, 3, 1, 1, 4):
                embedding.weight.grad = None
                embedding(torch.tensor([index])).square().sum().backward()
                update.step() if with_update else optimizer.step()
            results.append(embedding.weight.detach())
        torch.testing.assert_close(*results)


def test_sparse_gradients_come_through_backward():
    embedding = nn.Embedding(5, 3, sparse=True)
    shards = [ParamShard(n, p) for n, p in embedding.named_parameters()]
    for recipe in (FP32, Recipe(loss_scale=LossScale(64.0, dynamic=False))):
        before = embedding.weight.detach().clone()
        update = convert(embedding, optim.SGD(embedding.parameters(), lr=1.0), shards, recipe)
        update.backward(embedding(torch.tensor([1, 3])).sum())
        update.step()
        update.zero_grad()
        update.close()
        moved = (before - embedding.weight.detach())[:, 0].tolist()
        assert moved == pytest.approx([0, 1, 0, 1, 0])


def test_optimizer_state_loaded_before_the_first_sparse_gradient():
    embedding = nn.Embedding(5, 3, sparse=True)
    shards = [ParamShard(n, p) for n, p in embedding.named_parameters()]
    update = convert(embedding, optim.SGD(embedding.parameters(), lr=1.0), shards, FP32)
    update.optimizer.load_state_dict(copy.deepcopy(update.optimizer.state_dict()))
    update.backward(embedding(torch.tensor([1])).sum())
    update.step()


def test_wide_gradients_follow_what_is_unfrozen():
    """As many parameters are unfrozen as are frozen, so that counting them would not show it."""
    a, b = (nn.Parameter(torch.zeros(1), requires_grad=flag) for flag in (True, False))
    recipe = Recipe(torch.bfloat16, torch.bfloat16, False, True)
    update = make_update([a, b], lambda p: optim.SGD(p, lr=1.0), recipe, wide_gradients=True)
    a.requires_grad_(False)
    b.requires_grad_(True)
    if update.holdings.changed():
        update.holdings.refresh()
    update.backward((b * 256).sum())
    for _ in range(100):
        update.backward(b.sum())
    update.step()
    assert -update.holdings.masters[b].item() == 356.0


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_half_precision_without_masters_is_left_to_the_plain_optimizer(name):
    """The fused kernel rounds once where the plain one rounds after each operation: another result."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(torch.float16, torch.float16))
    assert not update.holdings.folds
    assert update.optimizer.param_groups[0]["fused"] is None
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer = OPTIMIZERS[name](plain)
    for step in range(3):
        give(params, gradients(step))
        give(plain, gradients(step))
        update.step()
        optimizer.step()
    assert_close(params, plain, 0, 0)
