"""FSDP: each data rank keeps its shard of weights, gradients and optimizer state, and gathers a layer when it needs it.

    python examples/fsdp.py                                              # one rank keeps all
    torchrun --standalone --nproc-per-node 2 examples/fsdp.py

Prints what each rank keeps, and losses, which are the same on any number of ranks (within bf16's rounding).
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


RANKS = int(os.environ.get("WORLD_SIZE", 1))
config = dict(
    parallel=dict(data="fsdp" if RANKS > 1 else "replicate"),
    bf16=dict(mode="naive"),  # layers are gathered and computed in bf16; masters and sums of gradients are fp32
    clip_grad_norm=1.0,
)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 10))
whole = sum(param.numel() for param in model.parameters())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine = halfmesh.initialize(
    model, optimizer, nn.CrossEntropyLoss(), DataLoader(data, batch_size=64 // RANKS, drop_last=True), config
)

total = torch.zeros((), device=engine.context.device)
for step, (images, labels) in enumerate(engine.dataloader, start=1):
    engine.zero_grad()
    loss = engine.criterion(engine(images), labels)
    engine.backward(loss)
    engine.step()
    total += loss.detach()
    if step % 14 == 0:
        engine.context.all_reduce(total, "dp")  # each rank has seen other digits
        if engine.context.rank == 0:
            print(f"updates {step - 13} to {step}: mean loss {total.item() / 14 / RANKS:.4f}")
        total.zero_()

kept = sum(state["exp_avg"].numel() for state in optimizer.state.values() if "exp_avg" in state)
print(f"rank {engine.context.rank} keeps the optimizer's state of {kept} of {whole} numbers", flush=True)
engine.close()
