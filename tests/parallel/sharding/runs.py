"""What the tests of zero1 and fsdp share."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import halfmesh
from tests.support.ranks import here, rank_device

FEATURES = 7


class Odd(nn.Module):
    """Uneven shapes, a scalar, single elements, a frozen layer, a tied weight, channels last, and a part that is not
    used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 13)
        self.frozen = nn.Linear(13, 13).requires_grad_(False)
        self.flat = nn.Conv2d(1, 3, 3, padding=1)
        self.conv = nn.Conv2d(3, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(13)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = nn.Parameter(torch.tensor([0.1]))
        self.unused = nn.Linear(5, 3)
        self.tied = nn.Linear(13, 13)
        self.last = nn.Linear(13, 4)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.first(x)).relu())
        x = x + self.conv(self.flat(x.view(-1, 1, 1, 13))).mean((1, 2))
        x = self.again(self.tied(x).relu()) * self.scale + self.shift
        return self.last(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.other = nn.Linear(8, 8)  # of the same size
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, which: bool, places: torch.Tensor | None) -> torch.Tensor:
        x = self.norm(x)
        x = x + self.other(x) if which else x + self.one(x)
        return x if places is None else x + places.sin().to(x.dtype).mean()


class Net(nn.Module):
    """Blocks that use one of two layers; and parameters in a list, one of them empty."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(FEATURES, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.end = nn.Linear(8, 8)
        self.table = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(0))])

    def forward(self, x: torch.Tensor, which: bool = False, places: torch.Tensor | None = None) -> torch.Tensor:
        x = self.begin(x) * self.table[0].to(x.dtype)
        for block in self.blocks:
            x = block(x, which, places)
        return self.end(x)


class Blocks(nn.Module):
    def __init__(self, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.begin = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth))
        self.end = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return here((torch.randn(4, FEATURES, generator=generator), torch.randint(4, (4,), generator=generator)))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)


def make_engine(data, optimizer=adamw, model=None, criterion=None, **config):
    model = Odd() if model is None else model
    named = list(model.named_parameters())
    biases = {"params": [p for n, p in named if "bias" in n], "weight_decay": 0.0}
    optimizer = optimizer([{"params": [p for n, p in named if "bias" not in n]}, biases])
    data = data if isinstance(data, dict) else {"strategy": data, "bucket_mb": 0.0005}  # several buckets
    config["parallel"] = {"data": data}
    return halfmesh.initialize(
        model, optimizer, criterion or nn.CrossEntropyLoss(), config=config, device=rank_device()
    )


def take_step(engine, rank, step):
    x, y = (tensor.to(engine.device) for tensor in batch(rank, step))
    engine.zero_grad()
    engine.backward(engine.criterion(engine(x), y))
    return engine.step()


def all_equal(model):
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = here(torch.cat([p.detach().double().flatten() for p in params]))
    everyone = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)
