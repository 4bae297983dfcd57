"""The hook, by its name."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh


class Records(halfmesh.Hook):
    def __init__(self) -> None:
        self.records: list[dict[str, float]] = []

    def write(self, trainer: halfmesh.Trainer, record: dict[str, float]) -> None:
        self.records.append(dict(record))


def test_what_it_measures() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(64, 4), torch.randint(2, (64,)))
    engine = halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        DataLoader(data, batch_size=8),
        {"fp16": {"mode": "torch", "init_scale": 2.0**20}},  # far too high: the first updates overflow
        device="cpu",
    )
    records = Records()
    halfmesh.Trainer(engine, log_every=2).fit(epochs=1, hooks=[{"type": "skip_rate", "warn_above": 0.9}, records])
    skipped, rates = engine.skipped_steps, [record["skip_rate"] for record in records.records]
    engine.close()
    assert 0 < skipped < 8
    assert rates[0] == 1.0
    assert sum(rates) * 2 == skipped
