"""mae_before.py with halfmesh.

    python examples/own_loop/mae_after.py --set fp16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/mae_after.py --set parallel.data=zero1

Without --set it is fp32 on one process; --set or --config chooses another precision or layout. Needs timm.
"""

import math

import torch
from timm.layers import build_sincos2d_pos_embed
from timm.models.vision_transformer import Block, PatchEmbed
from timm.optim import param_groups_weight_decay
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import halfmesh

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


args = halfmesh.get_default_parser().parse_args()
keys = {"gradient_accumulation": ACCUM_ITER, "track_grad_norm": True}
launch = halfmesh.launch_from_torch(halfmesh.load_config(args.config or keys, args.overrides))
torch.manual_seed(launch.dp_rank)

sampler = DistributedSampler(dataset := make_dataset(128), launch.dp_size, launch.dp_rank)
data_loader = DataLoader(dataset, BATCH_SIZE // launch.dp_size, sampler=sampler, drop_last=True)
model = MaskedAutoencoderViT()
optimizer = torch.optim.AdamW(param_groups_weight_decay(model, 0.05), lr=LR, betas=(0.9, 0.95))
engine = halfmesh.initialize(model, optimizer, None, data_loader, launch)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    engine.train()
    for data_iter_step, (samples, _) in enumerate(engine.dataloader):
        if data_iter_step % ACCUM_ITER == 0:
            lr = adjust_learning_rate(engine.optimizer, data_iter_step / len(data_loader) + epoch)
        loss, _, _ = engine(samples, MASK_RATIO)
        engine.zero_grad()
        engine.backward(loss)
        result = engine.step()
        loss_value_reduce = engine.context.all_reduce(loss.detach().clone(), "dp", op="mean")
        if result is not None and launch.rank == 0:
            step = epoch * len(data_loader) + data_iter_step
            print(f"epoch {epoch} step {step}: loss {loss_value_reduce:.6f} norm {result.grad_norm:.6f} lr {lr:.3e}")
engine.close()
launch.close()
