"""What apex.amp does under O0 to O3, read from its source and written out by hand on plain torch tensors; nets whose
forward is also written with the casts of O1; and one training loop for engines and the reference.

An oracle: it shares no code with halfmesh, so that the two agree only if both follow apex. One thing differs: masters
begin with the weights as they came, as the engine's do, and not as the cast left them.
"""

import copy
from collections import namedtuple

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import halfmesh

HALF = torch.float16
PROPERTIES = {
    "O0": {"cast": torch.float32, "keep_batchnorm_fp32": None, "master_weights": False, "loss_scale": 1.0},
    "O1": {"cast": None, "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": "dynamic"},
    "O2": {"cast": HALF, "keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"cast": HALF, "keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}


class Scaler:
    """One loss's scale, which grows after 2000 steps. A static one never moves, and nothing is skipped for it."""

    def __init__(self, loss_scale):
        self.dynamic = loss_scale == "dynamic"
        self.scale = 2.0**16 if self.dynamic else float(loss_scale)
        self.unskipped = 0

    def judge(self, overflow):
        """Move after a backward; returns whether the step that it was for has to be skipped."""
        skip = overflow and self.dynamic
        self.scale, self.unskipped = (self.scale / 2, 0) if skip else (self.scale, self.unskipped + 1)
        return skip


def cast_model(model, dtype, keep_batchnorm_fp32):
    """Parameters and floating-point buffers, in place; BatchNorms that have weights can be left out."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def cast_floats(value, dtype):
    if isinstance(value, (tuple, list)):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Apex:
    """A model, which is cast in place, and its optimizer after amp.initialize, with the calls of a training loop.

    Args:
        patched: the forward of O1: (model, inputs) with the casts of apex's lists written out.
        overrides: keep_batchnorm_fp32, master_weights, loss_scale; None leaves what the level says.
    """

    def __init__(self, model, make_optimizer, opt_level, *, patched=None, num_losses=1, **overrides):
        level = PROPERTIES[opt_level] | {key: value for key, value in overrides.items() if value is not None}
        self.model, self.cast = model, level["cast"]
        before_cast = {p: p.detach().clone() for p in model.parameters()}
        if self.cast is not None:
            cast_model(model, self.cast, level["keep_batchnorm_fp32"])
        self.forward = model if patched is None or self.cast is not None else lambda *inputs: patched(model, *inputs)
        self.scalers = [Scaler(level["loss_scale"]) for _ in range(num_losses)]
        self.optimizer = make_optimizer(model)
        self.pairs = []  # what the model computes with, what is stepped
        for group in self.optimizer.param_groups:
            for i, param in enumerate(group["params"]):
                if level["master_weights"] and param.dtype == HALF:
                    group["params"][i] = nn.Parameter(before_cast[param].float())
                self.pairs.append((param, group["params"][i]))
        self.skip = False

    def __call__(self, *inputs):
        if self.cast is None:
            return self.forward(*inputs)
        return cast_floats(self.forward(*cast_floats(inputs, self.cast)), torch.float32)

    def zero_grad(self):
        for param, target in self.pairs:
            param.grad = target.grad = None

    def backward(self, loss, loss_id=0):
        """Gradients of `loss`, unscaled with its own scale and added to those of earlier backwards."""
        scaler = self.scalers[loss_id]
        earlier = [target.grad for _, target in self.pairs]
        self.zero_grad()
        (loss.float() * scaler.scale).backward()
        overflow = False
        for (param, target), left in zip(self.pairs, earlier, strict=True):
            scaled, param.grad = param.grad, None
            if scaled is None:
                target.grad = left
                continue
            overflow = overflow or not bool(scaled.isfinite().all())
            unscaled = scaled.float() * (1.0 / scaler.scale)
            target.grad = (unscaled if left is None else unscaled + left.float()).to(target.dtype)
        if scaler.judge(overflow):
            self.skip = True  # and stays set, whatever the other losses find

    def step(self):
        """Step, or skip; either way the gradients are used up. Returns whether it was skipped."""
        skipped, self.skip = self.skip, False
        if not skipped:
            self.optimizer.step()
            for param, target in self.pairs:
                param.data.copy_(target.data)
        self.zero_grad()
        return skipped

    @property
    def loss_scales(self):
        return tuple(scaler.scale for scaler in self.scalers)

    def weights(self):
        """The model's state in fp32, with the masters where there are any."""
        masters = {id(param): target for param, target in self.pairs}
        state = self.model.state_dict(keep_vars=True)
        full = {name: masters.get(id(value), value).detach().clone() for name, value in state.items()}
        return {name: cast_floats(value, torch.float32) for name, value in full.items()}


# -- nets and loops ----------------------------------------------------------------------------------------------

FEATURES, CLASSES, BATCH = 8, 4, 8
LEVELS = ("O0", "O1", "O2", "O3")


def linear(module, x):
    """As O1 casts it: input, weight and bias in half."""
    return F.linear(x.half(), module.weight.half(), None if module.bias is None else module.bias.half())


class BatchNormMLP(nn.Module):
    """A BatchNorm with weights, which O2 keeps in fp32, and one without, which it casts as all else.

    No bias in front of a BatchNorm: its gradient would be rounding noise, which Adam blows up.
    """

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.again = nn.Linear(16, 16, bias=False)
        self.plain = nn.BatchNorm1d(16, affine=False)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.plain(self.again(x))))

    def patched(self, x):
        """tanh and BatchNorm are in no list of apex: they take what comes."""
        x = torch.tanh(self.norm(linear(self.first, x)))
        return linear(self.last, torch.tanh(self.plain(linear(self.again, x))))


