"""What apex.amp does under O0 to O3, read from its source and written out by hand on plain torch tensors; nets whose
forward is also written with the casts of O1; and one training loop for engines and the reference.

An oracle: it shares no code with halfmesh, so that the two agree only if both follow apex. One thing differs: masters
begin with the weights as they came, as the engine's do, and not as the cast left them.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

import halfmesh

INITIAL_SCALE, MAX_SCALE, WINDOW = 2.0**16, 2.0**24, 2000
HALF = torch.float16
PROPERTIES: dict[str, dict[str, Any]] = {
    "O0": {"cast": torch.float32, "keep_batchnorm_fp32": None, "master_weights": False, "loss_scale": 1.0},
    "O1": {"cast": None, "keep_batchnorm_fp32": None, "master_weights": None, "loss_scale": "dynamic"},
    "O2": {"cast": HALF, "keep_batchnorm_fp32": True, "master_weights": True, "loss_scale": "dynamic"},
    "O3": {"cast": HALF, "keep_batchnorm_fp32": False, "master_weights": False, "loss_scale": 1.0},
}


class Scaler:
    """One loss's scale. A static one never moves, and nothing is ever skipped on its account."""

    def __init__(self, loss_scale: Any, floor: float | None, ceiling: float) -> None:
        self.dynamic = loss_scale == "dynamic"
        self.scale = min(ceiling, INITIAL_SCALE) if self.dynamic else float(loss_scale)
        self.unskipped = 0
        self.floor, self.ceiling = floor or 0.0, ceiling

    def judge(self, overflow: bool) -> bool:
        """Move after a backward; returns whether the step that it was for has to be skipped."""
        skip = overflow and self.dynamic
        if skip:
            self.scale, self.unskipped = max(self.floor, self.scale / 2), 0
        else:
            self.unskipped += 1
        if self.dynamic and self.unskipped == WINDOW:
            self.scale, self.unskipped = min(self.ceiling, self.scale * 2), 0
        return skip


def cast_model(model: nn.Module, dtype: torch.dtype, keep_batchnorm_fp32: bool | None) -> None:
    """Parameters and floating-point buffers, in place; BatchNorms that have weights can be left out."""
    for module in model.modules():
        if keep_batchnorm_fp32 and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in [*module.parameters(recurse=False), *module.buffers(recurse=False)]:
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(cast_floats(item, dtype) for item in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


class Apex:
    """A model and its optimizer after amp.initialize, with the calls of a training loop.

    Args:
        model: in fp32; it is cast in place.
        make_optimizer: called with the model after the cast.
        patched: the forward of O1: (model, inputs) with the casts of apex's lists written out.
        overrides: keep_batchnorm_fp32, master_weights, loss_scale; None leaves what the level says.
    """

    def __init__(self, model, make_optimizer, opt_level, *, patched=None, num_losses=1, **overrides) -> None:
        low, high = overrides.pop("min_loss_scale", None), overrides.pop("max_loss_scale", MAX_SCALE)
        level = PROPERTIES[opt_level] | {key: value for key, value in overrides.items() if value is not None}
        self.model, self.cast = model, level["cast"]
        self.before_cast = {p: p.detach().clone() for p in model.parameters()}
        if self.cast is not None:
            cast_model(model, self.cast, level["keep_batchnorm_fp32"])
        self.forward = model if patched is None or self.cast is not None else lambda *inputs: patched(model, *inputs)
        self.scalers = [Scaler(level["loss_scale"], low, high) for _ in range(num_losses)]
        self.keeps_masters = bool(level["master_weights"])
        self.optimizer = make_optimizer(model)
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # what the model computes with, what is stepped
        for group in self.optimizer.param_groups:
            group["params"] = self._stepped(group["params"])
        self.skip = False

    def _stepped(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        targets = []
        for param in params:
            has_master = self.keeps_masters and param.dtype == HALF
            first = self.before_cast.get(param, param.detach()).float()
            targets.append(nn.Parameter(first) if has_master else param)
            self.pairs.append((param, targets[-1]))
        return targets

    def __call__(self, *inputs: Any) -> Any:
        if self.cast is None:
            return self.forward(*inputs)
        return cast_floats(self.forward(*cast_floats(inputs, self.cast)), torch.float32)

    def zero_grad(self) -> None:
        for param, target in self.pairs:
            param.grad = target.grad = None

    def backward(self, loss: torch.Tensor, loss_id: int = 0) -> None:
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

    def step(self) -> bool:
        """Step, or skip; either way the gradients are used up. Returns whether it was skipped."""
        skipped, self.skip = self.skip, False
        if not skipped:
            self.optimizer.step()
            for param, target in self.pairs:
                param.data.copy_(target.data)
        self.zero_grad()
        return skipped

    @property
    def loss_scales(self) -> tuple[float, ...]:
        return tuple(scaler.scale for scaler in self.scalers)

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state in fp32, with the masters where there are any."""
        masters = {id(param): target for param, target in self.pairs}
        state = self.model.state_dict(keep_vars=True)
        full = {name: masters.get(id(value), value).detach().clone() for name, value in state.items()}
        return {name: cast_floats(value, torch.float32) for name, value in full.items()}


# -- nets and loops ----------------------------------------------------------------------------------------------

FEATURES, CLASSES, BATCH = 8, 4, 8
LEVELS = ("O0", "O1", "O2", "O3")


def linear(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """As O1 casts it: input, weight and bias in half."""
    return F.linear(x.half(), module.weight.half(), None if module.bias is None else module.bias.half())


class BatchNormMLP(nn.Module):
    """A BatchNorm with weights, which O2 keeps in fp32, and one without, which it casts as all else.

    No bias in front of a BatchNorm: its gradient would be rounding noise, which Adam blows up.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16, bias=False)
        self.norm = nn.BatchNorm1d(16)
        self.again = nn.Linear(16, 16, bias=False)
        self.plain = nn.BatchNorm1d(16, affine=False)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.norm(self.first(x)))
        return self.last(torch.tanh(self.plain(self.again(x))))

    def patched(self, x: torch.Tensor) -> torch.Tensor:
        """tanh and BatchNorm are in no list of apex: they take what comes."""
        x = torch.tanh(self.norm(linear(self.first, x)))
        return linear(self.last, torch.tanh(self.plain(linear(self.again, x))))


