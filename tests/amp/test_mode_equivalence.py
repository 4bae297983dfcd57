"""NAIVE is O2 without its BatchNorm rule, and TORCH is close to O1: outputs, gradients and weights of one step.

The nets and tolerances are those by which Colossal-AI compared its own modes: layers used twice, a ResNet; scale
128, clip 1.0, rtol = atol = 1e-3.
"""

import pytest
import torch
from torch import nn

import halfmesh

TOLERANCE = 1e-3


class Repeated(nn.Module):
    """The same layers used more than once."""

    def __init__(self):
        super().__init__()
        self.first, self.again, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2)

    def forward(self, x):
        x = self.again(self.first(x))
        return self.last(self.again(self.first(x)))


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.norm2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        hidden = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(hidden)))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.Sequential(Block(4), nn.MaxPool2d(2), Block(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


NETS = {"repeated": (Repeated, (4, 5)), "resnet": (ResNet, (4, 3, 6, 6))}


def one_step(net, fp16):
    """Output, gradients as backward leaves them, and weights after a clipped step."""
    make, shape = NETS[net]
    torch.manual_seed(3)
    model, x = make(), torch.randn(shape)
    config = {"fp16": fp16, "clip_grad_norm": 1.0}
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=1e-1), None, None, config, device="cpu")
    output = engine(x)
    with engine.autocast():
        loss = output.sum()
    engine.backward(loss)
    grads = {name: param.grad.float().clone() for name, param in model.named_parameters()}
    result = engine.step()
    assert (result.loss_scale, result.skipped) == (128.0, False)
    weights = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    return output.detach(), grads, weights


@pytest.mark.parametrize("net", NETS)
def test_naive_is_o2_without_fp32_batchnorm(net):
    naive = one_step(net, {"mode": "naive", "loss_scale": 128.0})
    o2 = one_step(net, {"mode": "apex", "opt_level": "O2", "keep_batchnorm_fp32": False, "loss_scale": 128.0})
    torch.testing.assert_close(naive, o2, rtol=0, atol=0)  # the same path: not a bit is different
    naive = one_step(net, {"mode": "naive", "initial_scale": 128.0})
    torch.testing.assert_close(naive, o2, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("net", NETS)
def test_torch_is_close_to_o1(net):
    torch_amp = one_step(net, {"mode": "torch", "init_scale": 128.0})
    o1 = one_step(net, {"mode": "apex", "opt_level": "O1", "loss_scale": 128.0})
    output, grads, weights = torch_amp
    assert output.dtype == o1[0].dtype == torch.float16
    torch.testing.assert_close(output, o1[0], rtol=TOLERANCE, atol=TOLERANCE)
    unscaled = [{name: grad / 128 for name, grad in g.items()} for g in (grads, o1[1])]
    torch.testing.assert_close(*unscaled, rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(weights, o1[2], rtol=TOLERANCE, atol=TOLERANCE)
