"""DiLoCo: two ranks end with the weights of one process that has a copy of the model for each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import halfmesh

UPDATES = 12
OUTER = {"outer_lr": 0.6, "outer_momentum": 0.8}
INNER: dict[int, Callable[..., torch.optim.Optimizer]] = {
    1: lambda params: torch.optim.SGD(params, lr=0.1),
    4: lambda params: torch.optim.AdamW(params, lr=0.05),
}
"""The inner optimizer by the length of a round."""


def make() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(40, 6)
    return model, x, (x[:, 0] > 0).long()


def train(rank: int, length: int, folder: Path) -> dict[str, torch.Tensor]:
    """As one of two ranks; halfway all of them go on from what they saved."""
    model, x, y = make()
    data = {"strategy": "diloco", "inner_steps": length, **OUTER}
    config = {"parallel": {"data": data}}
    engine = halfmesh.initialize(model, INNER[length], nn.CrossEntropyLoss(), config=config, device="cpu")
    for update in range(UPDATES):
        if update == 6 and length == 1:  # AdamW's state would be that of one rank
            engine.save(folder)
            engine.load(folder)
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x[rank::2]), y[rank::2]))
        engine.step()
        same = len({str(weights) for weights in engine.context.everyone(next(model.parameters()).tolist())}) == 1
        assert same == ((update + 1) % length == 0), "they are equal after a round, and only then"
        if not same:
            with pytest.raises(halfmesh.InputError, match="full_state_dict: diloco's ranks have equal weights every 4"):
                engine.full_state_dict()
    weights = engine.full_state_dict(rank0_only=False)
    engine.close()
    return weights


def one_of_two(rank: int, folder: str) -> None:
    for length in INNER:
        torch.save(train(rank, length, Path(folder) / f"saved-{length}"), Path(folder) / f"{length}-{rank}.pt")


def save_by_itself(rank: int, folder: str) -> None:
    """Rounds of four updates; the second run is told to stop within its second round."""
    for name in ("whole", "told"):
        model, x, y = make()
        saves = {"directory": f"{folder}/{name}", "every": 4}
        config = {"parallel": {"data": {"strategy": "diloco", "inner_steps": 4, **OUTER}}, "checkpoint": saves}
        engine = halfmesh.initialize(model, INNER[4], nn.CrossEntropyLoss(), config=config, device="cpu")
        stopped = ""
        try:
            for update in range(14):
                engine.zero_grad()
                engine.backward(engine.criterion(engine(x[rank::2]), y[rank::2]))
                engine.step()
                if name == "told" and update == 5 and rank == 1:
                    engine.preempt()
        except halfmesh.Preempted as error:
            stopped = str(error.folder)[-2:]
        engine.close()
        assert stopped in (("08", "12") if name == "told" else ("",))  # 12: the other rank has begun the third round


def test_saves_are_after_rounds_and_a_stop_waits_for_the_end_of_its_round(tmp_path: Path, start: Any) -> None:
    start(save_by_itself, 2)
    names = [f"step-000000{step}" for step in ("04", "08", "12")]
    assert sorted(path.name for path in (tmp_path / "whole").glob("step-*")) == names
    assert sorted(path.name for path in (tmp_path / "told").glob("step-*")) in (names, names[:2])


def by_hand(length: int) -> dict[str, torch.Tensor]:
    """In one process: the outer optimizer is torch's SGD. With rounds of one update there is nothing local."""
    model, x, y = make()
    outer = torch.optim.SGD(model.parameters(), OUTER["outer_lr"], OUTER["outer_momentum"], nesterov=True)
    copies = [copy.deepcopy(model) for _ in range(2)]
    inner = [INNER[length](one.parameters()) for one in copies]
    for _ in range(UPDATES // length):
        for rank, one in enumerate(copies):
            one.load_state_dict(model.state_dict())
            for _ in range(length):
                inner[rank].zero_grad()
                nn.functional.cross_entropy(one(x[rank::2]), y[rank::2]).backward()
                inner[rank].step()
        for param, *own in zip(model.parameters(), *(one.parameters() for one in copies), strict=True):
            param.grad = param.detach() - torch.stack([each.detach() for each in own]).mean(0)
        outer.step()
    weights: dict[str, torch.Tensor] = model.state_dict()
    return weights


def test_parity(tmp_path: Path, start: Any) -> None:
    start(one_of_two, 2)
    for length in INNER:
        expected = by_hand(length)
        for rank in range(2):
            torch.testing.assert_close(torch.load(tmp_path / f"{length}-{rank}.pt"), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"parallel": {"data": {"strategy": "diloco", "size": 1}, "tensor": 4}},
            "on one data rank diloco would be 'repl",
        ),
        ({"parallel": {"tensor": 2, "data": "diloco"}}, "parallel.tensor: diloco has not been tried with it"),
        ({"loss_reduction": "sum"}, "loss_reduction: diloco averages changes of weights"),
        ({"debug": "sync"}, "debug: under diloco ranks differ within a round"),
        ({"checkpoint": {"directory": "x", "every": 30, "signals": ()}}, "every 20 updates; use a multiple"),
    ],
)
def test_what_would_save_or_compare_within_a_round_is_rejected(keys: dict[str, Any], words: str) -> None:
    from halfmesh.compat import check

    config = halfmesh.load_config({"parallel": {"data": "diloco"}, **keys})
    assert words in "\n".join(map(str, check(config, 4, "cpu")))


def test_running_statistics_are_rejected() -> None:
    from halfmesh_plugin_example.diloco import DiLoCo

    assert "0: diloco does not average running statistics" in next(
        DiLoCo.find_problems(nn.Sequential(nn.BatchNorm1d(3)), None)
    )
