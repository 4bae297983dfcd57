"""Gradient accumulation: four batches of 16 make the update of one batch of 64, in a quarter of its memory.

    python examples/accumulation.py
    torchrun --standalone --nproc-per-node 2 examples/accumulation.py

Prints the updates of both and how far their weights are apart: rounding only.
"""

import os
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))


def train(batch_size: int, config: dict[str, Any]) -> tuple[int, int, torch.Tensor]:
    """One epoch. Returns the numbers of batches and of updates, and the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batches = updates = 0
    with halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), DataLoader(data, batch_size), config) as engine:
        for images, labels in engine.dataloader:
            engine.zero_grad()  # does nothing within a cycle
            loss = engine.criterion(engine(images), labels)
            engine.backward(loss)
            result = engine.step()  # None, until the last batch of a cycle; an epoch's last cycle may be shorter
            batches += 1
            updates += result is not None
    return batches, updates, torch.cat([param.detach().flatten() for param in model.parameters()])


large_batches, large_updates, large = train(64, dict(clip_grad_norm=1.0))
small_batches, small_updates, small = train(16, dict(clip_grad_norm=1.0, gradient_accumulation=4))
if int(os.environ.get("RANK", 0)) == 0:
    print(f"batches of 64: {large_batches} batches, {large_updates} updates")
    print(f"batches of 16: {small_batches} batches, {small_updates} updates")
    print(f"largest difference of a weight: {(large - small).abs().max().item():.1e}")
