"""pytorch/examples mnist: convolutions, dropout, Adadelta, a scheduler that steps by the epoch, a shuffled loader.

The images are made, and dropout is off, so that losses can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

from .layouts import GLOBAL_BATCH

IMAGES, EPOCHS = 48, 2
PLAN = {"fc1": "colwise", "fc2": "rowwise"}
PARTITION = ("fc1",)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3, 1)
        self.conv2 = nn.Conv2d(4, 8, 3, 1)
        self.dropout1 = nn.Dropout(0.0)
        self.dropout2 = nn.Dropout(0.0)
        self.fc1 = nn.Linear(8 * 4 * 4, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


def make_model() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def make_loaders(batch: int) -> tuple[DataLoader[Any], DataLoader[Any]]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(IMAGES, 1, 12, 12, generator=generator)
    data = TensorDataset(images, images.flatten(1)[:, :10].argmax(1))
    return DataLoader(data, batch, shuffle=True), DataLoader(data, batch)


def train_plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script before the conversion."""
    model, (train_loader, test_loader) = make_model(), make_loaders(GLOBAL_BATCH)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    losses = []
    for _ in range(EPOCHS):
        model.train()
        for images, targets in train_loader:
            optimizer.zero_grad()
            loss = F.nll_loss(model(images), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            total = sum(F.nll_loss(model(x), y, reduction="sum").item() for x, y in test_loader)
        losses.append(total / IMAGES)
        scheduler.step()
    return losses, model.state_dict()


def train(config: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The script after it."""
    model, (train_loader, test_loader) = make_model(), make_loaders(config["BATCH_SIZE"])
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    engine = halfmesh.initialize(
        model,
        optimizer,
        F.nll_loss,
        train_loader,
        {"lr_interval": "epoch", **config},
        eval_dataloader=test_loader,
        lr_scheduler=scheduler,
        device="cpu",
    )
    losses = []
    for _ in range(EPOCHS):
        engine.train()
        for images, targets in engine.dataloader:
            engine.zero_grad()
            loss = engine.criterion(engine(images), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engine.eval()
        total = torch.zeros(())
        with torch.no_grad():
            for images, targets in engine.eval_dataloader:
                total += F.nll_loss(engine(images), targets, reduction="sum")
        engine.context.all_reduce(total, "dp")
        losses.append(total.item() / IMAGES)
    engine.close(restore=True)
    return losses, model.state_dict()
