"""Mode APEX against a hand-written reading of apex: curves of training, several losses with one verdict for the step;
its BatchNorm rule, and its keys."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F

from halfmesh.amp import stepper
from halfmesh.amp.apex_amp import ApexAMP
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError
from tests.amp.apex_runs import (
    CLASSES,
    FEATURES,
    LEVELS,
    NETS,
    assert_same,
    linear,
    make_batches,
    make_optimizer,
    make_pair,
    train,
)
from tests.support.models import make_engine

HALF, FULL = torch.float16, torch.float32
HUGE = 1e38  # times the loss scale it is inf, in any precision
MILD = 1e4  # gradients overflow in half precision only, and not all of them


def apex(opt_level, **keys):
    return {"fp16": {"mode": "apex", "opt_level": opt_level, **keys}}


@pytest.mark.parametrize(("optimizer", "loss_scale"), [("sgd", None), ("adam", "dynamic"), ("sgd", 128.0)])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_training_curve(opt_level, net, optimizer, loss_scale, monkeypatch):
    """With a dynamic scale, two overflows: in some fp16 gradients, and in all gradients of any precision."""
    if net == "mlp":  # updates in parts, of parameters with and without masters
        monkeypatch.setattr(stepper, "bucket_bytes", lambda *_: 200)
    engine, reference = make_pair(NETS[net](), make_optimizer(optimizer), opt_level, loss_scale=loss_scale)
    dynamic, batches = reference.scalers[0].dynamic, make_batches(8)
    factors = ({6: HUGE} | ({} if opt_level == "O0" else {3: MILD})) if dynamic else {}
    expected, curve = train(reference, batches, factors), train(engine, batches, factors)
    assert (curve.scales, curve.skipped) == (expected.scales, expected.skipped)
    torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-6, atol=0, equal_nan=True)
    assert_same(engine, reference)
    assert all(curve.skipped[step] for step in factors)
    assert any(curve.skipped) == dynamic


@pytest.mark.parametrize(
    ("config", "norms"),
    [(apex("O2"), ("affine", "sync")), (apex("O3", keep_batchnorm_fp32=True), ("affine", "sync")), (apex("O3"), ())],
)
def test_batchnorm_rule(config, norms):
    """BatchNorm with weights stays in fp32, statistics included; without weights it is cast, as are other norms."""
    kept = {"affine": nn.BatchNorm1d(4), "sync": nn.SyncBatchNorm(4)}
    cast = {"plain": nn.BatchNorm1d(4, affine=False), "instance": nn.InstanceNorm1d(4, affine=True)}
    model = nn.ModuleDict({**kept, **cast, "layer": nn.LayerNorm(6)})
    make_engine(config, model=model, criterion=None)
    tensors = dict([*model.named_parameters(), *model.named_buffers()])
    stays = {f"{norm}.{name}" for norm in norms for name in ("weight", "bias", "running_mean", "running_var")}
    assert {name for name, tensor in tensors.items() if tensor.dtype == FULL} == stays


# -- several losses, models and groups: each loss has its own scale, and one verdict is the step's --------------------

SCALES = (2.0**10, 2.0**13)  # unlike each other: taking the wrong one cannot go unseen
WEIGHTS = {"fp16": "first.weight", "fp32": "norm.weight"}  # in O2 the second one stays in fp32


class Part(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))

    def patched(self, x):
        return linear(self.last, torch.tanh(self.norm(linear(self.first, x))))


class Parts(nn.Module):
    """Two models, each with a loss of its own, and a third one that both losses use."""

    def __init__(self):
        super().__init__()
        self.m0, self.m1, self.both = Part(0), Part(1), Part(2)

    def forward(self, x):
        return self.m0(x) + self.both(x), self.m1(x) + self.both(x)

    def patched(self, x):
        return self.m0.patched(x) + self.both.patched(x), self.m1.patched(x) + self.both.patched(x)


def in_groups(model):
    """As many groups as models, with rates of their own."""
    groups = [{"params": list(part.parameters()), "lr": 0.1 / 2**i} for i, part in enumerate(model.children())]
    return optim.SGD(groups, momentum=0.5)


def make_runs(model, optimizer, opt_level, scales):
    """An engine and the reference, with dynamic scales that are already somewhere."""
    engine, reference = make_pair(model, optimizer, opt_level, loss_scale="dynamic", num_losses=len(scales))
    state = engine.state_dict()
    for saved, scaler, scale in zip(state["update"]["scalers"], reference.scalers, scales, strict=True):
        saved["scale"] = scaler.scale = scale
    engine.load_state_dict(state)
    assert engine.loss_scales == reference.loss_scales
    return engine, reference


def with_inf(grad):
    grad = grad.clone()
    grad.view(-1)[0] = math.inf
    return grad


def run_losses(run, loss_ids, bad):
    """One backward for each of two losses, and a step. For each step whether it was skipped, and the scales. `bad`:
    (step, loss, weight): inf in one element of one gradient, of one backward of one step."""
    history = []
    for step, (x, y) in enumerate(make_batches(3)):
        for which, output in enumerate(run(x)):
            loss = F.cross_entropy(output.float(), y) * (1.0, 3.0)[which]
            hooks = []
            if bad is not None and bad[:2] == (step, which):
                part = (run.model.m0, run.model.m1)[which]
                hooks = [part.get_parameter(WEIGHTS[bad[2]]).register_hook(with_inf)]
            run.backward(loss, loss_id=loss_ids[which])
            for hook in hooks:
                hook.remove()
        result = run.step()
        history.append((getattr(result, "skipped", result), run.loss_scales))
    return history


@pytest.mark.promise("APEX's levels and overrides")
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_two_losses_one_optimizer(opt_level, num_losses):
    """inf in either backward of either of the first two of three steps: one is skipped, and two are made."""
    loss_ids = (0, num_losses - 1)
    for bad in (None, *itertools.product((0, 1), (0, 1), WEIGHTS)):
        engine, reference = make_runs(Parts(), in_groups, opt_level, SCALES[:num_losses])
        history = run_losses(engine, loss_ids, bad)
        assert history == run_losses(reference, loss_ids, bad), bad
        assert_same(engine, reference)
        assert [was for was, _ in history] == [bad is not None and step == bad[0] for step in range(3)]
        lowered = {loss_ids[bad[1]]} if bad else set()
        assert history[-1][1] == tuple(SCALES[i] / (2 if i in lowered else 1) for i in range(num_losses))


class Weight(nn.Module):
    """One number: its gradients are what the input says, to the last bit in any precision."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("scales", [(16.0,), (16.0, 2.0**14)])
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_gradients_are_added_up_in_fp32(opt_level, scales):
    """1024 + 1/16 is no fp16 number. With scales of its own each loss is unscaled before it is added to the other."""
    engine, _ = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1.0), opt_level, scales)
    seen = []
    [param] = engine.optimizer.param_groups[0]["params"]
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append(param.grad.item()))
    for loss_id, slope in ((0, 1024.0), (len(scales) - 1, 0.0625)):
        engine.backward(engine(torch.tensor([slope])).sum(), loss_id=loss_id)
    assert not engine.step().skipped
    assert seen == [1024.0625]


