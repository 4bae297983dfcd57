"""The update path: exactness, skips, clipping, masters, streaming, groups."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn, optim

from halfmesh.amp import fused
from halfmesh.amp import optimizer as optimizer_module
from halfmesh.amp.convert import convert
from halfmesh.amp.optimizer import MixedPrecisionOptimizer
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.amp.rules import UpdateRules
from halfmesh.errors import InputError, NonFiniteError
from halfmesh.shard import ParamShard

OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1),
    "sgd_momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "sgd_nesterov": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_dampening": lambda params: optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.3),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adam_amsgrad": lambda params: optim.Adam(params, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adam_foreach": lambda params: optim.Adam(params, lr=0.01, foreach=True),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "adamw_tensor_lr": lambda params: optim.AdamW(params, lr=torch.tensor(0.01)),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.05),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adadelta": lambda params: optim.Adadelta(params, lr=0.5),
    "nadam": lambda params: optim.NAdam(params, lr=0.01),
    "radam": lambda params: optim.RAdam(params, lr=0.01),
    "adamax": lambda params: optim.Adamax(params, lr=0.01),
    "asgd": lambda params: optim.ASGD(params, lr=0.05),
    "rprop": lambda params: optim.Rprop(params, lr=0.01),
}
DYNAMIC = LossScale(initial=1024.0, growth_interval=2)


def make_params(seed: int = 0) -> list[nn.Parameter]:
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape)) for shape in [(7, 5), (5,), (3, 2, 2)]]


def make_update(params, make_optimizer, recipe=FP32, **rules) -> MixedPrecisionOptimizer:
    model = nn.Module()
    for i, param in enumerate(params):
        model.register_parameter(f"p{i}", param)
    shards = [ParamShard(name, p) for name, p in model.named_parameters()]
    return convert(model, make_optimizer(params), shards, recipe, rules=UpdateRules(**rules))


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator) * 0.3 for p in make_params()]


def give(params, grads, scale: float = 1.0) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else (grad * scale).to(param.dtype)


def by_hand(make_optimizer, steps, max_norm: float = 0.0, skip=()) -> tuple[list[nn.Parameter], optim.Optimizer]:
    """The same updates with torch alone, from unscaled gradients."""
    params = make_params()
    optimizer = make_optimizer(params)
    for step in range(steps):
        if step in skip:
            continue
        give(params, gradients(step))
        if max_norm:
            nn.utils.clip_grad_norm_(params, max_norm)
        optimizer.step()
    return params, optimizer


def assert_close(actual, expected, rtol: float = 2e-6, atol: float = 2e-6) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=rtol, atol=atol)


# -- exactness -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [False, True], ids=["torch", "naive"])
def test_every_update_is_exactly_one(master):
    """Two peers update the scale before they divide by it: their update is halved whenever the scale grows."""
    param = nn.Parameter(torch.zeros(1))
    scale = LossScale(initial=8.0, growth_interval=2)
    recipe = Recipe(torch.float16, torch.float16 if master else None, not master, master, scale)
    update = make_update([param], lambda p: optim.SGD(p, lr=16.0), recipe)
    held = update.holdings.target(update.holdings.shards[0])
    scales = []
    for step in range(1, 21):
        assert update.scaler is not None
        scales.append(update.scaler.scale.item())
        loss = param.float().sum() * 2.0**-4
        update.backward(loss)
        update.step()
        assert held.item() == -step
        assert param.item() == -step
        update.zero_grad()
    assert scales == [8.0 * 2 ** (step // 2) for step in range(20)]


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 100.0], ids=["no_clip", "clip_bites", "clip_does_not"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equals_unscale_clip_step_by_hand(name, max_norm):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=max_norm)
    for step in range(6):
        scale = update.scaler.scale.item()
        give(params, gradients(step), scale)
        expected = torch.cat([g.flatten() for g in gradients(step)]).double().norm().item()
        result = update.step()
        assert result.grad_norm == pytest.approx(expected, rel=1e-6)
        assert result.loss_scale == scale
        assert not result.skipped
    assert_close(params, by_hand(OPTIMIZERS[name], 6, max_norm)[0])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_skipped_first_step_leaves_no_trace(name):
    params = make_params()
    before = copy.deepcopy(params)
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC))
    inf = [torch.full_like(p, math.inf) for p in params]
    give(params, inf)
    result = update.step()
    assert result.skipped
    assert update.scaler.scale.item() == 512.0
    assert_close(params, before, 0, 0)
    for step in range(4):
        update.zero_grad()
        give(params, gradients(step), update.scaler.scale.item())
        assert not update.step().skipped
    assert update.watch.skipped == 1
    assert_close(params, by_hand(OPTIMIZERS[name], 4)[0])


@pytest.mark.parametrize("name", ["sgd_momentum", "adam_amsgrad", "adagrad", "rmsprop"])
def test_overflow_leaves_parameters_state_and_counters(name):
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(loss_scale=DYNAMIC), max_norm=1.0)
    give(params, gradients(0), 1024.0)
    update.step()
    before = copy.deepcopy(([p.data for p in params], update.optimizer.state_dict()["state"]))
    grads = gradients(1)
    grads[2][0, 0, 0] = math.nan
    give(params, grads, 1024.0)
    assert update.step().skipped
    after = ([p.data for p in params], update.optimizer.state_dict()["state"])
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert update.scaler.scale.item() == 512.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_masters_step_as_an_fp32_optimizer_would(name):
    """The gradients are fp16, everything after them is fp32: the same as torch on the rounded gradients."""
    params = make_params()
    recipe = Recipe(torch.float16, torch.float16, False, True, DYNAMIC)
    update = make_update(params, OPTIMIZERS[name], recipe)
    reference = make_params()
    optimizer = OPTIMIZERS[name](reference)
    for step in range(4):
        scale = update.scaler.scale.item()
        give(params, gradients(step), scale)
        give(reference, [p.grad.float() / scale for p in params])
        update.step()
        optimizer.step()
    masters = [update.holdings.masters[p] for p in params]
    assert_close(masters, reference)
    assert all(p.dtype == torch.float16 for p in params)
    assert_close(params, [m.half() for m in masters], 0, 0)


def test_masters_keep_the_full_precision_the_model_came_with():
    param = nn.Parameter(torch.tensor([1.0 + 2.0**-15]))  # 1.0 in fp16
    update = make_update([param], OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True))
    assert update.holdings.masters[param].item() == 1.0 + 2.0**-15
    assert param.item() == 1.0


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad", "rmsprop", "adadelta", "asgd"])
def test_streaming_in_parts_is_bitwise_one_step(name, monkeypatch):
    recipe = Recipe(torch.bfloat16, torch.bfloat16, False, True)
    results, calls = [], []
    for limit in (1, 200, 25 * 2**20):
        monkeypatch.setattr(optimizer_module, "STREAM_BYTES", limit)
        params = make_params()
        update = make_update(params, OPTIMIZERS[name], recipe, max_norm=0.7)
        steps = 0
        inner = update.optimizer.step

        def counted(inner=inner):
            nonlocal steps
            steps += 1
            inner()

        update.optimizer.step = counted
        for step in range(3):
            give(params, gradients(step))
            update.step()
            assert all(p.grad is None for p in params)
            assert all(m.grad is None for m in update.holdings.masters.values())
        results.append([update.holdings.masters[p].detach() for p in params])
        calls.append(steps)
    assert calls == [9, 6, 3]
    assert_close(results[0], results[2], 0, 0)
    assert_close(results[1], results[2], 0, 0)


def test_no_streaming_where_the_users_hook_would_see_it(monkeypatch):
    monkeypatch.setattr(optimizer_module, "STREAM_BYTES", 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(torch.bfloat16, torch.bfloat16, False, True))
    seen = []
    update.optimizer.register_step_post_hook(lambda *_: seen.append(1))
    give(params, gradients(0))
    update.step()
    assert seen == [1]


def test_one_master_gradient_at_a_time(monkeypatch):
    """While one part is stepped, no other part has an fp32 gradient, and its own fp16 gradient is gone."""
    monkeypatch.setattr(optimizer_module, "STREAM_BYTES", 1)
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(torch.float16, torch.float16, False, True))
    alive = []
    update.optimizer.step = lambda: alive.append(
        (sum(m.grad is not None for m in update.holdings.masters.values()), sum(p.grad is not None for p in params))
    )
    give(params, gradients(0))
    update.step()
    assert alive == [(1, 2), (1, 1), (1, 0)]


# -- what a step reads and launches ----------------------------------------------------------------------------------


class CountReads(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts reads of device scalars by the host."""

    def __init__(self):
        super().__init__()
        self.reads = 0
        self.ops = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


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


