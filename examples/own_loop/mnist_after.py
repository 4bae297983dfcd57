"""mnist_before.py with halfmesh.

    python examples/own_loop/mnist_after.py --set bf16.mode=torch
    torchrun --standalone --nproc-per-node 2 examples/own_loop/mnist_after.py

Without --set it is fp32 on one process; --set or --config chooses another precision or layout.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh


class CNN(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3)
        self.conv2 = nn.Conv2d(8, 16, 3)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(2 * dropout)
        self.fc1 = nn.Linear(16 * 6 * 6, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = torch.flatten(self.dropout1(x), 1)
        x = self.dropout2(F.relu(self.fc1(x)))
        return F.log_softmax(self.fc2(x), dim=1)


def make_dataset(count, seed):
    """Images of 16 x 16 pixels, with a bright row that tells the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    images = 0.5 * torch.randn(count, 1, 16, 16, generator=generator)
    images[torch.arange(count), 0, labels + 3] += 1.0
    return TensorDataset(images, labels)


def train(args, engine, epoch):
    engine.train()
    for step, (images, labels) in enumerate(engine.dataloader):
        engine.zero_grad()
        output = engine(images)
        loss = engine.criterion(output, labels)
        engine.backward(loss)
        engine.step()
        if step % args.log_interval == 0 and engine.context.rank == 0:
            print(f"epoch {epoch}, batch {step} of {len(engine.dataloader)}: loss {loss.item():.6f}")


def test(engine):
    engine.eval()
    sums = torch.zeros(2, device=engine.device)
    with torch.no_grad():
        for images, labels in engine.eval_dataloader:
            output = engine(images)
            sums[0] += F.nll_loss(output, labels, reduction="sum")
            sums[1] += (output.argmax(dim=1) == labels).sum()
    engine.context.all_reduce(sums, "dp")
    total, correct = sums.tolist()
    count = len(engine.eval_dataloader.dataset)
    if engine.context.rank == 0:
        print(f"test: loss {total / count:.6f}, accuracy {correct:.0f} of {count}")


def main():
    parser = halfmesh.get_default_parser()
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.7)
    parser.add_argument("--dropout", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--save-model")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    train_loader = DataLoader(make_dataset(512, 1), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(make_dataset(203, 2), batch_size=64)

    model = CNN(args.dropout)
    optimizer = torch.optim.Adadelta(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=args.gamma)
    config = halfmesh.load_config(args.config or {"lr_interval": "epoch"}, args.overrides)
    engine = halfmesh.initialize(
        model, optimizer, F.nll_loss, train_loader, config, eval_dataloader=test_loader, lr_scheduler=scheduler
    )
    for epoch in range(1, args.epochs + 1):
        train(args, engine, epoch)
        test(engine)

    if args.save_model:
        engine.save_weights(args.save_model, format="torch")
    engine.close()


if __name__ == "__main__":
    main()
