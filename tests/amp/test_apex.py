"""Mode APEX through the engine: O2's BatchNorm rule, losses over ranks, and curves of training."""

import math

import pytest
import torch
from torch import nn

import halfmesh
from tests.amp.apex_runs import (
    INITIAL_SCALE,
    LEVELS,
    NETS,
    Apex,
    BatchNormMLP,
    assert_same,
    make_batches,
    make_optimizer,
    make_pair,
    set_scalers,
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


@pytest.mark.parametrize(("opt_level", "max_loss_scale"), [("O0", 2.0**17), ("O1", 2.0**24), ("O2", 2.0**16)])
def test_growth(opt_level, max_loss_scale):
    """After 2000 steps without overflow, counted from the last one, and not beyond the ceiling."""
    keys = {"loss_scale": "dynamic", "max_loss_scale": max_loss_scale}
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), opt_level, UNFUSED, **keys)
    set_scalers(engine, reference, [(INITIAL_SCALE, 1997)])
    compare(engine, reference, factors={4: HUGE}, steps=6)
    set_scalers(engine, reference, [(INITIAL_SCALE, 1998)])
    assert compare(engine, reference, factors={1: HUGE}, steps=4)[1]
    assert reference.scalers[0].unskipped < 4, "this run was to have an overflow just before growth"


def test_floor_and_ceiling():
    """The ceiling lowers the first scale too. At the floor an overflow still skips."""
    keys = {"loss_scale": "dynamic", "min_loss_scale": 2.0**8, "max_loss_scale": 2.0**10}
    engine, reference = make_pair(BatchNormMLP(), make_optimizer("sgd"), "O2", UNFUSED, **keys)
    assert engine.loss_scales == (2.0**10,)
    assert compare(engine, reference, factors=dict.fromkeys(range(4), HUGE), steps=6) == [True] * 4 + [False] * 2
    assert engine.loss_scales == (2.0**8,)
