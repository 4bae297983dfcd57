"""The shape of nanoGPT's train.py: batches from a memmap, accumulation, clipping, lr by hand, GradScaler, DDP.

    python examples/own_loop/nanogpt_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/nanogpt_before.py

nanogpt_after.py is the same with halfmesh. The tokens are made up, so nothing is downloaded.
"""

import argparse
import math
import os
import tempfile
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
parser.add_argument("--out-dir")
parser.add_argument("--resume", action="store_true")
parser.add_argument("--max-iters", type=int, default=12)
parser.add_argument("--eval-interval", type=int, default=4, help="0: no evaluation")
args = parser.parse_args()

vocab_size, block_size, n_layer, n_head, n_embd = 32, 16, 2, 4, 32
batch_size, accumulation = 8, 4  # sequences of a micro step, micro steps of an update over all ranks
learning_rate, min_lr, warmup_iters, grad_clip = 1e-2, 1e-3, 3, 1.0
eval_iters, log_interval = 3, 2

# -- processes, seeds, precision

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    assert accumulation % world_size == 0
    accumulation //= world_size
else:
    rank, world_size = 0, 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
device_type = "cuda" if "cuda" in device else "cpu"
if device_type == "cuda":
    torch.cuda.set_device(device)
torch.manual_seed(1337 + rank)
ctx = nullcontext() if args.dtype == "float32" else torch.autocast(device_type, dtype=getattr(torch, args.dtype))
scaler = torch.amp.GradScaler(device_type, enabled=args.dtype == "float16")

# -- data

data_folder = tempfile.TemporaryDirectory()
data_dir = data_folder.name
for split, length in (("train", 4096), ("val", 512)):
    noise = np.random.default_rng(length).integers(0, 3, length)
    (noise.cumsum() % vocab_size).astype(np.uint16).tofile(os.path.join(data_dir, f"{split}.bin"))


def get_batch(split):
    data = np.memmap(os.path.join(data_dir, f"{split}.bin"), dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - block_size, (batch_size,))
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in starts])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in starts])
    return x.to(device), y.to(device)


# -- model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.c_attn(x).split(n_embd, dim=2)
        q, k, v = (part.view(batch, length, n_head, width // n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(n_embd), Attention(), nn.LayerNorm(n_embd)
        self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.c_proj(F.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(n_layer)), nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        return logits, loss


def configure_optimizer(model):
    params = list(model.parameters())
    decayed, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


model = GPT().to(device)
optimizer = configure_optimizer(model)
iter_num, best_val_loss = 0, 1e9
if args.resume:
    checkpoint = torch.load(os.path.join(args.out_dir, "ckpt.pt"), map_location=device)
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    iter_num, best_val_loss = checkpoint["iter_num"], checkpoint["best_val_loss"]
raw_model = model
if ddp:
    model = DistributedDataParallel(model)


@torch.no_grad()
def estimate_loss():
    means = {}
    raw_model.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            x, y = get_batch(split)
            with ctx:
                _, loss = raw_model(x, y)
            losses[k] = loss.item()
        means[split] = losses.mean().item()
    raw_model.train()
    return means


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (args.max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# -- the loop

x, y = get_batch("train")
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)

    if args.eval_interval and iter_num % args.eval_interval == 0 and rank == 0:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
        if losses["val"] < best_val_loss:
            best_val_loss = losses["val"]
            if iter_num > 0 and args.out_dir:
                checkpoint = {
                    "model": raw_model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "iter_num": iter_num,
                    "best_val_loss": best_val_loss,
                }
                torch.save(checkpoint, os.path.join(args.out_dir, "ckpt.pt"))
    if iter_num >= args.max_iters:
        break

    for micro_step in range(accumulation):
        if ddp:
            model.require_backward_grad_sync = micro_step == accumulation - 1
        with ctx:
            _, loss = model(x, y)
            loss = loss / accumulation
        x, y = get_batch("train")
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)

    if iter_num % log_interval == 0 and rank == 0:
        print(f"iter {iter_num}: loss {loss.item() * accumulation:.6f}")
    iter_num += 1

if ddp:
    dist.destroy_process_group()
