"""The shape of modded-nanogpt's train_gpt.py: Muon and AdamW, cached rotary angles, an untied head, bf16, DDP.

    python examples/own_loop/modded_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/modded_before.py

modded_after.py is the same with halfmesh. The tokens are made up, so nothing is downloaded.
"""

import argparse
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
args = parser.parse_args()
vocab_size, n_layer, n_head, n_embd = 64, 2, 4, 32
sequence_length, device_batch_size, batch_size = 32, 2, 8  # the last over all ranks
num_iterations, warmup_iters, cooldown_iters, momentum_iters, val_every = 16, 2, 6, 6, 8


class Rotary(nn.Module):
    def __init__(self, dim, base=10000):
        super().__init__()
        self.dim, self.base, self.seq_len_cached = dim, base, None

    def forward(self, x):
        seq_len = x.shape[1]
        if seq_len != self.seq_len_cached:
            inv_freq = 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=x.device) / self.dim)
            freqs = torch.outer(torch.arange(seq_len, device=x.device), inv_freq)
            self.seq_len_cached = seq_len
            self.cos_cached, self.sin_cached = freqs.cos().bfloat16(), freqs.sin().bfloat16()
        cos, sin = self.cos_cached[None, :, None, :], self.sin_cached[None, :, None, :]
        x1, x2 = x.chunk(2, dim=3)
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=3).type_as(x)


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(n_embd, n_embd, bias=False) for _ in range(4))
        self.c_proj.weight.data.zero_()
        self.rotary = Rotary(n_embd // n_head)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (c(x).view(batch, length, n_head, width // n_head) for c in (self.c_q, self.c_k, self.c_v))
        q, k = self.rotary(F.rms_norm(q, (q.size(-1),))), self.rotary(F.rms_norm(k, (k.size(-1),)))
        y = F.scaled_dot_product_attention(*(part.transpose(1, 2) for part in (q, k, v)), is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = CausalSelfAttention()
        self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd, bias=False), nn.Linear(4 * n_embd, n_embd, bias=False)
        self.c_proj.weight.data.zero_()

    def forward(self, x):
        x = x + self.attn(F.rms_norm(x, (x.size(-1),)))
        return x + self.c_proj(F.relu(self.c_fc(F.rms_norm(x, (x.size(-1),)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab_size, n_embd)})
        self.transformer["h"] = nn.ModuleList(Block() for _ in range(n_layer))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight.data.zero_()

    def forward(self, idx, targets):
        x = F.rms_norm(self.transformer["wte"](idx), (n_embd,))
        for block in self.transformer["h"]:
            x = block(x)
        logits = 30 * torch.tanh(self.lm_head(F.rms_norm(x, (n_embd,))) / 30)
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


class DistributedDataLoader:
    def __init__(self, seed, rank, world_size):
        steps = torch.randint(1, 4, (20_000,), generator=torch.Generator().manual_seed(seed))
        self.tokens, self.position = steps.cumsum(0) % vocab_size, rank * device_batch_size * sequence_length
        self.stride = world_size * device_batch_size * sequence_length

    def next_batch(self):
        buffer = self.tokens[self.position : self.position + device_batch_size * sequence_length + 1]
        self.position += self.stride
        return (part.view(device_batch_size, -1).to(device) for part in (buffer[:-1], buffer[1:]))


rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
if world_size > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
ctx = torch.autocast(device.type, torch.bfloat16) if args.dtype == "bfloat16" else nullcontext()
torch.manual_seed(0)
train_accumulation_steps = batch_size // (device_batch_size * world_size)

raw_model = GPT().to(device)
model = DistributedDataParallel(raw_model) if world_size > 1 else raw_model
optimizer1 = torch.optim.AdamW([raw_model.transformer["wte"].weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0)
optimizer2 = torch.optim.AdamW([raw_model.lm_head.weight], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
optimizer3 = torch.optim.Muon(raw_model.transformer["h"].parameters(), lr=0.02, momentum=0.95, weight_decay=0)


def get_lr(it):
    return min((it + 1) / warmup_iters, 1.0, (num_iterations - it) / cooldown_iters)


optimizers = [optimizer1, optimizer2, optimizer3]
schedulers = [torch.optim.lr_scheduler.LambdaLR(opt, get_lr) for opt in optimizers]
train_loader = DistributedDataLoader(1, rank, world_size)
x, y = train_loader.next_batch()
for step in range(num_iterations + 1):
    if step % val_every == 0:
        val_loader, val_loss = DistributedDataLoader(2, rank, world_size), torch.zeros((), device=device)
        with torch.no_grad(), ctx:
            for _ in range(2 * train_accumulation_steps):
                val_loss += model(*val_loader.next_batch()) / (2 * train_accumulation_steps)
        if world_size > 1:
            dist.all_reduce(val_loss)
            val_loss /= world_size
        if rank == 0:
            print(f"step:{step}/{num_iterations} validation loss {val_loss.item():.6f}")
    if step == num_iterations:
        break
    for i in range(train_accumulation_steps):
        with model.no_sync() if world_size > 1 and i < train_accumulation_steps - 1 else nullcontext():
            with ctx:
                loss = model(x, y)
            (loss / train_accumulation_steps).backward()
        x, y = train_loader.next_batch()
    frac = min(step / momentum_iters, 1)
    optimizer3.param_groups[0]["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    for opt, scheduler in zip(optimizers, schedulers, strict=True):
        opt.step()
        scheduler.step()
    model.zero_grad(set_to_none=True)
    if rank == 0:
        print(f"step:{step}/{num_iterations} loss {loss.item():.6f}")
if world_size > 1:
    dist.destroy_process_group()
