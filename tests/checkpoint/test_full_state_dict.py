"""engine.full_state_dict: the whole model and its optimizer, in every layout, as one process has them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.whole import load_full

pytestmark = pytest.mark.distributed

WIDTH = 8
PIPE = {"size": 2, "microbatches": 2}
PLAN = {"size": 2, "plan": {"*.0": "colwise", "*.2": "rowwise"}}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "replicate": (2, {}),
    "zero1": (2, {"data": "zero1"}),
    "fsdp": (2, {"data": "fsdp"}),
    "fsdp of one": (1, {"data": "fsdp"}),
    "tensor": (2, {"tensor": PLAN}),
    "pipeline": (2, {"pipeline": PIPE | {"schedule": "interleaved", "chunks": 2}}),
    "tensor, fsdp": (4, {"tensor": PLAN, "data": "fsdp"}),
    "pipeline, zero1": (4, {"pipeline": PIPE, "data": "zero1"}),
    "pipeline, tensor": (4, {"pipeline": PIPE, "tensor": PLAN}),
}
MODES: dict[str, dict[str, Any]] = {"fp32": {}, "naive": {"bf16": {"mode": "naive"}}}
TOLERANCES = {"fp32": {"rtol": 1e-5, "atol": 1e-6}, "naive": {"rtol": 2e-2, "atol": 2e-3}}


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor([0.1]))
        self.register_buffer("passing", torch.tensor([1.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by * self.passing


def make_model() -> nn.Sequential:
    """Tied weights at both ends, a buffer, and one that is not saved."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH)) for _ in range(4)]
    blocks[3][0].weight = blocks[0][0].weight
    return nn.Sequential(Scale(), *blocks)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """The last parameters come first, and the groups differ. With this eps an update is smooth in the gradient."""
    params = list(model.parameters())[::-1]
    decayed, others = [p for p in params if p.dim() > 1], [p for p in params if p.dim() == 1]
    return torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0, "lr": 0.3}], lr=0.5, eps=1.0)


X = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def trained(layout: str, mode: str) -> halfmesh.Engine:
    model = make_model()
    config = {"parallel": LAYOUTS[layout][1], **MODES[mode]}
    engine = halfmesh.initialize(model, adamw(model), nn.MSELoss(), config=config, device=rank_device())
    size, rank = engine.context.dp_size, engine.context.dp_rank
    for x in here(X):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x.chunk(size)[rank]), x.chunk(size)[rank]))
        engine.step()
    return engine


def alone() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = make_model()
    optimizer = adamw(model)
    for x in X:
        step(model, optimizer, x)
    return model, optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    optimizer.step()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    tensors = [(each["model"], each["optimizer"]["state"]) for each in (found, expected)]
    torch.testing.assert_close(*tensors, rtol=0, atol=0)


Found = dict[tuple[str, str], tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]


def gather(rank: int, world_size: int, layouts: list[str]) -> Found:
    """What rank 0, and what each rank gets."""
    found = {}
    for layout in layouts:
        for mode in MODES:
            engine = trained(layout, mode)
            weights = engine.full_state_dict()
            full = engine.full_state_dict(optimizer=True)
            everywhere = engine.full_state_dict(optimizer=True, rank0_only=False)
            found[layout, mode] = weights, full, everywhere
            engine.close()
    return found


@pytest.mark.promise(
    "the whole model's state in memory",
    "lifted: `engine.full_state_dict` gathers it from any layout, with the optimizer's if asked, on rank 0 or on all",
    of="SageMaker",
    page="checkpoints.md",
)
@pytest.mark.sends
@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
def test_it_is_that_of_one_process(ranks):
    layouts = [layout for layout, (size, _) in LAYOUTS.items() if size == ranks]
    first, *others = run_ranks(gather, ranks, layouts, timeout=120)
    names = list(make_model().state_dict())
    for (layout, mode), (weights, full, everywhere) in first.items():
        expected, optimizer = alone()
        assert sorted(weights) == sorted(names), layout
        assert weights["4.0.weight"] is weights["1.0.weight"], "tied weights stay tied"
        assert {value.dtype for value in weights.values()} == {torch.float32}
        torch.testing.assert_close(weights, dict(expected.state_dict()), **TOLERANCES[mode])
        torch.testing.assert_close(full["model"], weights, rtol=0, atol=0)
        assert_same(everywhere, full)
        for found in others:
            theirs = found[layout, mode]
            assert theirs[:2] == ({}, {}), layout
            assert_same(theirs[2], full)
        model = make_model()
        loaded = adamw(model)
        load_full(full, model, loaded)
        for x in X.flip(0):  # training goes on, with the state of each parameter and the settings of each group
            step(model, loaded, x)
            step(expected, optimizer, x)
        torch.testing.assert_close(dict(model.state_dict()), dict(expected.state_dict()), **TOLERANCES[mode])


def test_it_is_a_copy_and_without_an_optimizer_nothing_is_said_of_its_state():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, config={}, device="cpu")
    weights = engine.full_state_dict()
    before = copy.deepcopy(weights)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    torch.testing.assert_close(weights, before, rtol=0, atol=0)
    optimizer.state[model[1][0].weight]["odd"] = object()
    torch.testing.assert_close(engine.full_state_dict()["0.by"], before["0.by"])
    engine.close()
    with pytest.raises(halfmesh.InputError, match="this engine is closed"):
        engine.full_state_dict()