# -- rules -----------------------------------------------------------------------------------------------------------


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


def test_on_nonfinite_raise_names_the_parameter():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], on_nonfinite="raise")
    grads = gradients(0)
    grads[1][0] = math.nan
    give(params, grads)
    with pytest.raises(NonFiniteError, match=r"gradients hold inf or nan; the first .* is 'p1'; no loss scaling"):
        update.step()


def test_on_nonfinite_skip_without_scaling():
    params = make_params()
    before = copy.deepcopy(params)
    update = make_update(params, OPTIMIZERS["sgd"], on_nonfinite="skip")
    give(params, [g * math.inf for g in gradients(0)])
    assert update.step().skipped
    assert_close(params, before, 0, 0)


def test_on_nonfinite_auto_steps_without_a_dynamic_scale():
    params = make_params()
    static = Recipe(loss_scale=LossScale(initial=128.0, dynamic=False))
    update = make_update(params, OPTIMIZERS["sgd"], static)
    give(params, [g * math.nan for g in gradients(0)])
    assert not update.step().skipped
    assert params[0].isnan().all()


@pytest.mark.parametrize(
    ("recipe", "ending"),
    [
        (Recipe(loss_scale=LossScale(initial=8.0, min_scale=4.0)), "has reached its floor, min_scale=4"),
        (Recipe(loss_scale=LossScale(initial=8.0)), "has fallen to 2"),
        (Recipe(loss_scale=LossScale(initial=8.0, dynamic=False)), "is static at 8"),
        (FP32, "no loss scaling is in use"),
    ],
)
def test_a_storm_of_skips_stops_with_a_diagnosis(recipe, ending):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], recipe, max_consecutive_skips=3, max_norm=1.0)
    give(params, gradients(0))
    update.step()
    for _ in range(2):
        give(params, [gradients(0)[0], gradients(0)[1], gradients(0)[2] * math.nan])
        update.step()
    give(params, [gradients(0)[0], gradients(0)[1], gradients(0)[2] * math.nan])
    with pytest.raises(NonFiniteError, match=r"3 updates in a row .*\(max_consecutive_skips=3\)") as caught:
        update.step()
    assert "the first parameter with a non-finite gradient is 'p2'" in str(caught.value)
    assert ending in str(caught.value)


