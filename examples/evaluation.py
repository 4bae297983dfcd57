"""Evaluation on several ranks: every sample counts once, also where they do not divide evenly.

    python examples/evaluation.py
    torchrun --standalone --nproc-per-node 2 examples/evaluation.py

Prints how many digits each rank was given, and an accuracy that is the same on any number of ranks, to the last sample.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

RANKS = int(os.environ.get("WORLD_SIZE", 1))

digits = load_digits()
images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
train, test = TensorDataset(images[:1500], labels[:1500]), TensorDataset(images[1500:], labels[1500:])  # 297 for test

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
engine = halfmesh.initialize(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    nn.CrossEntropyLoss(),
    DataLoader(train, batch_size=60 // RANKS),  # an update sees 60 digits, whatever the layout
    config={},  # any other: nothing below changes with it
    eval_dataloader=DataLoader(test, batch_size=50),  # the last batch is shorter, and ranks have different numbers
)
for images, labels in engine.dataloader:
    engine.zero_grad()
    loss = engine.criterion(engine(images), labels)
    engine.backward(loss)
    engine.step()

engine.eval()  # dropout off; the precision is that of training
right, seen = torch.zeros(2, dtype=torch.int64, device=engine.context.device)
with torch.no_grad():
    for images, labels in engine.eval_dataloader:  # no sample is repeated to fill up
        right += (engine(images).argmax(1) == labels).sum()
        seen += len(labels)
print(f"rank {engine.context.rank} has seen {seen.item()} digits", flush=True)

engine.context.all_reduce(right, "dp")  # the sum over the data ranks; ranks of a tensor group have the same numbers
engine.context.all_reduce(seen, "dp")
if engine.context.rank == 0:
    print(f"accuracy: {right.item()} of {seen.item()}")

# The same in one line: halfmesh.Trainer(engine).evaluate() returns the mean loss, and what its hooks measure.
results = halfmesh.Trainer(engine).evaluate()
if engine.context.rank == 0:
    print(f"loss: {results['eval_loss']:.6f}")
engine.close()
