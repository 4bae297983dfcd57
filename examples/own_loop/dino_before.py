"""The shape of DINO's main_dino.py: multi-crop, a momentum teacher, a centre of all processes, schedules.

    python examples/own_loop/dino_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/dino_before.py

dino_after.py is the same with halfmesh. The images are made up, so nothing is downloaded. Needs timm.
"""

import argparse
import copy
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.models import VisionTransformer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

EPOCHS, BATCH, GLOBAL_CROPS, LOCAL_CROPS, OUT_DIM = 3, 16, 2, 2, 64  # a batch of all processes together
CLIP_GRAD, FREEZE_LAST_LAYER = 0.05, 1  # the norm of each parameter; epochs


class MultiCrop(Dataset):
    """Stripes, of which large and small crops are taken; the number of an image says where."""

    def __len__(self):
        return 64

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        noise = 0.3 * torch.randn(3, 48, 48, generator=generator)
        image = torch.sin(torch.arange(48.0) * (index % 8 + 1) * 0.2) + noise
        sizes = [32] * GLOBAL_CROPS + [16] * LOCAL_CROPS
        places = [torch.randint(48 - size, (2,), generator=generator).tolist() for size in sizes]
        return [image[:, y : y + size, x : x + size] for size, (y, x) in zip(sizes, places, strict=True)]


class MultiCropWrapper(nn.Module):
    """The backbone sees crops of one size together, the head all of them."""

    def __init__(self):
        super().__init__()
        sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2}
        self.backbone = VisionTransformer(**sizes, num_classes=0, dynamic_img_size=True)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(16, OUT_DIM, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, crops):
        sizes = dict.fromkeys(crop.shape[-1] for crop in crops)
        groups = [torch.cat([crop for crop in crops if crop.shape[-1] == size]) for size in sizes]
        features = torch.cat([self.backbone(group) for group in groups])
        return self.last_layer(F.normalize(self.mlp(features), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(1, OUT_DIM))
        self.teacher_temps = np.concatenate((np.linspace(0.04, 0.07, 1), np.full(EPOCHS - 1, 0.07)))

    def forward(self, student_output, teacher_output, epoch):
        students = (student_output / 0.1).chunk(GLOBAL_CROPS + LOCAL_CROPS)
        teachers = F.softmax((teacher_output - self.center) / self.teacher_temps[epoch], dim=-1).detach().chunk(2)
        pairs = [(q, p) for i, q in enumerate(teachers) for j, p in enumerate(students) if i != j]
        batch_center = teacher_output.detach().mean(dim=0, keepdim=True)
        if dist.is_initialized():
            dist.all_reduce(batch_center)
            batch_center = batch_center / dist.get_world_size()
        self.center = self.center * 0.9 + batch_center * 0.1
        return sum(torch.sum(-q * F.log_softmax(p, dim=-1), dim=-1).mean() for q, p in pairs) / len(pairs)


def cosine_scheduler(base, final, steps, warmup_steps=0):
    warmup = np.linspace(0, base, warmup_steps)
    rest = np.arange(steps - warmup_steps) / (steps - warmup_steps)
    return np.concatenate((warmup, final + 0.5 * (base - final) * (1 + np.cos(np.pi * rest))))


def clip_gradients(model):
    for p in model.parameters():
        if p.grad is not None:
            clip_coef = CLIP_GRAD / (p.grad.norm() + 1e-6)
            if clip_coef < 1:
                p.grad.mul_(clip_coef)


def cancel_gradients_last_layer(epoch, model):
    for name, p in model.named_parameters():
        if epoch < FREEZE_LAST_LAYER and "last_layer" in name:
            p.grad = None


parser = argparse.ArgumentParser()
parser.add_argument("--use-fp16", action="store_true")
args = parser.parse_args()

rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device(f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if torch.cuda.is_available() else "cpu")
if world_size > 1:
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
torch.manual_seed(0)

sampler = DistributedSampler(dataset := MultiCrop(), world_size, rank)
loader = DataLoader(dataset, sampler=sampler, batch_size=BATCH // world_size, drop_last=True)
student = MultiCropWrapper().to(device)
teacher = copy.deepcopy(student).requires_grad_(False)
params = [p for p in student.parameters() if p.requires_grad]
regularized, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
optimizer = torch.optim.AdamW([{"params": regularized}, {"params": others, "weight_decay": 0.0}])
ddp_student = DistributedDataParallel(student) if world_size > 1 else student
dino_loss = DINOLoss().to(device)
scaler = torch.amp.GradScaler(device.type, enabled=args.use_fp16)

steps = EPOCHS * len(loader)
lr_schedule = cosine_scheduler(3e-4, 1e-5, steps, warmup_steps=2)
wd_schedule = cosine_scheduler(0.04, 0.4, steps)
momentum_schedule = cosine_scheduler(0.9, 1.0, steps)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for it, images in enumerate(loader, epoch * len(loader)):
        for group in optimizer.param_groups:
            group["lr"] = lr_schedule[it]
        optimizer.param_groups[0]["weight_decay"] = wd_schedule[it]
        images = [image.to(device, non_blocking=True) for image in images]
        with torch.autocast(device.type, torch.float16, enabled=args.use_fp16):
            teacher_output = teacher(images[:GLOBAL_CROPS])
            student_output = ddp_student(images)
            loss = dino_loss(student_output, teacher_output, epoch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        clip_gradients(student)
        cancel_gradients_last_layer(epoch, student)
        scaler.step(optimizer)
        scaler.update()
        m = momentum_schedule[it]
        with torch.no_grad():
            for param_q, param_k in zip(student.parameters(), teacher.parameters(), strict=True):
                param_k.mul_(m).add_((1 - m) * param_q)
        if rank == 0:
            wd = optimizer.param_groups[0]["weight_decay"]
            print(f"epoch {epoch} iteration {it}: loss {loss:.6f} centre {dino_loss.center.norm():.6f} wd {wd:.6f}")
if world_size > 1:
    dist.destroy_process_group()
