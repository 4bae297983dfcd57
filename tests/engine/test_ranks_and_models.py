"""Several data ranks with models that are not just layers, and what ranks must have in common."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.models import (
    CLASSES,
    FEATURES,
    FP16_NAIVE,
    MLP,
    adamw,
    full_weights,
    make_engine,
    make_loader,
    said,
    sgd,
    step_on,
)
from tests.support.ranks import here, run_ranks

pytestmark = pytest.mark.distributed


class OneBranch(MLP):
    """Its last layer but one is used on rank 0 only, in the first microbatch of each cycle."""

    def forward(self, x: torch.Tensor, use: bool = False) -> torch.Tensor:
        x = self.norm(self.first(x))
        return self.last(self.again(x) if use else x)


def frozen_within_a_cycle(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    engine = make_engine({"gradient_accumulation": 2}, model=OneBranch(), loader=make_loader(32, 4))
    for i, (x, y) in enumerate(engine.dataloader):
        engine.model.again.requires_grad_(i % 2 == 0)
        engine.backward(engine.criterion(engine(x, use=rank == 0 and i % 2 == 0), y))
        engine.step()
    return full_weights(engine)


def test_a_parameter_frozen_within_a_cycle_that_one_rank_had_used():
    first, second = run_ranks(frozen_within_a_cycle, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["again.weight"], MLP().again.weight)


def different_configs(rank: int, world_size: int) -> str:
    return said(make_engine, {"gradient_accumulation": 1 + rank})


def test_different_configs_are_refused_on_every_rank():
    for message in run_ranks(different_configs, 2):
        assert "the ranks were given different configs" in message


def foreign_random_state(rank: int, world_size: int) -> torch.Tensor:
    """What is dropped after a state that rank 0 saved, loaded by all."""
    engine = make_engine(optimizer=adamw, model=nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.Dropout(0.5)))
    states: list = [engine.state_dict()]
    dist.broadcast_object_list(states, src=0)
    engine.load_state_dict(states[0])
    return engine(here(torch.ones(16, FEATURES))) == 0


def test_dropout_stays_different_after_a_state_of_another_rank():
    first, second = run_ranks(foreign_random_state, 2)
    assert not torch.equal(first, second)


class OddBuffers(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("expanded", torch.rand(1).expand(3, 4))
        self.register_buffer("short", torch.randint(0, 100, (3,), dtype=torch.int16))
        self.register_buffer("eighth", torch.rand(3).to(torch.float8_e4m3fn))
        self.register_buffer("rotation", torch.rand(2, dtype=torch.complex64))
        self.register_buffer("empty", torch.zeros(0))


def odd_buffers(rank: int, world_size: int) -> tuple[list, str]:
    torch.manual_seed(rank)
    model = OddBuffers()
    for name in ("expanded", "rotation"):
        buffer = model.get_buffer(name)
        buffer.data = buffer.data + rank
    make_engine(model=model).close()
    sparse = MLP()
    sparse.register_buffer("s", torch.eye(2).to_sparse())
    buffers = [torch.view_as_real(b) if b.is_complex() else b.float() for b in model.buffers()]
    return [buffer.tolist() for buffer in buffers], said(make_engine, model=sparse)


def test_buffers_of_any_dtype_and_layout_start_equal():
    (first, message), (second, _) = run_ranks(odd_buffers, 2)
    assert first == second
    assert "the buffers s are sparse" in message


def unfreeze(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    model = MLP()
    model.last.requires_grad_(False)
    params = [p for p in model.parameters() if p.requires_grad]
    engine = make_engine(FP16_NAIVE, model=model, optimizer=lambda _: sgd(params), loader=make_loader(32, 4))
    for step, (x, y) in enumerate(engine.dataloader):
        if step == 2:
            model.last.requires_grad_(True)
            engine.optimizer.add_param_group({"params": list(model.last.parameters())})
        engine.zero_grad()
        step_on(engine, x, y)
    return full_weights(engine)


def test_parameters_added_later_are_reduced_too():
    first, second = run_ranks(unfreeze, 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["last.weight"], MLP().last.weight)
