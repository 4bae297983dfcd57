"""NAIVE is O2 without its BatchNorm rule, and TORCH is close to O1: outputs, gradients and weights of one step.

Scale, clip and tolerance are those by which Colossal-AI compared its own modes: 128, 1.0, rtol = atol = 1e-3.
"""

import pytest
import torch

import halfmesh
from tests.support.apex_runs import NETS, SHAPES, make_batches

TOLERANCE = 1e-3


def one_step(net, fp16):
    """Output, gradients as backward leaves them, and weights after a clipped step."""
    model, [(x, _)] = NETS[net](), make_batches(SHAPES[net], 1)
    config = {"fp16": fp16, "clip_grad_norm": 1.0}
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-1), None, None, config, device="cpu")
    output = engine(x)
    with engine.autocast():
        loss = output.square().sum()
    engine.backward(loss)
    grads = {name: param.grad.float() / 128 for name, param in model.named_parameters()}
    result = engine.step()
    assert (result.loss_scale, result.skipped) == (128.0, False)
    weights = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    return output.detach(), grads, weights


@pytest.mark.parametrize("net", NETS)
def test_naive_is_o2_without_fp32_batchnorm(net):
    naive = one_step(net, {"mode": "naive", "loss_scale": 128.0})
    o2 = one_step(net, {"mode": "apex", "opt_level": "O2", "keep_batchnorm_fp32": False, "loss_scale": 128.0})
    torch.testing.assert_close(naive, o2, rtol=0, atol=0)  # the same path: not a bit is different


@pytest.mark.parametrize("net", NETS)
def test_torch_is_close_to_o1(net):
    torch_amp = one_step(net, {"mode": "torch", "init_scale": 128.0})
    o1 = one_step(net, {"mode": "apex", "opt_level": "O1", "loss_scale": 128.0})
    assert torch_amp[0].dtype == o1[0].dtype == torch.float16
    torch.testing.assert_close(torch_amp, o1, rtol=TOLERANCE, atol=TOLERANCE)
