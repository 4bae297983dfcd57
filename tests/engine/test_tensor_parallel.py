"""An engine whose layers are divided: its collectives, targets and rejections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import halfmesh
from halfmesh.errors import IncompatibleConfigError
from tests.support.models import (
    CLASSES,
    FEATURES,
    adamw,
    make_data,
    make_engine,
    said,
    step_on,
)
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed

PLAN = {"up": "colwise", "down": "rowwise", "head": "colwise_gather"}


class Divisible(nn.Module):
    """A layer that is divided by features, one that every rank has whole, and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(FEATURES, 16), nn.Linear(16, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.down(nn.functional.gelu(self.up(x)))))


def tensor_config(**more: Any) -> dict[str, Any]:
    return {"parallel": {"tensor": {"size": 2, "plan": PLAN}}, **more}


def make(config: dict[str, Any], **options: Any) -> halfmesh.Engine:
    return make_engine(config, model=options.pop("model", None) or Divisible(), **options)


def targets(rank: int, world_size: int) -> list[str]:
    """What is said of targets that the ranks of a tensor group have each for itself: unless they are trained with, of
    the first and of the tenth, and nothing between, where they are the same."""
    engine = make(tensor_config(), criterion=lambda output, *given: nn.functional.cross_entropy(output, given[-1]))
    (x, y), others = here((make_data(8), torch.arange(8).roll(rank) % CLASSES))
    found = [said(lambda: engine.criterion(engine(x), engine(x).softmax(-1)))]
    engine.eval()
    found.append(said(engine.criterion, engine(x), others))
    engine.train()
    with torch.no_grad():
        found.append(said(engine.criterion, engine(x), others))
    found += [said(step_on, engine, x, others if number in (0, 9) else y) for number in range(10)]
    engine.close()
    return found


def test_targets_are_compared_over_a_tensor_group():
    differs = "the 2 ranks of a tensor group got different targets"
    for found in run_ranks(targets, 2):
        assert [differs in text for text in found] == [*[False] * 3, True, *[False] * 8, True]
        assert {text for text in found if differs not in text} == {"nothing"}


class PerHead(Divisible):
    """A whole layer on each half of the features, which no plan speaks of."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = nn.functional.gelu(self.up(x)).unflatten(-1, (-1, 8))
        return self.head(self.norm(self.down(self.each(heads).flatten(-2))))


class Lamb(torch.optim.SGD):
    """Clips by the norm of all gradients."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = torch.stack([param.grad.norm() for param in group["params"]]).norm()
            for param in group["params"]:
                param.data.sub_(param.grad / norm, alpha=group["lr"])


def rejections(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    model, (x, y) = here((Divisible(), make_data(64)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(IncompatibleConfigError) as caught:
        make(tensor_config(), model=model, optimizer=lambda params: Lamb(params, lr=0.1))
    found["optimizer"] = str(caught.value)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    engine = make(tensor_config(), optimizer=adamw)
    step_on(engine, x, y)
    found["second engine"] = said(make, {}, model=engine.model)
    optimizer = adamw(model.parameters())
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    found["whole state"] = said(engine.optimizer.load_state_dict, optimizer.state_dict())
    found["undeclared"] = said(step_on, make(tensor_config(), model=PerHead()), x, y)
    divided = {"parallel": {"tensor": {"size": 2, "plan": {**PLAN, "head": "colwise"}}}}
    found["divided output"] = said(step_on, make(divided), x, y)
    return found


def test_what_would_be_silently_wrong_is_rejected():
    words = {
        "optimizer": "Lamb steps each parameter with values from others",
        "second engine": "model: another engine sharded it, and this rank holds only a part",
        "whole state": "has 'exp_avg' of shape (16, 8), but this rank holds (8, 8) of the parameter",
        "undeclared": "the gradients of each.weight, each.bias differ",
        "divided output": "the model's output differs between the ranks of a tensor group",
    }
    for found in run_ranks(rejections, 2):
        assert found.keys() == words.keys()
        for case, message in found.items():
            assert words[case] in message, case
