"""A loop in plain PyTorch: fp16 autocast, a loss scale, accumulation, clipping, DistributedDataParallel.

    python examples/own_loop/before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/before.py

after.py is the same with halfmesh. Both print the same losses.
"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CYCLE = 2  # batches per update
EPOCHS = 2

rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
if ranks > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))
sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, num_replicas=ranks, rank=rank, shuffle=False)
loader = DataLoader(data, batch_size=32 // ranks, sampler=sampler, drop_last=True)

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)).to(device)
wrapped: nn.Module = DistributedDataParallel(model) if ranks > 1 else model
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
criterion = nn.CrossEntropyLoss()
scaler = torch.amp.GradScaler(device.type)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    total = torch.zeros((), device=device)
    for number, (images, labels) in enumerate(loader, start=1):
        images, labels = images.to(device), labels.to(device)
        is_last = number % CYCLE == 0
        no_sync = wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not is_last else nullcontext()
        with no_sync:
            with torch.autocast(device.type, torch.float16):
                loss = criterion(wrapped(images), labels)
            scaler.scale(loss / CYCLE).backward()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        total += loss.detach()
    if ranks > 1:
        dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: mean loss {total.item() / ranks / len(loader):.4f}")

if ranks > 1:
    dist.destroy_process_group()
