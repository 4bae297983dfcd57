"""Ranks that compute one batch together are compared in the first call of each mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfmesh.errors import InputError
from halfmesh.parallel.same_calls import SameCalls
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed


def said(call: Any, *args: Any) -> str:
    try:
        call(*args)
    except InputError as error:
        return str(error)
    return ""


def compared(rank: int, world_size: int) -> dict[str, str]:
    def fresh() -> SameCalls:
        return SameCalls(dist.group.WORLD, "pipeline")

    x, mine = torch.arange(6.0).view(2, 3), torch.full((2, 3), float(rank))
    same, found = fresh(), {}
    found["equal"] = said(same.compare_inputs, True, (x,), {"mask": [x > 2]})
    found["later"] = said(same.compare_inputs, True, (mine,), {})
    found["other mode"] = said(same.compare_inputs, False, (mine,), {})
    for name, args, kwargs in (
        ("values", (mine,), {}),
        ("shape", (torch.zeros(2 + rank),), {}),
        ("dtype", (torch.zeros(2, dtype=[torch.int32, torch.float32][rank]),), {}),
        ("keyword", (), {"a": [x, mine]}),
    ):
        found[name] = said(fresh().compare_inputs, True, args, kwargs)
    same = fresh()
    found["rounded output"] = said(same.compare_outputs, True, {"logits": x * (1 + 1e-5 * rank)})
    found["later output"] = said(same.compare_outputs, True, mine)
    found["output"] = said(same.compare_outputs, False, mine + 1)
    found["output's shape"] = said(fresh().compare_outputs, True, torch.zeros(2, 2 + rank))
    return found


def test_differences_are_refused_on_all_ranks_and_once():
    first, second = run_ranks(compared, 2)
    assert first == second
    silent = {"equal", "later", "rounded output", "later output"}
    assert {name for name, words in first.items() if not words} == silent
    for name in ("other mode", "values", "shape", "dtype", "keyword"):
        assert "the 2 ranks of a pipeline were given different inputs" in first[name]
    for name in ("output", "output's shape"):
        assert "the model's output differs between the ranks of a pipeline" in first[name]