def test_skips_that_are_not_in_a_row_do_not_stop():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC), max_consecutive_skips=2)
    for step in range(8):
        give(params, [g * (math.inf if step % 2 else 1.0) for g in gradients(step)])
        assert update.step().skipped == bool(step % 2)
    assert update.watch.skipped == 4


def test_the_watch_reads_only_when_the_limit_may_be_reached():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], Recipe(loss_scale=DYNAMIC), max_consecutive_skips=4)
    reads = []
    for step in range(12):
        give(params, gradients(step))
        with CountReads() as counter:
            update.step()
        reads.append(counter.reads)
    assert [i for i, count in enumerate(reads) if count] == [3, 7, 11]


def test_clip_for_one_update():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC), max_norm=100.0)
    give(params, gradients(0), 1024.0)
    norm = update.clip_grad_norm_(0.25)
    assert norm.item() == pytest.approx(torch.cat([g.flatten() for g in gradients(0)]).norm().item(), rel=1e-6)
    update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1, 0.25)[0])
    give(params, gradients(1), 1024.0)
    before = copy.deepcopy(params)
    update.step()
    expected = [b - 0.1 * g for b, g in zip(before, gradients(1), strict=True)]
    assert_close(params, expected)
    with pytest.raises(InputError, match="max_norm must be greater than 0, but -1 was given"):
        update.clip_grad_norm_(-1)


