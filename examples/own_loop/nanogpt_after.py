"""nanogpt_before.py with halfmesh.

    python examples/own_loop/nanogpt_after.py --set bf16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/nanogpt_after.py --set parallel.data=fsdp

Without --set it is fp32 on one process; --set or --config chooses another precision or layout.
"""

import math
import os
import tempfile
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import halfmesh

parser = halfmesh.get_default_parser()
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

config = halfmesh.load_config(args.config or {"clip_grad_norm": grad_clip}, args.overrides)
launch = halfmesh.launch_from_torch(config)
launch = replace(launch, config=config.replace(gradient_accumulation=accumulation // launch.dp_size))
device, rank = launch.device, launch.rank
torch.manual_seed(1337 + launch.dp_rank)

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
        q, k, v = self.c_attn(x).chunk(3, dim=2)
        q, k, v = (part.view(batch, length, -1, width // n_head).transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(batch, length, -1))


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

    def forward(self, idx):
        x = self.wte(idx) + self.wpe(torch.arange(idx.shape[1], device=idx.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def criterion(logits, targets):
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)


def configure_optimizer(model):
    params = list(model.parameters())
    decayed, others = [p for p in params if p.dim() >= 2], [p for p in params if p.dim() < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(0.9, 0.95))


model = GPT()
engine = halfmesh.initialize(model, configure_optimizer(model), criterion, None, launch)
best = {"val_loss": 1e9}
engine.attach("best", best)
if args.resume:
    engine.load(args.out_dir)


@torch.no_grad()
def estimate_loss():
    means = {}
    engine.eval()
    for split in ("train", "val"):
        losses = torch.zeros(eval_iters, device=device)
        for k in range(eval_iters):
            x, y = get_batch(split)
            losses[k] = engine.criterion(engine(x), y)
        means[split] = engine.context.all_reduce(losses.mean(), "dp", op="mean").item()
    engine.train()
    return means


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = (it - warmup_iters) / (args.max_iters - warmup_iters)
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


# -- the loop

x, y = get_batch("train")
while True:
    for group in engine.optimizer.param_groups:
        group["lr"] = get_lr(engine.global_step)

    if args.eval_interval and engine.global_step % args.eval_interval == 0:  # on all ranks
        losses = estimate_loss()
        if rank == 0:
            print(f"step {engine.global_step}: train loss {losses['train']:.6f}, val loss {losses['val']:.6f}")
        if losses["val"] < best["val_loss"]:
            best["val_loss"] = losses["val"]
            if engine.global_step > 0 and args.out_dir:
                engine.save(args.out_dir, keep=1)
    if engine.global_step >= args.max_iters:
        break

    for _ in range(engine.config.gradient_accumulation):
        loss = engine.criterion(engine(x), y)
        x, y = get_batch("train")
        engine.backward(loss)
        engine.step()

    done = engine.global_step - 1
    if done % log_interval == 0 and rank == 0:
        print(f"iter {done}: loss {loss.item():.6f}")

engine.close()
launch.close()
