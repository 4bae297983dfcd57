"""Checkpoints: a run that is told to end goes on exactly, as often as it is started again; or on other ranks.

    python examples/checkpoint.py run_a                             # not interrupted, to compare with
    python examples/checkpoint.py run_b --end-after 20              # is told to end (SIGTERM), as clusters do
    python examples/checkpoint.py run_b                             # goes on after update 20
    torchrun --standalone --nproc-per-node 2 examples/checkpoint.py run_b   # so it does on other ranks

Prints after which update it begins, and the norm of the weights in the end: of run_a and run_b the same to the last
bit, where they had the same number of ranks.
"""

import argparse
import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

parser = argparse.ArgumentParser()
parser.add_argument("folder", help="where the checkpoints are")
parser.add_argument("--end-after", type=int, help="end the run after so many updates")
args = parser.parse_args()
RANKS = int(os.environ.get("WORLD_SIZE", 1))

config = dict(
    fp16=dict(mode="naive"),
    checkpoint=dict(directory=args.folder, every=10, keep=2),  # every 10 updates, and when told to end
    resume="auto",  # from the newest checkpoint there, if there is one
)

digits = load_digits()
data = TensorDataset(torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
engine = halfmesh.initialize(
    model,
    optimizer,
    nn.CrossEntropyLoss(),
    DataLoader(data, batch_size=64 // RANKS, drop_last=True),
    config,
    lr_scheduler=halfmesh.LinearWarmupLR(optimizer, warmup_steps=5, total_steps=56),
)
if engine.context.rank == 0:
    print(f"begins after update {engine.global_step}", flush=True)

for _ in range(engine.dataloader.next_epoch, 2):  # epochs
    for images, labels in engine.dataloader:  # of an epoch that was interrupted, what is left
        engine.zero_grad()
        loss = engine.criterion(engine(images), labels)
        engine.backward(loss)
        engine.step()
        if engine.global_step == args.end_after and engine.context.rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)  # one rank is enough: all save after the same update, and end

updates, rank = engine.global_step, engine.context.rank
engine.close()  # gives the weights back in fp32
if rank == 0:
    norm = torch.linalg.vector_norm(torch.cat([param.detach().flatten() for param in model.parameters()]).double())
    print(f"ends after update {updates}, norm of the weights {norm.item():.12f}")