def test_inf_norm_clips_by_the_largest_element():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], max_norm=0.1, norm_type=math.inf)
    before = copy.deepcopy(params)
    give(params, gradients(0))
    largest = max(g.abs().max().item() for g in gradients(0))
    assert update.step().grad_norm == pytest.approx(largest, rel=1e-6)
    expected = [b - 0.1 * g * 0.1 / largest for b, g in zip(before, gradients(0), strict=True)]
    assert_close(params, expected, 1e-5, 1e-6)


def test_zeros_are_reported():
    params = make_params()
    recipe = Recipe(torch.float16, torch.float16, False, True, DYNAMIC, count_zeros=True)
    update = make_update(params, OPTIMIZERS["sgd"], recipe)
    grads = gradients(0)
    grads[0][:2] = 0
    give(params, grads, 1024.0)
    assert update.step().num_zeros == 10


def test_divisor():
    for recipe in (FP32, Recipe(loss_scale=DYNAMIC)):
        for divisor in (0.5, torch.tensor(0.5, dtype=torch.float64)):
            params = make_params()
            update = make_update(params, OPTIMIZERS["sgd"], recipe)
            scale = update.scaler.scale.item() if update.scaler else 1.0
            give(params, gradients(0), 0.5 * scale)
            update.step(divisor)
            assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


# -- groups, state, other callers ------------------------------------------------------------------------------------


@pytest.mark.parametrize("master", [False, True])
def test_several_groups_and_one_added_later(master):
    params = make_params()
    half = torch.float16 if master else None
    recipe = Recipe(torch.float16, half, False, True, DYNAMIC) if master else Recipe(loss_scale=DYNAMIC)
    groups = lambda p: optim.AdamW([{"params": p[:1], "lr": 0.1}, {"params": p[1:2], "lr": 0.01}])  # noqa: E731
    update = make_update(params, groups, recipe)
    reference = make_params()
    optimizer = groups(reference)
    scheduler = optim.lr_scheduler.StepLR(update.optimizer, 1, gamma=0.5)
    other_scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(4):
        if step == 2:
            update.optimizer.add_param_group({"params": params[2:], "lr": 0.2, "initial_lr": 0.2})
            optimizer.add_param_group({"params": reference[2:], "lr": 0.2, "initial_lr": 0.2})
            scheduler.base_lrs.append(0.2)
            other_scheduler.base_lrs.append(0.2)
        update.zero_grad()
        optimizer.zero_grad()
        scale = update.scaler.scale.item()
        give(params, gradients(step), scale)
        give(reference, [(g * scale).to(half or torch.float32).float() / scale for g in gradients(step)])
        update.step()
        optimizer.step()
        scheduler.step()
        other_scheduler.step()
    held = [update.holdings.target(s) for s in update.holdings.shards]
    assert_close(held[:2], reference[:2])
    start = make_params()[2].half().float() if master else make_params()[2]  # added from what the model held
    moved, expected = (held[2] - start).detach(), (reference[2] - make_params()[2]).detach()
    torch.testing.assert_close(moved, expected, atol=1e-5, rtol=0)
    assert [len(g["params"]) for g in update.optimizer.param_groups] == [1, 1, 1]


@pytest.mark.parametrize("master", [False, True])
@pytest.mark.parametrize("name", ["sgd_momentum", "adamw", "adagrad", "rmsprop"])
def test_existing_state_is_taken_along(name, master):
    params, optimizer = by_hand(OPTIMIZERS[name], 3)
    model = nn.ParameterList(params)
    recipe = Recipe(torch.bfloat16, torch.bfloat16 if master else None, not master, master)
    update = convert(model, optimizer, [ParamShard(n, p) for n, p in model.named_parameters()], recipe)
    expected = by_hand(OPTIMIZERS[name], 5)[0]
    for step in (3, 4):
        give(params, gradients(step))
        update.step()
    held = [update.holdings.target(s) for s in update.holdings.shards]
    tolerance = 2e-3 if master else 2e-6  # the gradients are rounded to bf16
    assert_close(held, expected, tolerance, tolerance)


