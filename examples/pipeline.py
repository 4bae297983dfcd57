"""Pipeline parallelism: the layers are cut into stages, which work on parts of a batch (microbatches) at once.

    python examples/pipeline.py                                          # one rank: one stage
    torchrun --standalone --nproc-per-node 2 examples/pipeline.py

Prints which layers each rank holds, losses, which are the same on any number of ranks, and the accuracy on all digits.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

RANKS = int(os.environ.get("WORLD_SIZE", 1))

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

torch.manual_seed(0)
model = nn.Sequential(
    *(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()),
    *(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()),
    *(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()),
    nn.Linear(64, 10),
)  # any nn.Sequential can be cut; docs/pipeline.md: other models

# microbatches have to divide the loader's batch_size, and to be at least as many as stages
config = dict(parallel=dict(pipeline=dict(size=RANKS, microbatches=4))) if RANKS > 1 else {}
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.005),
    nn.CrossEntropyLoss(),
    DataLoader(data, batch_size=60, drop_last=True),
    config,
    eval_dataloader=DataLoader(data, batch_size=300),
)
held = {name.split(".")[0]: None for name, _ in engine.model.named_parameters()}
print(f"rank {engine.context.rank} holds the linear layers {', '.join(held)}", flush=True)

for step, (images, labels) in enumerate(engine.dataloader, start=1):
    engine.zero_grad()
    output = engine(images)  # under a pipeline a handle: nothing is computed yet
    loss = engine.criterion(output, labels)  # another one
    engine.backward(loss)  # all microbatches go forward and backward through the stages
    engine.step()
    if step % 10 == 0 and engine.context.rank == 0:
        print(f"update {step}: loss {loss.item():.5f}")  # now it is a number, on every rank

engine.eval()
right = torch.zeros((), dtype=torch.int64, device=engine.device)
with torch.no_grad():
    for images, labels in engine.eval_dataloader:
        output = engine(images)  # in evaluation the real output, at once, on the rank with the last stage
        if engine.context.counts_outputs:
            right += (output.argmax(1) == labels).sum()
engine.context.all_reduce(right)
if engine.context.rank == 0:
    print(f"accuracy: {right.item()} of {len(data)}")
engine.close()
