"""imagenet_before.py with halfmesh.

    python examples/own_loop/imagenet_after.py --set fp16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/imagenet_after.py --set parallel.data=zero1

Without --set it is fp32 on one process; --set or --config chooses another precision or layout.
"""

import os

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh


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
    def __init__(self, name):
        self.name = name
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    def all_reduce(self, context):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32, device=context.device)
        context.all_reduce(total, "dp")
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.5f}"


def accuracy(output, target, k):
    """The percentage of samples whose class is among the `k` likeliest."""
    found = output.topk(k, dim=1).indices == target[:, None]
    return found.any(dim=1).float().mean() * 100


def train(args, engine, epoch):
    losses, top1, top5 = (AverageMeter(name) for name in ("loss", "acc@1", "acc@5"))
    engine.train()
    for i, (images, target) in enumerate(engine.dataloader):
        output = engine(images)
        loss = engine.criterion(output, target)
        engine.zero_grad()
        engine.backward(loss)
        engine.step()
        losses.update(loss.item(), len(images))
        top1.update(accuracy(output, target, 1).item(), len(images))
        top5.update(accuracy(output, target, 5).item(), len(images))
        if i % args.print_freq == 0 and engine.context.rank == 0:
            print(f"epoch {epoch} [{i}/{len(engine.dataloader)}] {losses}  {top1}  {top5}")


def validate(engine):
    losses, top1 = AverageMeter("loss"), AverageMeter("acc@1")
    engine.eval()
    with torch.no_grad():
        for images, target in engine.eval_dataloader:
            output = engine(images)
            losses.update(engine.criterion(output, target).item(), len(images))
            top1.update(accuracy(output, target, 1).item(), len(images))
    losses.all_reduce(engine.context)
    top1.all_reduce(engine.context)
    if engine.context.rank == 0:
        print(f"validation: {losses}  {top1}")
    return top1.sum / top1.count


def main():
    parser = halfmesh.get_default_parser()
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

    config = halfmesh.load_config(args.config or {"lr_interval": "epoch"}, args.overrides)
    launch = halfmesh.launch_from_torch(config)
    args.batch_size //= launch.dp_size

    torch.manual_seed(0)
    model = make_resnet(10)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)

    train_set, val_set = make_dataset(256, 1), make_dataset(101, 2)
    train_loader = DataLoader(train_set, batch_size=args.batch_size, shuffle=True)
    val_loader = DataLoader(val_set, batch_size=args.batch_size)

    engine = halfmesh.initialize(
        model, optimizer, criterion, train_loader, launch, eval_dataloader=val_loader, lr_scheduler=scheduler
    )
    best = {"acc1": 0.0}
    engine.attach("best", best)
    if args.resume:
        engine.load(args.out)

    if args.evaluate:
        validate(engine)
        args.epochs = 0

    for epoch in range(engine.dataloader.next_epoch, args.epochs):
        train(args, engine, epoch)
        acc1 = validate(engine)
        is_best = acc1 > best["acc1"]
        best["acc1"] = max(acc1, best["acc1"])
        if args.out:
            engine.save(args.out, keep=1)
            if is_best:
                engine.save(os.path.join(args.out, "best"), keep=1)
    engine.close()
    launch.close()


if __name__ == "__main__":
    main()
