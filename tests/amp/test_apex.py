"""Mode APEX through the engine: O2's BatchNorm rule, casts of nested inputs, rejections, losses over ranks."""

import math

import pytest
import torch
from torch import nn

from tests.amp.apex_runs import BatchNormMLP, make_batches
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
    [
        (apex("O2"), STAYS),
        (apex("O3", keep_batchnorm_fp32=True), STAYS),
        (apex("O2", keep_batchnorm_fp32="False"), set()),
        (apex("O3"), set()),
        (apex("O1"), None),
    ],
    ids=["O2", "O3 but them", "O2 with them", "O3", "O1"],
)
def test_batchnorm_rule(config, stays):
    """BatchNorm with weights stays in fp32, statistics included; without weights it is cast, as are other norms."""
    model = Norms()
    engine = make_engine(config, model=model, criterion=None)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    dtypes = {name: tensor.dtype for name, tensor in tensors.items() if tensor.is_floating_point()}
    assert dtypes == {name: FULL if stays is None or name in stays else HALF for name in dtypes}
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


def losses_on_ranks(rank, world_size, opt_level):
    """Two losses of 16 samples, divided among the ranks; in the second update one overflows on the last rank alone."""
    config = apex(opt_level, loss_scale="dynamic", num_losses=2, max_loss_scale=64.0) | {"clip_grad_norm": 0.7}
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
@pytest.mark.parametrize("opt_level", ["O1", "O2"])
def test_losses_over_data_ranks(opt_level):
    seen, alone = losses_on_ranks(0, 1, opt_level)
    assert seen == [(False, (64.0, 64.0)), (True, (64.0, 32.0)), (False, (64.0, 32.0))]
    for found, weights in run_ranks(losses_on_ranks, 2, opt_level):
        assert found == seen
        torch.testing.assert_close(dict(weights), dict(alone), rtol=0, atol=4e-4)