def test_state_dict_resumes_bitwise():
    def make():
        params = make_params()
        recipe = Recipe(torch.float16, torch.float16, False, True, LossScale(1024.0, growth_interval=3, hysteresis=2))
        return params, make_update(params, OPTIMIZERS["adamw"], recipe, max_norm=0.5)

    def run(params, update, steps):
        for step in steps:
            grads = gradients(step)
            give(params, [g * (math.inf if step in (1, 4) else 1) for g in grads], update.scaler.scale.item())
            update.step()

    params, update = make()
    run(params, update, range(4))
    state = copy.deepcopy(update.state_dict())
    run(params, update, range(4, 9))
    other_params, other = make()
    other.load_state_dict(state)
    run(other_params, other, range(4, 9))
    torch.testing.assert_close(other.state_dict(), update.state_dict(), rtol=0, atol=0)
    assert_close(other_params, params, 0, 0)


def test_loading_the_optimizer_alone_keeps_the_update_true():
    """`optimizer.load_state_dict` brings its own flags; what the update relies on is found again."""
    params, plain = by_hand(OPTIMIZERS["adamw"], 2)
    state = plain.state_dict()
    fresh = copy.deepcopy(params)
    update = make_update(fresh, OPTIMIZERS["adamw"], Recipe(loss_scale=DYNAMIC))
    update.optimizer.load_state_dict(state)
    assert update.holdings.folds
    give(fresh, gradients(2), 1024.0)
    update.step()
    assert_close(fresh, by_hand(OPTIMIZERS["adamw"], 3)[0])


def test_the_users_own_step_is_refused_until_close():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"])
    give(params, gradients(0))
    with pytest.raises(InputError, match=r"optimizer.step\(\) was called outside the engine.*engine.step\(\)"):
        update.optimizer.step()
    update.close()
    update.optimizer.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


def test_foreign_parameters_are_named():
    stranger = nn.Parameter(torch.zeros(3, 4))
    message = r"holds 1 parameter\(s\) that are not the model's: param_groups\[0\].*\(3, 4\)"
    with pytest.raises(InputError, match=message):
        make_update(make_params(), lambda p: optim.SGD([*p, stranger], lr=0.1))


def test_parameters_without_gradient_are_left_alone():
    params = make_params()
    before = params[1].detach().clone()
    update = make_update(params, OPTIMIZERS["sgd_momentum"], Recipe(loss_scale=DYNAMIC))
    for step in range(3):
        grads = gradients(step)
        give(params, [grads[0], None, grads[2]], 1024.0)
        update.step()
    torch.testing.assert_close(params[1].detach(), before, rtol=0, atol=0)


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


def test_verbose_logs_each_change_of_the_scale(caplog):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(8.0, growth_interval=2, verbose=True)))
    with caplog.at_level("INFO", "halfmesh"):
        for step in range(2):
            give(params, gradients(step))
            update.step()
    assert "loss scale 8 -> 16" in caplog.text


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


def test_a_backward_after_the_clip_is_measured_again():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC))
    update.backward(sum((p * g).sum() for p, g in zip(params, gradients(0), strict=True)))
    update.clip_grad_norm_(0.5)
    update.backward(params[0].sum() * math.inf)
    assert update.step().skipped


def test_zero_grad_forgets_the_clip():
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"])
    give(params, gradients(0))
    update.clip_grad_norm_(0.01)
    update.zero_grad()
    give(params, gradients(0))
    update.step()
    assert_close(params, by_hand(OPTIMIZERS["sgd"], 1)[0])


@pytest.mark.parametrize("clip", ["1", 0, -1.0, math.nan, None])
def test_norms_that_are_none(clip):
    params = make_params()
    give(params, gradients(0))
    with pytest.raises(InputError, match="max_norm must be greater than 0"):
        make_update(params, OPTIMIZERS["sgd"]).clip_grad_norm_(clip)


