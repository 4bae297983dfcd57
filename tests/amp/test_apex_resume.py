"""State under O0 to O3: an exact resume, scales after overflows, and no half-precision tensor in what is saved."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.support.apex_runs import (
    CLASSES,
    FEATURES,
    LEVELS,
    apex_config,
)

HUGE = 1e38


class DropoutNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.norm(self.first(x * self.scale)))))


OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.05, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.01, eps=1e-3),
}


def make_engine(opt_level: str, seed: int, num_losses: int = 1, optimizer: str = "sgd", **keys: Any) -> halfmesh.Engine:
    torch.manual_seed(seed)
    model = DropoutNet()
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(16, FEATURES, generator=generator), torch.randint(CLASSES, (16,), generator=generator)
    config = {"fp16": apex_config(opt_level, num_losses=num_losses, **keys)}
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    return halfmesh.initialize(
        model, OPTIMIZERS[optimizer](model.parameters()), F.cross_entropy, loader, config, device="cpu"
    )


def train(engine: halfmesh.Engine, epochs: int, huge: tuple[int, ...] = ()) -> list[Any]:
    """Each loss is made of the same outputs. `huge`: the losses that overflow in the first step of each epoch.

    Returns all that can be seen: outputs, losses, what the steps return, the scales.
    """
    seen: list[Any] = []
    for _ in range(epochs):
        for batch, (x, y) in enumerate(engine.dataloader):
            engine.zero_grad()
            output = engine(x)
            losses = [engine.criterion(output, y), output.float().square().mean()][: len(engine.loss_scales)]
            for i, loss in enumerate(losses):
                factor = HUGE if batch == 0 and i in huge else 1.0
                engine.backward(loss * factor, loss_id=i, retain_graph=i + 1 < len(losses))
            result = engine.step()
            seen.append((output.tolist(), [loss.item() for loss in losses], repr(result), engine.loss_scales))
    return seen


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def plain(state: Any) -> Any:
    """Lists for tensors and arrays, so that two states can be compared with ==: to the last bit, random numbers too."""
    if isinstance(state, dict):
        return {key: plain(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [plain(value) for value in state]
    return state.tolist() if hasattr(state, "tolist") else state


@pytest.mark.parametrize(("num_losses", "optimizer"), [(1, "sgd"), (1, "adam"), (2, "adam")])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_resume_is_bitwise(opt_level, num_losses, optimizer):
    """An overflow before, in only the last of the losses, three more epochs after; shuffling, dropout, BatchNorm."""
    engine = make_engine(opt_level, 0, num_losses, optimizer, loss_scale="dynamic")
    train(engine, epochs=1, huge=(num_losses - 1,))
    train(engine, epochs=1)
    state = through_a_file(engine.state_dict())
    expected = train(engine, epochs=3)
    other = make_engine(opt_level, 1, num_losses, optimizer, loss_scale="dynamic")
    train(other, epochs=1, huge=(0,))  # state of its own, to be overwritten
    other.load_state_dict(state)
    assert train(other, epochs=3) == expected
    assert plain(other.state_dict()) == plain(engine.state_dict())
    torch.testing.assert_close(other.model.state_dict(), engine.model.state_dict(), rtol=0, atol=0)
    stepped = [[p.detach() for p in run.master_params()] for run in (other, engine)]
    torch.testing.assert_close(*stepped, rtol=0, atol=0)


@pytest.mark.parametrize("opt_level", LEVELS)
def test_saved_tensors_are_not_half(opt_level):
    """Neither the engine's nor the model's own. Where there are masters, both have them."""
    engine = make_engine(opt_level, 0)
    train(engine, epochs=2)
    saved, own = engine.state_dict()["model"], engine.model.state_dict()
    for state in (saved, own):
        assert {value.dtype for value in state.values()} == {torch.float32, torch.int64}
    torch.testing.assert_close(dict(own), dict(saved), rtol=0, atol=0)
    params = dict(engine.model.named_parameters())
    for (name, param), stepped in zip(params.items(), engine.master_params(), strict=True):
        assert torch.equal(saved[name], stepped.detach().float())
        assert torch.equal(saved[name].to(param.dtype), param.detach())
    kept = [torch.equal(saved[name], param.detach().float()) for name, param in params.items()]
    assert all(kept) == (opt_level != "O2")


@pytest.mark.parametrize("opt_level", LEVELS)
def test_weights_of_a_plain_fp32_model_can_be_loaded(opt_level):
    """Into the engine's model: half-precision parameters and masters follow."""
    engine = make_engine(opt_level, 0)
    torch.manual_seed(5)
    weights = DropoutNet().state_dict()
    engine.model.load_state_dict(weights)
    params = dict(engine.model.named_parameters())
    train(engine, epochs=1)
    engine.model.load_state_dict(weights)
    for (name, param), master in zip(params.items(), engine.master_params(), strict=True):
        assert torch.equal(param.detach(), weights[name].to(param.dtype))
        torch.testing.assert_close(master.detach().float(), weights[name], rtol=1e-3, atol=1e-5)