class ListsNet(nn.Module):
    """An operation of each kind in apex's lists: half, fp32, widest type, and whatever comes."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Linear(32, 16)
        self.gate = nn.Linear(16, 16)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = self.again(torch.cat([x, F.gelu(x) + self.norm(x)], 1))
        size = torch.sum(x * x, 1, keepdim=True)
        x = x + F.softmax(self.gate(x), 1) * 4
        return self.last(torch.relu(x - x.mean(1, keepdim=True)) / (1 + size))

    def patched(self, x: torch.Tensor) -> torch.Tensor:
        x = linear(self.first, x)  # half
        wide = F.gelu(x.float()) + self.norm(x.float())  # both fp32
        x = linear(self.again, torch.cat([x.float(), wide], 1))  # the widest, and half again
        size = torch.sum((x * x).float(), 1, keepdim=True)  # multiplied as it came, added up in fp32
        x = x.float() + F.softmax(linear(self.gate, x).float(), 1) * 4  # the widest
        return linear(self.last, torch.relu(x - x.mean(1, keepdim=True)) / (1 + size))


NETS: dict[str, Callable[..., nn.Module]] = {"mlp": BatchNormMLP, "lists": ListsNet}


def make_optimizer(name: str) -> Callable[[nn.Module], optim.Optimizer]:
    """Adam with an eps that half precision can hold: O3 adds it to numbers in fp16."""
    if name == "sgd":
        return lambda model: optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
    return lambda model: optim.Adam(model.parameters(), lr=0.01, eps=1e-3, weight_decay=0.01)


def make_batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    teacher = torch.randn(FEATURES, CLASSES, generator=generator)
    xs = [torch.randn(BATCH, FEATURES, generator=generator) for _ in range(steps)]
    return [(x, (x @ teacher).argmax(1)) for x in xs]


def make_pair(model: nn.Module, optimizer: Any, opt_level: str, config: Any = None, **keys: Any) -> tuple[Any, Apex]:
    """An engine and the reference, from the same weights. `keys` are those of `fp16`, `config` has other ones."""
    patched = type(model).patched if opt_level == "O1" and hasattr(model, "patched") else None
    reference = Apex(copy.deepcopy(model), optimizer, opt_level, patched=patched, **keys)
    fp16 = {"mode": "apex", "opt_level": opt_level} | {k: v for k, v in keys.items() if v is not None}
    config = {"fp16": fp16} | (config or {})
    engine = halfmesh.initialize(model, optimizer(model), F.cross_entropy, None, config, device="cpu")
    return engine, reference


def skipped(result: halfmesh.StepResult | bool | None) -> bool | None:
    """What a step of either kind says; None inside an accumulation cycle."""
    return result.skipped if isinstance(result, halfmesh.StepResult) else result


@dataclasses.dataclass
class Curve:
    losses: list[float] = dataclasses.field(default_factory=list)
    skipped: list[bool] = dataclasses.field(default_factory=list)
    scales: list[tuple[float, ...]] = dataclasses.field(default_factory=list)


def train(run: halfmesh.Engine | Apex, batches: Any, factors: Mapping[int, float] | None = None) -> Curve:
    """The loop of the README. `factors`: what the losses of some steps are multiplied by."""
    curve = Curve()
    for i, (x, y) in enumerate(batches):
        run.zero_grad()
        output = run(x)
        if isinstance(run, Apex):
            loss = F.cross_entropy(output.float(), y)
        else:
            loss = run.criterion(output, y)
        loss = loss * (factors or {}).get(i, 1.0)
        run.backward(loss)
        result = run.step()
        curve.losses.append(loss.item())
        curve.skipped.append(skipped(result))
        curve.scales.append(run.loss_scales)
    return curve


def set_scalers(engine: halfmesh.Engine, reference: Apex, values: Sequence[tuple[float, int]]) -> None:
    """Put each loss's scale and count of steps since an overflow where a longer run would have them."""
    state = engine.state_dict()
    for saved, (scale, unskipped) in zip(scaler_states(state), values, strict=True):
        saved["scale"], saved["growth_tracker"] = scale, unskipped
    engine.load_state_dict(state)
    for scaler, (scale, unskipped) in zip(reference.scalers, values, strict=True):
        scaler.scale, scaler.unskipped = scale, unskipped
    assert engine.loss_scales == reference.loss_scales


def scaler_states(state: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Those in an engine's state, by loss."""
    return state["update"]["scalers"]


def assert_same(engine: halfmesh.Engine, reference: Apex, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """Weights, BatchNorm statistics, and what the optimizer steps."""
    close = {"rtol": rtol, "atol": atol, "equal_nan": True}
    torch.testing.assert_close(dict(engine.state_dict()["model"]), reference.weights(), **close)
    stepped = [target.detach() for _, target in reference.pairs]
    torch.testing.assert_close([p.detach() for p in engine.master_params()], stepped, **close)
