"""Criteria that communicate, as DINO's, whose centre is a mean over all data ranks: `set_context`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from tests.support.models import MODES, difference, make_data, make_engine, sgd
from tests.support.ranks import here, run_ranks

X, Y = make_data(16)
LAYOUTS: dict[str, dict[str, Any]] = {
    "replicate": {},
    "zero1": {"data": "zero1"},
    "fsdp": {"data": "fsdp"},
    "tensor": {"tensor": {"size": 2, "plan": {"0": "colwise", "2": "rowwise"}}},
}


class Centred(nn.Module):
    """Losses of outputs less their running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.context: Any = None
        self.register_buffer("center", torch.zeros(4))

    def set_context(self, context: Any) -> None:
        assert self.context is None, "once"
        self.context = context

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(output.float() - self.center, target)
        mean = output.detach().float().mean(0)
        if self.context is not None:
            self.context.all_reduce(mean, "dp", op="mean")
        self.center = self.center * 0.5 + mean * 0.5
        return loss


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def by_hand(steps: int = 3) -> tuple[nn.Module, torch.Tensor]:
    model, criterion = make_model(), Centred()
    optimizer = sgd(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        criterion(model(X), Y).backward()
        optimizer.step()
    return model, criterion.center


def train(rank: int, world_size: int, config: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    criterion = here(Centred())
    engine = make_engine(config, model=make_model(), criterion=criterion)
    assert criterion.context is engine.context
    engine.attach("criterion", criterion)  # saves the centre
    size = len(X) // engine.context.dp_size
    own = slice(engine.context.dp_rank * size, (engine.context.dp_rank + 1) * size)
    for _ in range(3):
        engine.zero_grad()
        engine.backward(engine.criterion(engine(here(X[own])), here(Y[own])))
        engine.step()
    return criterion.center.cpu(), engine.full_state_dict(rank0_only=False)


@pytest.mark.parametrize("mode", ["none", "naive_fp16"])
def test_one_process(mode):
    center, weights = train(0, 1, MODES[mode])
    model, expected = by_hand()
    tolerance = 1e-6 if mode == "none" else 2e-3
    torch.testing.assert_close(center, expected, rtol=0, atol=tolerance)
    assert difference(weights, model) < tolerance


@pytest.mark.promise(
    "criteria that communicate",
    "`set_context`",
    of="PyTorch",
    page="loop.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_centre_is_that_of_one_process(layout):
    model, expected = by_hand()
    for center, weights in run_ranks(train, 2, {"parallel": LAYOUTS[layout]}):
        torch.testing.assert_close(center, expected, rtol=0, atol=1e-6)
        assert difference(weights, model) < 1e-5


@pytest.mark.distributed
def test_a_pipeline_refuses_a_loss_that_depends_on_the_microbatch_before():
    pipeline = {"size": 2, "microbatches": 2, "partition": ["2"]}
    with pytest.raises(Exception, match=r"the criterion gives .* for the whole batch, but its 2 microbatches make"):
        run_ranks(train, 2, {"parallel": {"pipeline": pipeline}})


def test_a_refusal_leaves_the_criterion():
    criterion = Centred()
    with pytest.raises(InputError):
        make_engine({}, model=make_model(), criterion=criterion, optimizer=lambda params: torch.optim.LBFGS(params))
    assert criterion.context is None
