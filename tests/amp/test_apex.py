"""Mode APEX through the engine: O2's BatchNorm rule, losses over ranks, and curves of training."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.amp.apex_amp import OPT_LEVELS, ApexAMP
from halfmesh.amp.recipe import FP32, LossScale, Recipe
from halfmesh.config.load import load_config
from halfmesh.errors import ConfigError
from tests.amp.apex_runs import (
    LEVELS,
    NETS,
    Apex,
    BatchNormMLP,
    assert_same,
    make_batches,
    make_optimizer,
    make_pair,
    train,
)
from tests.support.models import make_data, make_engine, sgd
from tests.support.ranks import here, run_ranks

HALF, FULL = torch.float16, torch.float32


def apex(opt_level, **keys):
    return {"fp16": {"mode": "apex", "opt_level": opt_level, **keys}}


class Norms(nn.Module):
    """Every kind of normalisation that apex's rule tells apart."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(4, 4, 1)
        self.affine = nn.BatchNorm1d(4)
        self.plain = nn.BatchNorm1d(4, affine=False)
        self.sync = nn.SyncBatchNorm(4)
        self.instance = nn.InstanceNorm1d(4, affine=True)
        self.layer = nn.LayerNorm(6)
        self.register_buffer("offset", torch.full((6,), 0.1))


STAYS = {f"{norm}.{name}" for norm in ("affine", "sync") for name in ("weight", "bias", "running_mean", "running_var")}


@pytest.mark.parametrize(
    ("config", "stays"),
    [(apex("O2"), STAYS), (apex("O3", keep_batchnorm_fp32=True), STAYS), (apex("O3"), set())],
    ids=["O2", "O3 but them", "O3"],
)
def test_batchnorm_rule(config, stays):
    """BatchNorm with weights stays in fp32, statistics included; without weights it is cast, as are other norms."""
    model = Norms()
    engine = make_engine(config, model=model, criterion=None)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert dtypes == {name: FULL if name in stays else HALF for name in dtypes}
    stepped = list(engine.master_params())
    if "O2" in str(config):  # what is fp32 already is stepped itself
        assert {p.dtype for p in stepped} == {FULL}
        itself = {name for name, p in model.named_parameters() if any(p is each for each in stepped)}
        assert itself == {name for name in stays if "running" not in name}
    else:
        assert all(p is own for p, own in zip(stepped, model.parameters(), strict=True))


def one_step(fp16):
    """Output, gradients as backward leaves them, and weights after a clipped step, with a scale of 128."""
    [(x, _)] = make_batches(1)
    engine = make_engine({"fp16": fp16, "clip_grad_norm": 1.0}, model=BatchNormMLP(), criterion=None)
    output = engine(x)
    with engine.autocast():
        loss = output.square().sum()
    engine.backward(loss)
    grads = {name: param.grad.float() / 128 for name, param in engine.model.named_parameters()}
    assert engine.step().loss_scale == 128
    return output.detach(), grads, {name: value.clone() for name, value in engine.state_dict()["model"].items()}


def test_naive_is_o2_without_fp32_batchnorm_and_torch_is_close_to_o1():
    """Tolerances are those by which Colossal-AI compared its own modes."""
    naive = one_step({"mode": "naive", "loss_scale": 128.0})
    o2 = one_step(apex("O2", keep_batchnorm_fp32=False, loss_scale=128.0)["fp16"])
    torch.testing.assert_close(naive, o2, rtol=0, atol=0)  # the same path: not a bit is different
    torch_amp, o1 = one_step({"mode": "torch", "init_scale": 128.0}), one_step(apex("O1", loss_scale=128.0)["fp16"])
    assert torch_amp[0].dtype == o1[0].dtype == HALF
    torch.testing.assert_close(torch_amp, o1, rtol=1e-3, atol=1e-3)


def test_a_sum_that_overflows_is_every_losses_fault():
    """Two finite gradients whose sum is not: the step is skipped, and both scales are lowered."""
    engine = make_engine(apex("O0", loss_scale="dynamic", num_losses=2, max_loss_scale=1.5, min_loss_scale=1.0))
    for loss_id in (0, 1):
        engine.backward(engine.model.last.bias.sum() * 2e38, loss_id=loss_id)
    assert engine.step().skipped
    assert engine.loss_scales == (1.0, 1.0)


def losses_on_ranks(rank, world_size):
    """Two losses of 16 samples, divided among the ranks; in the second update one overflows on the last rank alone."""
    config = apex("O2", loss_scale="dynamic", num_losses=2, max_loss_scale=64.0) | {"clip_grad_norm": 0.7}
    engine = make_engine(config, criterion=None, optimizer=sgd)
    x, y = (part[rank::world_size] for part in here(make_data(16)))
    seen = []
    for update in range(3):
        out = engine(x).float()
        first, second = nn.functional.cross_entropy(out, y), out.square().mean()
        engine.backward(first, loss_id=0, retain_graph=True)
        engine.backward(second * (math.inf if update == 1 and rank == world_size - 1 else 1.0), loss_id=1)
        seen.append((engine.step().skipped, engine.loss_scales))
    weights = engine.state_dict()["model"]
    engine.close()
    return seen, weights


