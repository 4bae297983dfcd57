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


MODES = {
    "fp32": {},
    "torch_bf16": {"bf16": {"mode": "torch"}},
    "torch_fp16": {"fp16": {"mode": "torch", "init_scale": 1024.0}},
    "naive_fp16": {"fp16": {"mode": "naive", "initial_scale": 1024.0}},
    "naive_bf16": {"bf16": {"mode": "naive"}, "gradient_dtype": "float32"},
}


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return here((torch.randn(4, FEATURES, generator=generator), torch.randint(4, (4,), generator=generator)))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, amsgrad=True)


def make_engine(data, optimizer=adamw, model=None, criterion=None, **config):
    model = Odd() if model is None else model
    groups = [{"params": [p for n, p in model.named_parameters() if "bias" in n], "weight_decay": 0.0}]
    groups.insert(0, {"params": [p for n, p in model.named_parameters() if "bias" not in n]})
    data = data if isinstance(data, dict) else {"strategy": data, "bucket_mb": 0.0005}  # several buckets
    return halfmesh.initialize(
        model,
        optimizer(groups),
        criterion or nn.CrossEntropyLoss(),
        config={"parallel": {"data": data}, **config},
        device=rank_device(),
    )


def take_step(engine, rank, step):
    x, y = (tensor.to(engine.device) for tensor in batch(rank, step))
    engine.zero_grad()
    loss = engine.criterion(engine(x), y)
    engine.backward(loss)
    return engine.step()


def train(engine, rank, steps):
    results = [take_step(engine, rank, step) for step in range(steps)]
    return [(result.grad_norm, result.loss_scale, result.skipped) for result in results]


def whole(engine):
    """The full model's state, and the optimizer's state and groups by the parameters' names. Closes the engine."""
    full = engine.full_state_dict(optimizer=True, rank0_only=False)
    engine.close()
    return full["model"], full["optimizer"]["state"], [group["params"] for group in full["optimizer"]["param_groups"]]


def differences(ours, theirs):
    found = {}
    for name, tensor in theirs[0].items():
        found[name] = (ours[0][name].double() - tensor.double()).abs().max().item() if tensor.numel() else 0.0
    assert ours[2] == theirs[2]
    assert ours[1].keys() == theirs[1].keys()
    for name, state in theirs[1].items():
        assert ours[1][name].keys() == state.keys(), name
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert ours[1][name][key].shape == value.shape, (name, key)
                found[f"{name} {key}"] = (ours[1][name][key].double() - value.double()).abs().max().item()
            else:
                assert ours[1][name][key] == value
    return found


def all_equal(model):
    params = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    flat = here(torch.cat([p.detach().double().flatten() for p in params]))
    everyone = [torch.empty_like(flat) for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather(everyone, flat)
    return all(torch.equal(flat, other) for other in everyone)
