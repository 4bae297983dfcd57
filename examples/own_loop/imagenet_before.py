"""The shape of pytorch/examples imagenet: a ResNet, DDP, meters, StepLR by the epoch, the best checkpoint, resume.

    python examples/own_loop/imagenet_before.py
    torchrun --standalone --nproc-per-node 2 examples/own_loop/imagenet_before.py

imagenet_after.py is the same with halfmesh. The images are made up, so nothing is downloaded.
"""

import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.downsample(x))


def make_resnet(classes):
    blocks = Block(3, 8, 1), Block(8, 16, 2), Block(16, 32, 2)
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def make_dataset(count, seed):
    """Images of 16 x 16 pixels, with stripes that tell the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    waves = torch.sin(torch.arange(16.0) * (labels[:, None] + 1) * 0.3)
    images = waves[:, None, None, :] + 0.5 * torch.randn(count, 3, 16, 16, generator=generator)
    return TensorDataset(images, labels)


class AverageMeter:
    def __init__(self, name, device):
        self.name, self.device = name, device
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=self.device)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.5f}"


def accuracy(output, target, k):
    """The percentage of samples whose class is among the `k` likeliest."""
    found = output.topk(k, dim=1).indices == target[:, None]
    return found.any(dim=1).float().mean() * 100


def train(args, loader, model, criterion, optimizer, epoch, device):
    losses, top1, top5 = (AverageMeter(name, device) for name in ("loss", "acc@1", "acc@5"))
    model.train()
    for i, (images, target) in enumerate(loader):
        images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), len(images))
        top1.update(accuracy(output, target, 1).item(), len(images))
        top5.update(accuracy(output, target, 5).item(), len(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if i % args.print_freq == 0 and args.rank == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] {losses}  {top1}  {top5}")


def validate(args, loader, model, criterion, device):
    losses, top1 = AverageMeter("loss", device), AverageMeter("acc@1", device)

    def run(batches):
        with torch.no_grad():
            for images, target in batches:
                images, target = images.to(device, non_blocking=True), target.to(device, non_blocking=True)
                output = model(images)
                losses.update(criterion(output, target).item(), len(images))
                top1.update(accuracy(output, target, 1).item(), len(images))

    model.eval()
    run(loader)
    if args.distributed:
        losses.all_reduce()
        top1.all_reduce()
        seen = len(loader.sampler) * args.world_size
        if seen < len(loader.dataset):  # what the sampler has dropped, on every rank
            rest = Subset(loader.dataset, range(seen, len(loader.dataset)))
            run(DataLoader(rest, batch_size=args.batch_size))
    if args.rank == 0:
        print(f"validation: {losses}  {top1}")
    return top1.sum / top1.count


def save_checkpoint(state, is_best, folder):
    path = os.path.join(folder, "checkpoint.pth.tar")
    torch.save(state, path)
    if is_best:
        shutil.copyfile(path, os.path.join(folder, "model_best.pth.tar"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="of all processes together")
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--print-freq", type=int, default=4)
    parser.add_argument("--out", help="the folder of the checkpoints")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--evaluate", action="store_true")
    args = parser.parse_args()

    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    args.distributed = args.world_size > 1
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    if args.distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        args.batch_size //= args.world_size

    torch.manual_seed(0)
    model = make_resnet(10).to(device)
    if args.distributed:
        model = DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    start_epoch, best_acc1 = 0, 0.0
    if args.resume:
        state = torch.load(os.path.join(args.out, "checkpoint.pth.tar"), map_location=device)
        start_epoch, best_acc1 = state["epoch"], state["best_acc1"]
        model.load_state_dict(state["state_dict"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])

    train_set, val_set = make_dataset(256, 1), make_dataset(101, 2)
    train_sampler = val_sampler = None
    if args.distributed:
        train_sampler = DistributedSampler(train_set)
        val_sampler = DistributedSampler(val_set, shuffle=False, drop_last=True)
    train_loader = DataLoader(
        train_set, batch_size=args.batch_size, shuffle=train_sampler is None, sampler=train_sampler
    )
    val_loader = DataLoader(val_set, batch_size=args.batch_size, sampler=val_sampler)

    if args.evaluate:
        validate(args, val_loader, model, criterion, device)
        return

    for epoch in range(start_epoch, args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train(args, train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(args, val_loader, model, criterion, device)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        if args.rank == 0 and args.out:
            state = {
                "epoch": epoch + 1,
                "state_dict": model.state_dict(),
                "best_acc1": best_acc1,
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
            }
            save_checkpoint(state, is_best, args.out)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