def test_a_loss_without_backward_keeps_its_scale():
    """Nor does the step count for its growth."""
    engine, reference = make_runs(Weight(), lambda m: optim.SGD(m.parameters(), lr=1e-3), "O2", SCALES)
    for loss_id, slope in ((0, 1.0), (1, 1.0), (0, 1e38), (0, 1.0), (1, math.nan)):
        for run in (engine, reference):
            run.backward(run(torch.ones(1)).sum() * slope, loss_id=loss_id)
            run.step()
        saved = engine.state_dict()["update"]["scalers"]
        assert [(s["scale"], s["growth_tracker"]) for s in saved] == [(s.scale, s.unskipped) for s in reference.scalers]


def test_a_sum_that_overflows_is_every_losses_fault():
    """Two finite gradients whose sum is not: the step is skipped, and both scales are lowered."""
    engine = make_engine(apex("O0", loss_scale="dynamic", num_losses=2, max_loss_scale=1.5, min_loss_scale=1.0))
    for loss_id in (0, 1):
        engine.backward(engine.model.last.bias.sum() * 2e38, loss_id=loss_id)
    assert engine.step().skipped
    assert engine.loss_scales == (1.0, 1.0)


# -- keys ------------------------------------------------------------------------------------------------------------

DYNAMIC = LossScale(2.0**16, True, 2.0, 0.5, 2000, 1, 0.0, 2.0**24, verbose=True)
O1 = Recipe(HALF, autocast=True, cast_lists="apex", loss_scale=DYNAMIC)
O2 = Recipe(HALF, HALF, False, True, DYNAMIC, FULL, keep_batchnorm_fp32=True, wide_gradients=True)
STATIC, BOUNDED = LossScale(128.0, dynamic=False, skips=False), LossScale(2.0**10, min_scale=2.0, max_scale=2.0**10)


def options_of(keys):
    return load_config({"fp16": {"mode": "apex", **keys}}).precision.options


@pytest.mark.promise(
    "APEX's levels and overrides", "apex's property table, without apex", of="Colossal-AI", page="migration/apex.md"
)
@pytest.mark.parametrize(
    ("keys", "recipe"),
    [
        ({}, O1),
        ({"opt_level": "O0", "loss_scale": "dynamic"}, Recipe(FULL, FULL, loss_scale=DYNAMIC, output_dtype=FULL)),
        ({"patch_torch_functions": False}, Recipe(loss_scale=DYNAMIC)),
        ({"cast_model_type": torch.float32}, replace(O1, param_dtype=FULL, output_dtype=FULL)),
        (
            {"opt_level": "O2", "keep_batchnorm_fp32": "False", "loss_scale": "128.0"},
            replace(O2, keep_batchnorm_fp32=False, loss_scale=STATIC),
        ),
        ({"opt_level": "O2", "cast_model_type": "float32"}, Recipe(FULL, FULL, False, False, DYNAMIC, FULL)),
        ({"enabled": False, "loss_scale": 128.0, "num_losses": 2}, replace(FP32, num_losses=2)),
        (
            {"min_loss_scale": 2.0, "max_loss_scale": 2.0**10, "verbosity": 0},
            replace(O1, loss_scale=replace(BOUNDED, growth_interval=2000)),
        ),
    ],
    ids=str,
)
def test_recipes(keys, recipe):
    assert ApexAMP.recipe(options_of(keys), HALF) == recipe


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"master_weights": True}, "fp16: master_weights=True with opt_level='O1', which keeps weights in float32"),
        ({"opt_level": "O2", "patch_torch_functions": True}, "only opt_level='O1' patches functions"),
        ({"opt_level": "O2", "cast_model_type": torch.bfloat16}, "fp16.cast_model_type: apex has no bf16; use bf16"),
        ({"loss_scale": 0}, "fp16.loss_scale: expected 'dynamic' or a number greater than 0, got 0"),
        ({"min_loss_scale": 4.0, "max_loss_scale": 2.0}, "fp16: min_loss_scale=4 is above max_loss_scale=2; lower it"),
        ({"min_loss_scale": 2.0**17}, "fp16: min_loss_scale=131072 is above the first loss scale, which is 65536"),
    ],
    ids=str,
)
def test_mistakes(keys, message):
    with pytest.raises(ConfigError) as error:
        options_of(keys)
    assert message in str(error.value)
