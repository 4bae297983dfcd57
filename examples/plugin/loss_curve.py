"""`torchrun --standalone --nproc-per-node 2 examples/plugin/loss_curve.py`: the curve of README.md, in half a minute.

A small network learns what a random one computes. Each data rank draws samples of its own; the loss is that of 4,096
others, after so many updates.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import halfmesh

UPDATES, BATCH, SHOWN = 1000, 32, (20, 100, 200, 400, 600, 800, 1000)
STRATEGIES: dict[str, dict[str, Any]] = {"replicate": {}, "diloco": {"inner_steps": 20}}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4))


def curve(launch: halfmesh.Launch, data: dict[str, Any]) -> list[float]:
    """The losses after `SHOWN` updates."""
    teacher, model = network(1), network(2)
    draws = torch.Generator().manual_seed(10 + launch.dp_rank)
    held_out = torch.randn(4096, 16, generator=torch.Generator().manual_seed(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    config = {"parallel": {"data": data}}
    losses = []
    with halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device="cpu") as engine:
        for update in range(1, UPDATES + 1):
            x = torch.randn(BATCH, 16, generator=draws)
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), 10 * teacher(x).detach()))
            engine.step()
            if update in SHOWN:
                with torch.no_grad():
                    losses.append(engine.criterion(engine(held_out), 10 * teacher(held_out)).item())
    return losses


if __name__ == "__main__":
    with halfmesh.launch_from_torch({}, device="cpu", verbose=False) as launched:
        for name, keys in STRATEGIES.items():
            found = curve(launched, {"strategy": name, **keys})
            if launched.rank == 0:
                print(f"| `{name}` |", " | ".join(f"{loss:.4f}" for loss in found), "|")
