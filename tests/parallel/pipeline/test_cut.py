"""A model is cut: each rank keeps its stages, and integers arrive as they were sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils._pytree import tree_map

import halfmesh
from tests.support.models import CLASSES, FEATURES, make_data
from tests.support.pipeline_parts import make, pipe, step
from tests.support.ranks import here, rank_device, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


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
    """The weights of the first and the last layer are tied; the second group has nothing of the first rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[4].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    model = here(model)
    last = list(model[3].parameters())
    optimizer = optim.Adam(
        [{"params": list(model[:3].parameters())[::-1]}, {"params": last}, {"params": model[4].bias}]
    )
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


# -- integers that stages send -----------------------------------------------------------------------------------------

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
NAN32, NAN64 = 0x7F800001, 0x7FF0000000000001  # as floats signalling NaNs, which arithmetic would change


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([True, False])
    limits = torch.iinfo(dtype)
    nan = {4: NAN32, 8: NAN64}.get(dtype.itemsize, 0)
    return torch.tensor([limits.min, limits.max, 0, 1, nan, -nan], dtype=dtype)


class Tables(nn.Linear):
    """Integers of every dtype beside the activations."""

    def __init__(self) -> None:
        super().__init__(FEATURES, FEATURES)
        for number, dtype in enumerate(INTEGERS):
            self.register_buffer(f"table{number}", extremes(dtype))

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": super().forward(x), "tables": [table.expand(len(x), -1) for _, table in self.named_buffers()]}


class Last(nn.Linear):
    def forward(self, tree: dict[str, Any]) -> dict[str, Any]:
        return tree | {"x": super().forward(tree["x"])}


def carries(rank: int, world_size: int) -> Any:
    model = nn.Sequential(Tables(), Last(FEATURES, CLASSES))
    config = pipe(keep_outputs=True, eval_outputs="all")
    engine = make(config, model, criterion=lambda output, target: nn.functional.cross_entropy(output["x"], target))
    trained = step(engine, *make_data(4))[0].value()
    return trained, engine.eval()(here(make_data(3)[0]))


def test_integers_of_every_dtype_arrive():
    for trained, evaluated in run_ranks(carries, 2):
        for output, rows in ((trained, 4), (evaluated, 3)):
            for dtype, found in zip(INTEGERS, output["tables"], strict=True):
                assert found.dtype == dtype
                assert torch.equal(found, extremes(dtype).expand(rows, -1)), dtype
