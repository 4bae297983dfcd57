"""Three dimensions at once: tensor x pipeline x data parallelism.

    python examples/three_d.py                                           # one rank
    torchrun --standalone --nproc-per-node 4 examples/three_d.py         # 2 stages, each layer sharded over 2 ranks
    torchrun --standalone --nproc-per-node 8 examples/three_d.py         # two copies of that, on different data

Prints the place of each rank in the mesh, and losses, which are the same in all three.
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
COPIES = max(1, RANKS // 4)  # data ranks: those that tensor and pipeline parallelism leave

config = dict(
    parallel=dict(
        tensor=dict(size=2, plan={"*.up": "colwise", "*.down": "rowwise"}),
        pipeline=dict(size=2, microbatches=2),
        data=dict(strategy="zero1"),  # each copy keeps the optimizer's state of its shard; or "replicate", "fsdp"
    ),
    clip_grad_norm=1.0,
)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), *(Block(32) for _ in range(4)), nn.Linear(32, 10))
engine = halfmesh.initialize(
    model,
    torch.optim.AdamW(model.parameters(), lr=0.01),
    nn.CrossEntropyLoss(),
    DataLoader(data, batch_size=64 // COPIES, drop_last=True),  # an update sees 64 digits in each layout
    config if RANKS > 1 else dict(clip_grad_norm=1.0),
)
mesh = engine.context
place = f"stage {mesh.pp_rank} of {mesh.pp_size}, copy {mesh.dp_rank} of {mesh.dp_size}"
print(f"rank {mesh.rank}: {place}, part {mesh.tp_rank} of {mesh.tp_size} of each layer", flush=True)

total = torch.zeros((), device=mesh.device)
for step, (images, labels) in enumerate(engine.dataloader, start=1):
    engine.zero_grad()
    loss = engine.criterion(engine(images), labels)
    engine.backward(loss)
    engine.step()
    total += loss.detach()
    if step % 14 == 0:
        engine.context.all_reduce(total, "dp")  # each copy has seen other digits
        if mesh.rank == 0:
            print(f"updates {step - 13} to {step}: mean loss {total.item() / 14 / COPIES:.5f}", flush=True)
        total.zero_()
engine.close()