@pytest.mark.distributed
def test_losses_over_data_ranks():
    seen, alone = losses_on_ranks(0, 1)
    assert seen == [(False, (64.0, 64.0)), (True, (64.0, 32.0)), (False, (64.0, 32.0))]
    for found, weights in run_ranks(losses_on_ranks, 2):
        assert found == seen
        torch.testing.assert_close(dict(weights), dict(alone), rtol=0, atol=4e-4)


# -- against a hand-written reading of apex ------------------------------------------------------------------------

HUGE = 1e38  # times the loss scale it is inf, in any precision
MILD = 1e4  # gradients overflow in half precision only, and not all of them
UNFUSED = {"fused": False}  # torch's fused optimizers round in another order than its plain ones


def compare(
    engine: halfmesh.Engine, reference: Apex, factors: dict[int, float] | None = None, steps: int = 8
) -> list[bool]:
    """The same steps with both. Returns which of them were skipped."""
    batches = make_batches(steps)
    expected, curve = train(reference, batches, factors), train(engine, batches, factors)
    assert (curve.scales, curve.skipped) == (expected.scales, expected.skipped)
    torch.testing.assert_close(curve.losses, expected.losses, rtol=1e-6, atol=0, equal_nan=True)
    assert_same(engine, reference)
    return curve.skipped


@pytest.mark.parametrize(("optimizer", "loss_scale"), [("sgd", None), ("adam", "dynamic"), ("sgd", 128.0)])
@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("opt_level", LEVELS)
def test_training_curve(opt_level, net, optimizer, loss_scale):
    """With a dynamic scale, two overflows: in some fp16 gradients, and in all gradients of any precision."""
    engine, reference = make_pair(NETS[net](), make_optimizer(optimizer), opt_level, UNFUSED, loss_scale=loss_scale)
    dynamic = reference.scalers[0].dynamic
    factors = ({6: HUGE} | ({} if opt_level == "O0" else {3: MILD})) if dynamic else {}
    skipped = compare(engine, reference, factors)
    assert all(skipped[step] for step in factors)
    assert any(skipped) == dynamic


# -- the keys: O0 to O3's property table, overrides, contradictions, and recipes -------------------------------------

DYNAMIC = LossScale(2.0**16, True, 2.0, 0.5, 2000, 1, 0.0, 2.0**24, verbose=True)
O1 = Recipe(HALF, autocast=True, cast_lists="apex", loss_scale=DYNAMIC)
O2 = Recipe(HALF, HALF, False, True, DYNAMIC, FULL, keep_batchnorm_fp32=True, wide_gradients=True)
O3 = Recipe(HALF, HALF, output_dtype=FULL)


def options_of(**keys):
    return load_config({"fp16": {"mode": "apex", **keys}}).precision.options


def recipe_of(**keys):
    return ApexAMP.recipe(options_of(**keys), HALF)


@pytest.mark.promise(
    "APEX's levels and overrides", "apex's property table, without apex", of="Colossal-AI", page="migration/apex.md"
)
def test_the_property_table_is_apexs():
    table = {level: tuple(vars(properties).values()) for level, properties in OPT_LEVELS.items()}
    assert table == {
        "O0": ("float32", False, False, False, 1.0),
        "O1": (None, True, False, False, "dynamic"),
        "O2": ("float16", False, True, True, "dynamic"),
        "O3": ("float16", False, False, False, 1.0),
    }


@pytest.mark.parametrize(
    ("level", "keys", "recipe"),
    [
        ("O0", {}, Recipe(param_dtype=FULL, output_dtype=FULL)),
        ("O1", {}, O1),
        ("O2", {}, O2),
        ("O3", {}, O3),
        ("O0", {"loss_scale": "dynamic"}, Recipe(FULL, FULL, loss_scale=DYNAMIC, output_dtype=FULL)),
        ("O1", {"patch_torch_functions": False}, Recipe(loss_scale=DYNAMIC)),
        ("O1", {"cast_model_type": torch.float32}, replace(O1, param_dtype=FULL, output_dtype=FULL)),
        (
            "O2",
            {"keep_batchnorm_fp32": "False", "loss_scale": "128.0"},
            replace(O2, keep_batchnorm_fp32=False, loss_scale=LossScale(128.0, dynamic=False, skips=False)),
        ),
        ("O2", {"cast_model_type": "float32"}, Recipe(FULL, FULL, False, False, DYNAMIC, FULL)),
        ("O2", {"enabled": False, "loss_scale": 128.0, "num_losses": 2}, replace(FP32, num_losses=2)),
    ],
    ids=str,
)
def test_recipes(level, keys, recipe):
    assert recipe_of(opt_level=level, **keys) == recipe


def test_dynamic_scale_keys():
    scale = recipe_of(min_loss_scale=2.0, max_loss_scale=2.0**10, verbosity=0).loss_scale
    assert scale == LossScale(2.0**10, growth_interval=2000, min_scale=2.0, max_scale=2.0**10)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"opt_level": "01"}, "fp16.opt_level: expected 'O0', 'O1', 'O2' or 'O3', got '01'"),
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
        options_of(**keys)
    assert message in str(error.value)