def test_loading_into_other_scaler_settings():
    saved = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(initial=2.0**20))).state_dict()
    static = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(128.0, dynamic=False)))
    static.load_state_dict(saved)
    assert static.scaler.scale.item() == 128.0
    capped = make_update(make_params(), OPTIMIZERS["sgd"], Recipe(loss_scale=LossScale(64.0, max_scale=1024.0)))
    capped.load_state_dict(saved)
    assert (capped.scaler.scale.item(), capped.scaler.max_scale) == (1024.0, 1024.0)


@pytest.mark.parametrize("recipe", [FP32, Recipe(loss_scale=LossScale(8.0, dynamic=False))])
def test_nan_is_noticed_even_if_nothing_asks_for_a_verdict(recipe):
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], recipe, max_consecutive_skips=5)
    reads = []
    for _step in range(8):
        give(params, [g * math.nan for g in gradients(0)])
        with CountReads() as counter:
            assert update.step().grad_norm is None
        reads.append(counter.reads)
    assert reads[:4] == [0, 0, 0, 0]
    give(params, [g * math.nan for g in gradients(0)])
    with pytest.raises(NonFiniteError, match="5 updates in a row"):
        update.step()


def test_a_look_now_and_then_costs_one_read():
    params = make_params()
    update = make_update(params, OPTIMIZERS["adamw"], max_consecutive_skips=4)
    measured = []
    for step in range(12):
        give(params, gradients(step))
        with CountReads() as counter:
            update.step()
        measured.append(any("norm" in op for op in counter.ops))
    assert [i for i, look in enumerate(measured) if look] == [3, 7, 11]


def test_gradients_edited_while_they_are_scaled(caplog):
    params = make_params()
    update = make_update(params, OPTIMIZERS["sgd"], Recipe(loss_scale=DYNAMIC))
    with caplog.at_level("WARNING", "halfmesh"):
        for _ in range(2):
            update.zero_grad()
            update.backward(sum(p.sum() for p in params))
            update.step()
        assert caplog.text == ""
        for _ in range(2):
            update.zero_grad()
            update.backward(sum(p.sum() for p in params))
            nn.utils.clip_grad_norm_(params, 1.0)
            update.step()
    assert caplog.text.count("gradients were changed between engine.backward and engine.step") == 1


@pytest.mark.parametrize("name", ["sgd_momentum", "adamw"])
def test_close_gives_model_and_optimizer_back(name):
    """After close a plain torch loop goes on from the masters' values and the optimizer's state."""
    params = make_params()
    update = make_update(params, OPTIMIZERS[name], Recipe(torch.float16, torch.float16, False, True))
    give(params, gradients(0))
    update.step()
    masters = [update.holdings.masters[p].detach().clone() for p in params]
    update.close()
    assert all(p.dtype == torch.float32 for p in params)
    assert_close(params, masters, 0, 0)
    give(params, gradients(1))
    update.optimizer.step()
    assert not torch.equal(params[0], masters[0])
    assert {id(p) for p in update.optimizer.param_groups[0]["params"]} == {id(p) for p in params}
    assert set(update.optimizer.state) == set(params)


def test_recipes_and_scales_that_cannot_work():
    for wrong in (
        {"compute_dtype": torch.float16},
        {"compute_dtype": torch.float16, "autocast": True, "param_dtype": torch.float16},
        {"master_weights": True},
    ):
        with pytest.raises(ValueError, match=r"would compute in fp32|two ways to compute|fp32 masters of fp32"):
            Recipe(**wrong)
    for wrong in ({"initial": -1.0}, {"initial": 1e60}, {"growth_factor": 0.1}, {"hysteresis": 0}):
        with pytest.raises(ValueError, match="cannot work: it needs 0 < initial"):
            LossScale(**wrong)


def test_group_order_and_scheduler_survive_masters():
    params = make_params()
    optimizer = optim.SGD(OrderedDict(params=params)["params"], lr=0.1)
    groups = optimizer.param_groups
    update = make_update(params, lambda _: optimizer, Recipe(torch.bfloat16, torch.bfloat16, False, True))
    assert update.optimizer.param_groups is groups
    assert [p.shape for p in groups[0]["params"]] == [p.shape for p in params]
    assert all(p.dtype == torch.float32 for p in groups[0]["params"])
