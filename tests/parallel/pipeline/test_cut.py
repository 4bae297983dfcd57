"""A model is cut: each rank keeps its stages, and close gives everything back."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map

import halfmesh
from tests.support.pipeline_parts import pipe
from tests.support.ranks import here, rank_device, run_ranks
from tests.support.versions import SPLIT_SCHEDULES
from tests.support.whole import close_whole

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def make_model() -> nn.Sequential:
    """The weights of the first and the last layer are tied."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    return model


def make_optimizer(model: nn.Module) -> optim.Optimizer:
    """Groups across the stages, the second one with nothing of the first rank."""
    params = dict(model.named_parameters())
    last = [p for name, p in params.items() if name.startswith("3")]
    weights, biases = (
        [p for name, p in params.items() if name.endswith(kind) and not name.startswith("3")]
        for kind in ("weight", "bias")
    )
    return optim.Adam([{"params": weights[::-1], "lr": 0.01}, {"params": last, "lr": 0.02}, {"params": biases}])


def initialize(model: nn.Module, optimizer: Any, **options: Any) -> halfmesh.Engine:
    config = pipe(**({"schedule": "gpipe"} | options))
    return halfmesh.initialize(model, optimizer, nn.MSELoss(), config=config, device=rank_device())


def entries_of(model: nn.Module) -> dict[str, torch.Tensor]:
    kinds = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    return {name: tensor for kind in kinds for name, tensor in kind}


def state_of(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, dict[str, torch.Tensor]]:
    """Of what is trained: fused kernels make some for what is not, too."""
    names = {p: name for name, p in model.named_parameters() if p.requires_grad}
    return {names[p]: dict(values) for p, values in optimizer.state.items() if p in names}


def cut(rank: int, world_size: int) -> None:
    model = here(make_model())
    optimizer = make_optimizer(model)
    model(here(torch.randn(8, 4))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    entries, before = entries_of(model), {name: value.clone().cpu() for name, value in model.state_dict().items()}
    groups = [list(group["params"]) for group in optimizer.param_groups]
    state = tree_map(torch.clone, state_of(model, optimizer))
    initialize(model, optimizer, partition=("2",))

    layers = {"0", "1"} if rank == 0 else {"2", "3", "4"}
    held = {id(tensor) for name, tensor in entries.items() if name.partition(".")[0] in layers}
    now = entries_of(model)
    for name, tensor in entries.items():
        if id(tensor) in held:
            assert now[name] is tensor, "the parameters that stay are the same objects"
            assert torch.equal(tensor.cpu(), before[name])
        else:
            assert name not in now
            assert tensor.untyped_storage().nbytes() == 0, "memory is freed"
    mine = [[p for p in group if id(p) in held] for group in groups]
    assert [list(map(id, g["params"])) for g in optimizer.param_groups] == [list(map(id, g)) for g in mine]
    own = {name: values for name, values in state.items() if name in dict(model.named_parameters())}
    torch.testing.assert_close(state_of(model, optimizer), own, rtol=0, atol=0, check_device=False)


def test_ranks_hold_their_stages():
    run_ranks(cut, 2)


# -- which rank holds what -------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Modules that keep their parameters in other places, too; things that no stage uses; one module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(4, 4, batch_first=True)
        self.middle = nn.Linear(4, 4)
        self.again = self.middle
        self.last1 = nn.Linear(4, 4, bias=False)  # no part of `last`
        self.last = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.idle = nn.Linear(2, 2)
        self.register_buffer("hidden", torch.ones(3), persistent=False)
        self.scalar = nn.Parameter(torch.tensor(2.0))
        self.strided = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last1(self.again(self.gru(x[:, None])[0][:, 0]) * self.scalar)
        return self.last(x) + self.strided.sum()


def row() -> nn.Module:
    return nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))


GRU = ["gru.bias_hh_l0", "gru.bias_ih_l0", "gru.weight_hh_l0", "gru.weight_ih_l0"]
FIRST = ["hidden", "idle.bias", "idle.weight", "last1.weight", "middle.bias", "middle.weight", "scalar"]
WEIGHTS = ["last.bias", "last.parametrizations.weight.original0", "last.parametrizations.weight.original1"]
LOOPED = [["0.weight", "2.weight"], ["1.weight", "3.weight"]]
IN_A_V = [["0.weight", "3.weight"], ["1.weight", "2.weight"]]
HELD: list[tuple[Any, dict[str, Any], list[list[str]]]] = [
    (Odd, {"partition": ("last",)}, [[*GRU, *FIRST], [*WEIGHTS, "strided"]]),
    (row, {"schedule": "interleaved", "chunks": 2}, LOOPED),
    (row, {"schedule": "zero_bubble", "chunks": 2}, LOOPED),
    (row, {"schedule": "zbv", "chunks": 2, "microbatches": 4}, IN_A_V),
    (row, {"schedule": "dualpipev", "chunks": 2, "microbatches": 4}, IN_A_V),
][: 5 if SPLIT_SCHEDULES else 2]


def holds(rank: int, world_size: int) -> list[list[str]]:
    found = []
    for make, options, _ in HELD:
        torch.manual_seed(0)
        model = make()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        engine = initialize(model, partial(optim.SGD, lr=0.1), **options)
        found.append(sorted(name for name, _ in (*model.named_parameters(), *model.named_buffers())))
        weights = close_whole(engine)
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
    return found


def test_each_rank_holds_what_its_stages_use():
    for rank, found in enumerate(run_ranks(holds, 2)):
        assert found == [expected[rank] for _, _, expected in HELD]
