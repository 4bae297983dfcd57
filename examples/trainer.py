"""The Trainer: epochs, evaluation, metrics, progress, files and early stopping, without a loop of your own.

    python examples/trainer.py
    torchrun --standalone --nproc-per-node 2 examples/trainer.py

Needs torchmetrics. Prints progress, and the accuracy on digits that were not trained on: the same number on every rank.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

import halfmesh
from halfmesh.hooks import EarlyStopHook, MetricHook, RunHook

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])


class WeightHook(halfmesh.Hook):
    """A hook of one's own: what `measure` returns joins the records that other hooks write."""

    def measure(self, trainer: halfmesh.Trainer) -> dict[str, float]:
        return {"first_weight": next(trainer.engine.model.parameters()).flatten()[0].item()}


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    DataLoader(train, batch_size=50, shuffle=True),
    dict(bf16=dict(mode="torch"), clip_grad_norm=1.0),
    eval_dataloader=DataLoader(test, batch_size=64),
)
folder = Path(tempfile.mkdtemp())
accuracy = MetricHook({"accuracy": MulticlassAccuracy(num_classes=10, average="micro")})

trainer = halfmesh.Trainer(engine, log_every=10)
trainer.fit(
    epochs=20,
    hooks=[
        accuracy,
        WeightHook(),
        EarlyStopHook("eval_accuracy", mode="max", patience=2),  # ends long before 20 epochs
        RunHook(folder),  # config, plan and records, for `halfmesh report`
        "progress",  # a hook by its name; dict(type="progress") is the same
    ],
)
results = trainer.evaluate(hooks=[accuracy])
outputs = trainer.predict(DataLoader(test, batch_size=64))  # of all digits, in their order, on every rank
right = (outputs.argmax(1) == labels[1500:]).sum().item()
if engine.context.rank == 0:
    print(f"stopped in epoch {trainer.epoch}, accuracy {results['eval_accuracy']:.6f}, predicted right {right} of 297")
    print(f"last record: {(folder / 'metrics.jsonl').read_text().splitlines()[-1]}")
engine.close()
