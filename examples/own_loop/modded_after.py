"""modded_before.py with halfmesh.

    python examples/own_loop/modded_after.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/modded_after.py --set bf16.mode=naive

Without --set it is bf16 by autocast, as before; --set or --config chooses another precision or layout.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

import halfmesh

args = halfmesh.get_default_parser().parse_args()
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


config = halfmesh.load_config(args.config or {"bf16": {"mode": "torch"}}, args.overrides)
launch = halfmesh.launch_from_torch(config)
device, dp_rank, dp_size = launch.device, launch.dp_rank, launch.dp_size
torch.manual_seed(0)
train_accumulation_steps = batch_size // (device_batch_size * dp_size)

model = GPT()
optimizer1 = torch.optim.AdamW([model.transformer["wte"].weight], lr=0.1, betas=(0.9, 0.95), weight_decay=0)
optimizer2 = torch.optim.AdamW([model.lm_head.weight], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
optimizer3 = torch.optim.Muon(model.transformer["h"].parameters(), lr=0.02, momentum=0.95, weight_decay=0)


def get_lr(it):
    return min((it + 1) / warmup_iters, 1.0, (num_iterations - it) / cooldown_iters)


optimizers = [optimizer1, optimizer2, optimizer3]
launch = replace(launch, config=config.replace(gradient_accumulation=train_accumulation_steps))
engine = halfmesh.initialize(
    model, optimizers, None, None, launch, lr_scheduler=lambda opt: torch.optim.lr_scheduler.LambdaLR(opt, get_lr)
)
train_loader = DistributedDataLoader(1, dp_rank, dp_size)
x, y = train_loader.next_batch()
for step in range(num_iterations + 1):
    if step % val_every == 0:
        val_loader, val_loss = DistributedDataLoader(2, dp_rank, dp_size), torch.zeros((), device=device)
        with torch.no_grad():
            for _ in range(2 * train_accumulation_steps):
                val_loss += engine(*val_loader.next_batch()) / (2 * train_accumulation_steps)
        engine.context.all_reduce(val_loss, "dp", op="mean")
        if launch.rank == 0:
            print(f"step:{step}/{num_iterations} validation loss {val_loss.item():.6f}")
    if step == num_iterations:
        break
    frac = min(step / momentum_iters, 1)
    optimizer3.param_groups[0]["momentum"] = (1 - frac) * 0.85 + frac * 0.95
    for _ in range(train_accumulation_steps):
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        x, y = train_loader.next_batch()
    if launch.rank == 0:
        print(f"step:{step}/{num_iterations} loss {loss.item():.6f}")
engine.close()
launch.close()
