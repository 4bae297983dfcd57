"""What the tests of checkpoints train: a small model with layers of each kind, in every layout."""

from __future__ import annotations

import hashlib
import json
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.composition.workloads import MLP_PLAN, MLP_POINTS
from tests.support.models import CLASSES, FEATURES, adamw, make_data
from tests.support.ranks import rank_device

FP16 = {
    "none": {},
    "torch": {"fp16": {"mode": "torch", "init_scale": 256.0, "growth_interval": 5}},
    "naive": {"fp16": {"mode": "naive", "initial_scale": 256.0, "growth_interval": 5}},
}
PIPE = {"size": 2, "microbatches": 2, "partition": MLP_POINTS[2]}
TENSOR = {"size": 2, "plan": MLP_PLAN}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "dp2": (2, {}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp": (2, {"data": "fsdp"}),
    "tp2": (2, {"tensor": TENSOR}),
    "pp2": (2, {"pipeline": PIPE}),
}
"""Numbers of ranks, and `parallel`."""


class Shake(nn.Module):
    """Draws from python's and numpy's generators."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (0.9 + 0.1 * random.random() + 0.1 * float(np.random.rand())) if self.training else x


class Net(nn.Module):
    """The composition suite's MLP, with dropout, statistics, a frozen layer, and a buffer."""

    def __init__(self, dropout: float = 0.0, seed: int = 0, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(FEATURES, 16)
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)
        self.drop = nn.Dropout(dropout)
        self.shake = Shake() if dropout else nn.Identity()
        self.norm = norm(16)
        self.again = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, CLASSES)
        self.register_buffer("steps", torch.tensor([float(seed)] * 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shake(F.gelu(self.first(x)))
        x = self.norm(x + self.drop(self.down(F.gelu(self.up(x)))))
        return self.head(self.drop(F.gelu(self.frozen(self.again(x)))))


def make_engine(
    layout: str,
    mode: str,
    *,
    seed=0,
    dropout=0.0,
    samples=48,
    batch=8,
    shuffle=False,
    lr_scheduler=None,
    optimizer=adamw,
    model=None,
    criterion=nn.functional.cross_entropy,
    **config: Any,
) -> halfmesh.Engine:
    """`batch`: samples of all data ranks together."""
    ranks, parallel = LAYOUTS[layout]
    divided = (2 if "tensor" in parallel else 1) * (2 if "pipeline" in parallel else 1)
    loader = DataLoader(TensorDataset(*make_data(samples)), batch * divided // ranks, shuffle=shuffle)
    model, config = Net(dropout, seed) if model is None else model, {**FP16[mode], "parallel": parallel, **config}
    options = {"lr_scheduler": lr_scheduler, "device": rank_device()}
    return halfmesh.initialize(model, optimizer, criterion, loader, config, **options)


def make_small(**options: Any) -> halfmesh.Engine:
    """One process in fp32, four batches an epoch."""
    return make_engine("one", "none", samples=16, batch=4, **options)


def train(
    engine: halfmesh.Engine, batches: int, save_at: int | None = None, folder: Any = None, look: Any = None
) -> list[tuple[float, float]]:
    """The README's loop for so many batches, over as many epochs as that takes: loss and loss scale of each. After the
    batch `save_at` it saves to `folder`, and calls `look`."""
    seen: list[tuple[float, float]] = []
    while True:
        for x, y in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            seen.append((loss.item(), engine.loss_scale))
            if len(seen) == save_at:
                engine.save(folder)
                if look is not None:
                    look()
            if len(seen) == batches:
                return seen


def whole_state(engine: halfmesh.Engine, close: bool = True) -> dict[str, torch.Tensor]:
    """The full model's state and the optimizer's, in full precision; then the engine is closed, unless told not to."""
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    if close:
        engine.close()
    found = dict(full["model"])
    for name, state in full["optimizer"]["state"].items():
        found |= {f"{name} {key}": torch.as_tensor(value) for key, value in state.items()}
    return found


def weights(engine: halfmesh.Engine) -> dict[str, torch.Tensor]:
    """Of a model in one process: its weights in full precision, copied."""
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The names of the tensors that are not the same to the bit."""
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not torch.equal(found[name].cpu(), value.cpu())]


def change_manifest(place: Path, *without: str, **changes: Any) -> dict[str, Any]:
    """Its content before. The new one has a sha256 that is its own: whoever writes there can do that."""
    path = place / "manifest.json"
    content: dict[str, Any] = json.loads(path.read_text())
    changed = {key: value for key, value in (content | changes).items() if key not in {"sha256", *without}}
    digest = hashlib.sha256(json.dumps(changed, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(changed | {"sha256": digest}))
    return content


class Gate:
    """Holds up saves in the background at their first file, until it is opened; or makes them fail there."""

    def __init__(self, patch: Any, error: OSError | None = None) -> None:
        self.open = threading.Event()
        self._sync, self._error = os.fsync, error
        patch.setattr(os, "fsync", self._wait)

    def _wait(self, descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():
            assert self.open.wait(20)
            if self._error is not None:
                raise self._error
        self._sync(descriptor)
