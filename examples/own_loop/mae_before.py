"""The shape of MAE's main_pretrain.py: random masks, the loss in the model, lr by iteration, accumulation, grad norms.

    python examples/own_loop/mae_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/mae_before.py

mae_after.py is the same with halfmesh. The images are made up, so nothing is downloaded. Needs timm.
"""

import argparse
import math
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, PatchEmbed
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

IMAGE, PATCH, WIDTH, DECODER_WIDTH, MASK_RATIO = 32, 8, 48, 32, 0.75
EPOCHS, WARMUP_EPOCHS, BATCH_SIZE, ACCUM_ITER, LR, MIN_LR = 3, 1, 16, 2, 4e-3, 0.0  # a batch of all processes together


def make_dataset(count):
    """Images with waves of one of 8 lengths."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(8, (count,), generator=generator)
    waves = torch.sin(torch.arange(float(IMAGE)) * (labels[:, None] + 1) * 0.2)
    return TensorDataset(waves[:, None, None] + 0.1 * torch.randn(count, 3, IMAGE, IMAGE, generator=generator), labels)


class MaskedAutoencoderViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed(IMAGE, PATCH, 3, WIDTH)
        self.blocks = nn.Sequential(*(Block(WIDTH, 4) for _ in range(2)))
        self.norm, self.decoder_embed = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, DECODER_WIDTH)
        self.mask_token = nn.Parameter(torch.empty(1, 1, DECODER_WIDTH).normal_(std=0.02))
        self.decoder_blocks = Block(DECODER_WIDTH, 4)
        self.decoder_norm, self.decoder_pred = nn.LayerNorm(DECODER_WIDTH), nn.Linear(DECODER_WIDTH, PATCH**2 * 3)
        grid = [IMAGE // PATCH, IMAGE // PATCH]
        self.pos_embed = nn.Parameter(build_sincos2d_pos_embed(grid, WIDTH)[None], requires_grad=False)
        self.decoder_pos_embed = nn.Parameter(build_sincos2d_pos_embed(grid, DECODER_WIDTH)[None], requires_grad=False)

    def patchify(self, images):
        h = w = IMAGE // PATCH
        x = images.reshape(-1, 3, h, PATCH, w, PATCH)
        return torch.einsum("nchpwq->nhwpqc", x).reshape(-1, h * w, PATCH**2 * 3)

    def random_masking(self, x, mask_ratio):
        n, length, width = x.shape
        len_keep = int(length * (1 - mask_ratio))
        noise = torch.rand(n, length, device=x.device)
        ids_shuffle = torch.argsort(noise, dim=1)
        ids_restore = torch.argsort(ids_shuffle, dim=1)
        kept = torch.gather(x, 1, ids_shuffle[:, :len_keep, None].repeat(1, 1, width))
        mask = torch.ones(n, length, device=x.device)
        mask[:, :len_keep] = 0
        return kept, torch.gather(mask, 1, ids_restore), ids_restore

    def forward(self, images, mask_ratio):
        x, mask, ids_restore = self.random_masking(self.patch_embed(images) + self.pos_embed, mask_ratio)
        x = self.decoder_embed(self.norm(self.blocks(x)))
        tokens = self.mask_token.to(x.dtype).repeat(len(x), ids_restore.shape[1] - x.shape[1], 1)
        x = torch.gather(torch.cat([x, tokens], dim=1), 1, ids_restore[:, :, None].repeat(1, 1, DECODER_WIDTH))
        pred = self.decoder_pred(self.decoder_norm(self.decoder_blocks(x + self.decoder_pos_embed)))
        loss = (pred - self.patchify(images)).square().mean(dim=-1)
        return (loss * mask).sum() / mask.sum(), pred, mask


def adjust_learning_rate(optimizer, epoch):
    """A warm-up, then half a cosine; `epoch` has a fraction."""
    if epoch < WARMUP_EPOCHS:
        lr = LR * epoch / WARMUP_EPOCHS
    else:
        done = (epoch - WARMUP_EPOCHS) / (EPOCHS - WARMUP_EPOCHS)
        lr = MIN_LR + (LR - MIN_LR) * 0.5 * (1.0 + math.cos(math.pi * done))
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    return lr


parser = argparse.ArgumentParser()
parser.add_argument("--use-fp16", action="store_true")
args = parser.parse_args()
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
if world_size > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(rank)

sampler = DistributedSampler(dataset := make_dataset(128), world_size, rank)
data_loader = DataLoader(dataset, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)
model_without_ddp = MaskedAutoencoderViT().to(device)
model = DistributedDataParallel(model_without_ddp) if world_size > 1 else model_without_ddp
optimizer = torch.optim.AdamW(param_groups_weight_decay(model_without_ddp, 0.05), lr=LR, betas=(0.9, 0.95))
scaler = torch.amp.GradScaler(device.type, enabled=args.use_fp16)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    optimizer.zero_grad()
    for data_iter_step, (samples, _) in enumerate(data_loader):
        if data_iter_step % ACCUM_ITER == 0:
            lr = adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch)
        samples = samples.to(device, non_blocking=True)
        update_grad = (data_iter_step + 1) % ACCUM_ITER == 0
        with model.no_sync() if world_size > 1 and not update_grad else nullcontext():
            with torch.autocast(device.type, torch.float16, enabled=args.use_fp16):
                loss, _, _ = model(samples, MASK_RATIO)
            scaler.scale(loss / ACCUM_ITER).backward()
        loss_value_reduce = loss.detach().clone()
        if world_size > 1:
            dist.all_reduce(loss_value_reduce)
            loss_value_reduce /= world_size
        if update_grad:
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if rank == 0:
                step = epoch * len(data_loader) + data_iter_step
                print(f"epoch {epoch} step {step}: loss {loss_value_reduce:.6f} norm {norm:.6f} lr {lr:.3e}")
if world_size > 1:
    dist.destroy_process_group()
