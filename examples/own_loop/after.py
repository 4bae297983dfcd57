"""before.py with halfmesh. What it did by hand is in the config, which can now say more: see the end of this file.

    python examples/own_loop/after.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/after.py

| before.py | here |
|---|---|
| init_process_group, set_device, .to(device) | initialize |
| DistributedSampler, set_epoch | initialize: the loader is given as it is, and sharded |
| DistributedDataParallel, no_sync | initialize, gradient_accumulation |
| autocast, GradScaler, scale, unscale_, update | fp16 |
| loss / CYCLE; what is left of a cycle at an epoch's end | gradient_accumulation; not lost here |
| clip_grad_norm_ | clip_grad_norm |
"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

EPOCHS = 2
config = dict(fp16=dict(mode="torch"), gradient_accumulation=2, clip_grad_norm=1.0)
ranks = int(os.environ.get("WORLD_SIZE", 1))

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
loader = DataLoader(data, batch_size=32 // ranks, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine = halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, config)

for epoch in range(EPOCHS):
    total = torch.zeros((), device=engine.context.device)
    for images, labels in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(images), labels)
        engine.backward(loss)
        engine.step()
        total += loss.detach()
    engine.context.all_reduce(total, "dp")
    if engine.context.rank == 0:
        print(f"epoch {epoch}: mean loss {total.item() / ranks / len(engine.dataloader):.4f}")
engine.close()

# With nothing but another config: fp16=dict(mode="naive"), or bf16=dict(mode="torch"); parallel=dict(data="fsdp"), or
# dict(pipeline=dict(size=2, microbatches=4)), or dict(tensor=2); activation_checkpoint="full"; resume="auto" ...
