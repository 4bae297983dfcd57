"""The core of timm's train.py: mixup, accumulation, adaptive clipping, ModelEmaV3, step_update, validation of both.

    python examples/own_loop/timm_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/timm_before.py

timm_after.py is the same with halfmesh. The images are made up, so nothing is downloaded. Needs timm.
"""

import argparse
import os
from contextlib import nullcontext

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data import Mixup
from timm.data.distributed_sampler import OrderedDistributedSampler
from timm.loss import SoftTargetCrossEntropy
from timm.models import model_parameters
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import AverageMeter, ModelEmaV3, NativeScaler, accuracy, dispatch_clip_grad, random_seed, reduce_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH_SIZE, GRAD_ACCUM_STEPS, CLIP_GRAD, EMA_DECAY = 16, 2, 0.02, 0.9  # a batch of all processes together


def make_dataset(count, seed):
    """Images with stripes that tell the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    waves = torch.sin(torch.arange(32.0) * (labels[:, None] + 1) * 0.15)
    return TensorDataset(waves[:, None, None] + 0.3 * torch.randn(count, 3, 32, 32, generator=generator), labels)


def train_one_epoch(epoch, model, loader, optimizer, loss_fn, args):
    model.train()
    losses_m = AverageMeter()
    accum_steps = GRAD_ACCUM_STEPS
    last_accum_steps = len(loader) % accum_steps
    updates_per_epoch = (len(loader) + accum_steps - 1) // accum_steps
    num_updates = epoch * updates_per_epoch
    last_batch_idx_to_accum = len(loader) - last_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = batch_idx == len(loader) - 1 or (batch_idx + 1) % accum_steps == 0
        if batch_idx >= last_batch_idx_to_accum:
            accum_steps = last_accum_steps
        input, target = args.mixup_fn(input.to(args.device), target.to(args.device))
        with model.no_sync() if args.distributed and not need_update else nullcontext():
            with args.amp_autocast():
                loss = loss_fn(model(input), target) / accum_steps
            parameters = model_parameters(model, exclude_head=True)
            if args.amp:
                args.loss_scaler(loss, optimizer, CLIP_GRAD, "agc", parameters, need_update=need_update)
            else:
                loss.backward()
                if need_update:
                    dispatch_clip_grad(parameters, CLIP_GRAD, mode="agc")
                    optimizer.step()
        losses_m.update(loss.item() * accum_steps, len(input))
        if not need_update:
            continue
        num_updates += 1
        optimizer.zero_grad()
        args.model_ema.update(model.module if args.distributed else model, step=num_updates)
        args.lr_scheduler.step_update(num_updates=num_updates, metric=losses_m.avg)
        if args.rank == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"epoch {epoch} update {num_updates}: loss {losses_m.val:.6f} ({losses_m.avg:.6f}) lr {lr:.3e}")


@torch.no_grad()
def validate(model, loader, args, log_suffix=""):
    losses_m, top1_m = AverageMeter(), AverageMeter()
    model.eval()
    for input, target in loader:
        input, target = input.to(args.device), target.to(args.device)
        with args.amp_autocast():
            output = model(input)
            loss = F.cross_entropy(output, target)
        acc1 = accuracy(output, target)[0]
        if args.distributed:
            loss, acc1 = reduce_tensor(loss, args.world_size), reduce_tensor(acc1, args.world_size)
        losses_m.update(loss.item(), len(input))
        top1_m.update(acc1.item(), len(input))
    if args.rank == 0:
        print(f"test{log_suffix}: loss {losses_m.avg:.6f} acc@1 {top1_m.avg:.3f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--amp", action="store_true")
    args = parser.parse_args()

    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    local_rank = os.environ.get("LOCAL_RANK", 0)
    args.device = torch.device(f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu")
    if args.distributed:
        dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo")
    args.amp_autocast = nullcontext
    if args.amp:
        args.amp_autocast = lambda: torch.autocast(args.device.type, torch.float16)
        args.loss_scaler = NativeScaler(args.device.type)
    random_seed(42, args.rank)

    model = timm.create_model("test_vit", img_size=32, patch_size=8, embed_dim=32, depth=2, num_classes=10).to(
        args.device
    )
    optimizer = create_optimizer_v2(model, opt="adamw", lr=3e-3, weight_decay=0.05)
    if args.distributed:
        model = DistributedDataParallel(model)
    args.model_ema = ModelEmaV3(model.module if args.distributed else model, decay=EMA_DECAY, use_warmup=True)

    train_set, eval_set = make_dataset(144, 1), make_dataset(64, 2)
    sampler = DistributedSampler(train_set, args.world_size, args.rank)
    eval_sampler = OrderedDistributedSampler(eval_set, args.world_size, args.rank)
    loader_train = DataLoader(train_set, BATCH_SIZE // args.world_size, sampler=sampler)
    loader_eval = DataLoader(eval_set, BATCH_SIZE // args.world_size, sampler=eval_sampler)
    args.mixup_fn = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, label_smoothing=0.1, num_classes=10)

    updates_per_epoch = (len(loader_train) + GRAD_ACCUM_STEPS - 1) // GRAD_ACCUM_STEPS
    args.lr_scheduler, num_epochs = create_scheduler_v2(
        optimizer, num_epochs=args.epochs, warmup_epochs=1, step_on_epochs=False, updates_per_epoch=updates_per_epoch
    )
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)
        train_one_epoch(epoch, model, loader_train, optimizer, SoftTargetCrossEntropy(), args)
        validate(model, loader_eval, args)
        validate(args.model_ema, loader_eval, args, log_suffix=" (EMA)")
        args.lr_scheduler.step(epoch + 1)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
