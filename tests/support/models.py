"""Small models, data and a plain torch reference that several tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.ranks import here, rank_device

FEATURES, CLASSES = 8, 4
FP16_TORCH = {"fp16": {"mode": "torch", "init_scale": 256.0}}
FP16_NAIVE = {"fp16": {"mode": "naive", "initial_scale": 256.0}}
BF16_TORCH = {"bf16": {"mode": "torch"}}
BF16_NAIVE = {"bf16": {"mode": "naive"}}
MODES = {
    "none": {},
    "torch_fp16": FP16_TORCH,
    "torch_bf16": BF16_TORCH,
    "naive_fp16": FP16_NAIVE,
    "naive_bf16": BF16_NAIVE,
    "apex_o0": {"fp16": {"mode": "apex", "opt_level": "O0"}},
    "apex_o1": {"fp16": {"mode": "apex", "opt_level": "O1", "max_loss_scale": 256.0}},
    "apex_o2": {"fp16": {"mode": "apex", "opt_level": "O2", "max_loss_scale": 256.0}},
}
# Largest relative difference of the weights from fp32 in one process after 10 steps, by mode.
TOLERANCES = {"none": 1e-5, "apex_o0": 1e-5, "torch_fp16": 2e-4, "apex_o1": 2e-4, "naive_fp16": 4e-4, "apex_o2": 4e-4}
TOLERANCES |= {"torch_bf16": 2e-3, "naive_bf16": 2e-3, "torch_fp8": 2e-2}
COMPUTE_DTYPES = dict.fromkeys(("none", "apex_o0"), torch.float32) | {"torch_fp8": torch.float8_e4m3fn}
COMPUTE_DTYPES |= dict.fromkeys(("torch_fp16", "naive_fp16", "apex_o1", "apex_o2"), torch.float16)
COMPUTE_DTYPES |= dict.fromkeys(("torch_bf16", "naive_bf16"), torch.bfloat16)


class MLP(nn.Module):
    """Linear layers, a LayerNorm, a tied weight. No ReLU: a unit that rounding turns on or off spoils comparisons."""

    def __init__(self, dropout: float = 0.0, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.LayerNorm(16)
        self.again = nn.Linear(16, 16)
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.again.weight
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(nn.functional.gelu(self.first(x)))
        return self.last(self.drop(self.tied(nn.functional.gelu(self.again(x)))))


def make_data(samples: int = 48) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=generator)
    return x, (x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)


def make_loader(samples: int = 48, batch_size: int = 8, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*make_data(samples)), batch_size, **options)


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def make_engine(
    config=None, *, model=None, optimizer=sgd, criterion=nn.functional.cross_entropy, loader=None, **options: Any
) -> halfmesh.Engine:
    model = MLP() if model is None else model
    loader = make_loader() if loader is None else loader
    return halfmesh.initialize(model, optimizer, criterion, loader, config or {}, device=rank_device(), **options)


def linear_engine(config=None, samples=12, *, evaluated=6, lr=0.1, **options: Any) -> halfmesh.Engine:
    """One layer, trained and evaluated in batches of 4: three updates an epoch."""
    torch.manual_seed(0)
    options.setdefault("eval_dataloader", make_loader(evaluated, 4) if evaluated else None)
    model, loader = nn.Linear(FEATURES, CLASSES), make_loader(samples, 4)
    optimizer = lambda params: torch.optim.SGD(params, lr=lr)  # noqa: E731
    return make_engine(config, model=model, optimizer=optimizer, loader=loader, **options)


def train(engine: halfmesh.Engine, epochs: int = 1, max_batches: int | None = None) -> list[Any]:
    """The loop of the README. Returns what each step returned."""
    results = []
    for _ in range(epochs):
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            results.append(engine.step())
            if len(results) == max_batches:
                return results
    return results


def step_on(engine: halfmesh.Engine, x: torch.Tensor, y: torch.Tensor) -> Any:
    """One microbatch, without `zero_grad`. Returns what the step returned."""
    x, y = here((x, y))
    engine.backward(engine.criterion(engine(x), y))
    return engine.step()


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
    """A criterion for `loss_reduction="weighted"`."""
    return nn.functional.cross_entropy(output, target, reduction="sum"), len(target)


def reference(batches, make_optimizer=sgd, max_norm=0.0, model=None, reduction="mean") -> nn.Module:
    """A plain torch loop in fp32."""
    model = MLP() if model is None else model
    optimizer = make_optimizer(model.parameters())
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y, reduction=reduction).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return model


def full_weights(engine: halfmesh.Engine) -> dict[str, torch.Tensor]:
    """The weights, in fp32: the masters where there are any."""
    state = engine.state_dict()["model"]
    return {name: value.detach().clone() for name, value in state.items()}


def difference(weights: dict[str, torch.Tensor], model: nn.Module) -> float:
    """The largest difference between `weights` and a model's, relative to the largest weight."""
    expected = model.state_dict()
    assert weights.keys() == expected.keys()
    largest = max(value.abs().max().item() for value in expected.values())
    return max((weights[n] - expected[n]).abs().max().item() for n in expected) / largest


def said(call: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """What a call is rejected with, or "nothing"."""
    try:
        call(*args, **kwargs)
    except InputError as error:
        return str(error)
    return "nothing"
