"""State under O0 to O3: an exact resume, scales after overflows, and no half-precision tensor in what is saved."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from tests.support.apex_reference import INITIAL_SCALE
from tests.support.apex_runs import (
    CLASSES,
    FEATURES,
    LEVELS,
    SHAPES,
    BatchNormMLP,
    apex_config,
    assert_same,
    make_batches,
    make_optimizer,
    make_pair,
    scaler_states,
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


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("num_losses", [1, 2])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_resume_is_bitwise(opt_level, num_losses, optimizer):
    """An overflow before, in only the last of the losses, and five more epochs after; shuffling, dropout, BatchNorm."""
    engine = make_engine(opt_level, 0, num_losses, optimizer, loss_scale="dynamic")
    train(engine, epochs=1, huge=(num_losses - 1,))
    train(engine, epochs=1)
    state = through_a_file(engine.state_dict())
    expected = train(engine, epochs=5)
    other = make_engine(opt_level, 1, num_losses, optimizer, loss_scale="dynamic")
    train(other, epochs=1, huge=(0,))  # state of its own, to be overwritten
    other.load_state_dict(state)
    assert train(other, epochs=5) == expected
    assert plain(other.state_dict()) == plain(engine.state_dict())
    torch.testing.assert_close(other.model.state_dict(), engine.model.state_dict(), rtol=0, atol=0)
    stepped = [[p.detach() for p in run.master_params()] for run in (other, engine)]
    torch.testing.assert_close(*stepped, rtol=0, atol=0)


@pytest.mark.parametrize("num_losses", [1, 2, 3])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_scales_after_overflows(opt_level, num_losses):
    """Each loss has its own number of overflows; they are in the state, and so is that growth counts from there."""
    engine = make_engine(opt_level, 0, num_losses, loss_scale="dynamic")
    x, y = next(iter(engine.dataloader))
    for loss_id in range(num_losses):
        for _ in range(loss_id + 1):
            for i in range(num_losses):
                factor = HUGE if i == loss_id else 1.0
                engine.backward(engine.criterion(engine(x), y) * factor, loss_id=i)
            assert engine.step().skipped
    expected = tuple(INITIAL_SCALE / 2 ** (loss_id + 1) for loss_id in range(num_losses))
    assert engine.loss_scales == expected
    assert engine.loss_scale == expected[0]
    saved = scaler_states(through_a_file(engine.state_dict()))
    assert [scaler["scale"] for scaler in saved] == list(expected)
    # Steps of a loss without overflow count, also where another loss had one and the step was skipped.
    later = [sum(range(loss_id + 2, num_losses + 1)) for loss_id in range(num_losses)]
    assert [scaler["growth_tracker"] for scaler in saved] == later
    other = make_engine(opt_level, 1, num_losses, loss_scale="dynamic")
    other.load_state_dict(through_a_file(engine.state_dict()))
    assert other.loss_scales == expected


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
    plain = DropoutNet().state_dict()
    engine.model.load_state_dict(plain)
    dtypes = {name: param.dtype for name, param in engine.model.named_parameters()}
    for name, param in engine.model.named_parameters():
        assert torch.equal(param.detach(), plain[name].to(dtypes[name]))
    for name, master in zip(dtypes, engine.master_params(), strict=True):
        torch.testing.assert_close(master.detach().float(), plain[name], rtol=1e-3, atol=1e-5)
    train(engine, epochs=1)


def train_plain(model: nn.Module, optimizer: optim.Optimizer, batches: Any) -> None:
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_an_optimizer_that_has_state_already(opt_level, name):
    """Momenta of a run in fp32 go on, in the dtype of what is stepped now."""
    batches = make_batches(SHAPES["mlp"], 6)
    model, make = BatchNormMLP(), make_optimizer(name)
    optimizer = make(model)
    train_plain(model, optimizer, batches[:2])
    state = copy.deepcopy(optimizer.state_dict())
    engine, reference = make_pair(model, lambda m: optimizer if m is model else make(m), opt_level, {"fused": False})
    reference.optimizer.load_state_dict(state)
    for run in (engine, reference):
        for x, y in batches[2:]:
            run.backward(F.cross_entropy(run(x).float(), y))
            run.step()
    assert_same(engine, reference)


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("opt_level", LEVELS)
def test_close_gives_back_what_a_plain_loop_can_use(opt_level, name):
    """Model, gradients and the optimizer's state in fp32 again; functions as torch has them."""
    batches = make_batches(SHAPES["mlp"], 6)
    model, make = BatchNormMLP(), make_optimizer(name)
    optimizer = make(model)
    config = {"fp16": apex_config(opt_level, num_losses=2)}
    engine = halfmesh.initialize(model, optimizer, F.cross_entropy, None, config, device="cpu")
    for x, y in batches[:3]:
        output = engine(x)
        engine.backward(engine.criterion(output, y), retain_graph=True)
        engine.backward(output.float().square().mean(), loss_id=1)
        engine.step()
    saved = {name: value.clone() for name, value in engine.state_dict()["model"].items()}
    engine.close()
    torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0, atol=0)
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
    other = BatchNormMLP()
    other.load_state_dict(saved)
    other_optimizer = make(other)
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_plain(model, optimizer, batches[3:])
    train_plain(other, other_optimizer, batches[3:])
    torch.testing.assert_close(dict(model.state_dict()), dict(other.state_dict()), rtol=1e-5, atol=1e-6)
