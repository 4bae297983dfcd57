"""Nets whose forward is also written with the casts of O1, and one training loop for engines and the reference."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional as F

import halfmesh
from tests.amp.apex_reference import Apex

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


def make_pair(
    model: nn.Module,
    optimizer: Callable[[nn.Module], optim.Optimizer],
    opt_level: str,
    config: Mapping[str, Any] | None = None,
    **keys: Any,
) -> tuple[halfmesh.Engine, Apex]:
    """An engine and the reference, from the same weights. `keys` are those of `fp16`, `config` has other ones."""
    patched = type(model).patched if opt_level == "O1" and hasattr(model, "patched") else None
    reference = Apex(copy.deepcopy(model), optimizer, opt_level, patched=patched, **keys)
    fp16 = {"mode": "apex", "opt_level": opt_level} | {k: v for k, v in keys.items() if v is not None}
    config = {"fp16": fp16} | dict(config or {})
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
