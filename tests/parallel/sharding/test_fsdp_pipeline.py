"""Under a pipeline fsdp gathers a stage's weights once for a batch, not for each microbatch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from halfmesh.utils.torch_private import ALL_GATHER
from tests.support.models import CLASSES, FEATURES, difference, make_data, sgd
from tests.support.pipeline_parts import make, pipe, step, whole
from tests.support.ranks import here, run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.sends]


def layers() -> nn.Module:
    torch.manual_seed(0)
    ends = nn.Linear(FEATURES, 16), nn.Linear(16, CLASSES)
    return nn.Sequential(ends[0], nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16), ends[1])


def gathers(rank: int, world_size: int, reshards: bool | None) -> tuple[list[int], list[bool], Any]:
    """The all-gathers of each batch, in cycles of two; whether weights are shards after it; and the trained weights."""
    config = pipe(microbatches=4, schedule="1f1b")
    config["parallel"]["data"] = {"strategy": "fsdp", "reshard_after_forward": reshards}
    engine = make(config | {"gradient_accumulation": 2}, layers())
    counts, freed = [], []
    with pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        inner = getattr(torch.distributed, ALL_GATHER)
        patch.setattr(torch.distributed, ALL_GATHER, lambda *args, **more: calls.append(1) or inner(*args, **more))
        x, y = here(make_data(32))
        for number in range(4):
            part = slice(8 * number, 8 * number + 8)
            calls.clear()
            step(engine, x[part], y[part])
            counts.append(len(calls))
            freed.append(all(isinstance(param, DTensor) for param in engine.model.parameters()))
    return counts, freed, whole(engine)


@pytest.mark.parametrize(("reshards", "times"), [(None, 1), (False, 1), (True, 2 * 4)])
def test_a_unit_is_gathered_once_for_a_batch(reshards, times):
    model = layers()
    optimizer, (x, y) = sgd(model.parameters()), make_data(32)
    for begin in (0, 16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x[begin : begin + 16]), y[begin : begin + 16]).backward()
        optimizer.step()
    for counts, freed, weights in run_ranks(gathers, 4, reshards):
        assert counts[1:] == [2 * times] * 3, "two linear layers in each stage"
        assert all(freed)
        assert difference(weights, model) < 1e-6