class ListsNet(nn.Module):
    """An operation of each kind in apex's lists: half, fp32, widest type, and whatever comes."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Linear(32, 16)
        self.gate = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x):
        x = self.first(x)
        x = self.again(torch.cat([x, F.gelu(x) + self.norm(x)], 1))
        size = torch.sum(x * x, 1, keepdim=True)
        x = x + F.softmax(self.gate(x), 1) * 4
        return self.last(torch.relu(x - x.mean(1, keepdim=True)) / (1 + size))

    def patched(self, x):
        x = linear(self.first, x)  # half
        wide = F.gelu(x.float()) + self.norm(x.float())  # both fp32
        x = linear(self.again, torch.cat([x.float(), wide], 1))  # the widest, and half again
        size = torch.sum((x * x).float(), 1, keepdim=True)  # multiplied as it came, added up in fp32
        x = x.float() + F.softmax(linear(self.gate, x).float(), 1) * 4  # the widest
        return linear(self.last, torch.relu(x - x.mean(1, keepdim=True)) / (1 + size))


NETS = {"mlp": BatchNormMLP, "lists": ListsNet}


def make_optimizer(name):
    """Adam with an eps that half precision can hold: O3 adds it to numbers in fp16."""
    if name == "sgd":
        return lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return lambda model: optim.Adam(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01)


def make_batches(steps):
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    xs = [torch.randn(BATCH, FEATURES, generator=generator) for _ in range(steps)]
    return [(x, (x @ teacher).argmax(1)) for x in xs]


def make_pair(model, optimizer, opt_level, **keys):
    """An engine and the reference, from the same weights. torch's fused optimizers round in another order than apex's,
    and do not show unscaled gradients."""
    patched = type(model).patched if opt_level == "O1" and hasattr(model, "patched") else None
    reference = Apex(copy.deepcopy(model), optimizer, opt_level, patched=patched, **keys)
    fp16 = {"mode": "apex", "opt_level": opt_level} | {k: v for k, v in keys.items() if v is not None}
    config = {"fp16": fp16, "fused": False}
    engine = halfmesh.initialize(model, optimizer(model), F.cross_entropy, None, config, device="cpu")
    return engine, reference


Curve = namedtuple("Curve", ["losses", "skipped", "scales"])


def train(run, batches, factors=None):
    """The loop of the README, with an engine or the reference. `factors`: what the losses of some steps are multiplied
    by."""
    curve = Curve([], [], [])
    for i, (x, y) in enumerate(batches):
        run.zero_grad()
        output = run(x)
        loss = F.cross_entropy(output.float(), y) if isinstance(run, Apex) else run.criterion(output, y)
        loss = loss * (factors or {}).get(i, 1.0)
        run.backward(loss)
        result = run.step()
        curve.losses.append(loss.item())
        curve.skipped.append(getattr(result, "skipped", result))
        curve.scales.append(run.loss_scales)
    return curve


def assert_same(engine, reference):
    """Weights, BatchNorm statistics, and what the optimizer steps."""
    close = {"rtol": 1e-5, "atol": 1e-6, "equal_nan": True}
    torch.testing.assert_close(dict(engine.state_dict()["model"]), reference.weights(), **close)
    stepped = [target.detach() for _, target in reference.pairs]
    torch.testing.assert_close([p.detach() for p in engine.master_params()], stepped, **close)
