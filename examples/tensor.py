"""Tensor parallelism: each layer is sharded over all ranks, which compute every batch together.

    python examples/tensor.py                                            # one rank: nothing to shard
    torchrun --standalone --nproc-per-node 2 examples/tensor.py

Prints what each rank holds, and losses, which are the same on any number of ranks.
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh


class Block(nn.Module):
    """[batch, width] to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


parallel = dict(
    tensor=dict(
        size=int(os.environ.get("WORLD_SIZE", 1)),  # all ranks; with fewer, data parallelism takes those that are left
        plan={  # timm's and Hugging Face's transformers need none: plan="auto", the default, knows them
            "*.up": "colwise",  # shards its output features, which stay sharded ...
            "*.down": "rowwise",  # ... until this layer takes them, and sums up
        },
    )
)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 10))
whole = sum(param.numel() for param in model.parameters())
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    DataLoader(data, batch_size=60, drop_last=True),
    dict(parallel=parallel, clip_grad_norm=1.0),  # the norm is that of the whole gradient
)
held = sum(param.numel() for param in engine.model.parameters())
print(f"rank {engine.context.rank} holds {held} of {whole} numbers", flush=True)
for step, (images, labels) in enumerate(engine.dataloader, start=1):
    engine.zero_grad()
    loss = engine.criterion(engine(images), labels)
    engine.backward(loss)
    engine.step()
    if step % 10 == 0 and engine.context.rank == 0:
        print(f"update {step}: loss {loss.item():.5f}")
weights = engine.full_state_dict()  # of the whole model, on rank 0
engine.close()
if engine.context.rank == 0:
    model = nn.Sequential(nn.Linear(64, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 10))
    model.load_state_dict(weights)
