"""How long pieces take is measured without a trace in the model."""

from __future__ import annotations

import contextlib
import copy
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from halfmesh.parallel.pipeline.partition import find_pieces
from halfmesh.parallel.pipeline.pieces import Call
from halfmesh.parallel.pipeline.timing import measure, sample_call

CPU = torch.device("cpu")


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x


def test_the_slow_piece_is_found_and_nothing_changed():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), Slow(), nn.BatchNorm1d(4), nn.Dropout(0.5)).eval()
    model[0].requires_grad_(False)
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    times = measure(model, find_pieces(model, "auto"), Call((x,)), CPU, contextlib.nullcontext)
    assert list(times) == ["0", "1", "2", "3", "4"]
    assert max(times, key=lambda name: times[name]) == "2"
    assert 0.02 <= times["2"] < 1
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(x, before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module.training for module in model.modules())


def test_what_goes_between_pieces_may_be_of_any_kind():
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            return {"x": x, "index": x.argmax(1), "word": "w"}

    class Take(nn.Module):
        def forward(self, tree: dict[str, Any]) -> torch.Tensor:
            return tree["x"].mul_(2) * tree["index"][:, None]

    model = nn.Sequential(nn.Linear(4, 4), Pair(), Take(), nn.Linear(4, 1))
    with torch.no_grad():
        times = measure(model, find_pieces(model, "auto"), Call((torch.randn(2, 4),)), CPU, contextlib.nullcontext)
    assert len(times) == 4
    assert min(times.values()) > 0


class TwoInputs(nn.Module):
    def forward(self, x: Any, y: Any, mask: Any = None) -> Any:
        return x


DATA = TensorDataset(torch.arange(6.0).view(6, 1), torch.arange(6), torch.ones(6))


@pytest.mark.parametrize(("rows", "expected"), [(2, 2), (6, 6), (9, 6)])
def test_samples_of_a_loader(rows, expected):
    call = sample_call(TwoInputs(), DataLoader(DATA, 3, shuffle=True), rows, CPU)
    assert [len(value) for value in call.args] == [expected] * 2, "as many items as the forward needs"
    assert torch.equal(call.args[1], torch.arange(expected))
    assert call.kwargs == {}
    (only,) = sample_call(nn.Linear(1, 1), DataLoader(DATA, 3), 2, CPU).args
    assert only.shape == (2, 1)


def test_samples_by_name():
    items = [{"x": torch.zeros(1), "y": index, "label": 0} for index in range(4)]
    call = sample_call(TwoInputs(), DataLoader(items, 2), 3, CPU)
    assert call.args == ()
    assert list(call.kwargs) == ["x", "y"]
    assert call.kwargs["y"].tolist() == [0, 1, 2]
    (only,) = sample_call(nn.Linear(1, 1), DataLoader(torch.zeros(4, 1), 2), 3, CPU).args
    assert only.shape == (3, 1)
