"""Colwise layers: what backward sends for their input, when, and what it keeps of that input."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from halfmesh.parallel import collectives
from halfmesh.parallel.tensor.colwise import SharedInput

WIDTH, OUT, TOKENS = 4, 6, 8


@pytest.fixture
def two_ranks():
    """This process is rank 0 of two, of which the other sends nothing."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Products(TorchDispatchMode):
    """Writes down which matrix products are computed: of an input's gradient, or of a weight's."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.log.append({(OUT, WIDTH): "weight", (TOKENS, WIDTH): "input"}[tuple(result.shape)])
        return result


@pytest.fixture
def sent(monkeypatch):
    """What is begun and ended, in order."""
    log: list[str] = []

    def start(name, inner, *args):
        wait = inner(*args)
        log.append(f"begin {name}")

        def end():
            log.append(f"end {name}")
            return wait()

        return end

    for name in ("sum", "sum_shard", "gather"):
        full = f"start_{name}"
        monkeypatch.setattr(collectives, full, partial(start, name, getattr(collectives, full)))
    return log


def weights(count: int) -> list[torch.Tensor]:
    return [torch.randn(OUT, WIDTH, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("gathers", [False, True])
def test_a_weight_gradient_is_computed_while_the_sum_is_in_flight(gathers, two_ranks, sent):
    x = torch.randn(1, TOKENS // 2 if gathers else TOKENS, WIDTH, requires_grad=True)
    shared = SharedInput(x, two_ranks, gathers)
    loss = sum(shared.linear(weight, None).sum() for weight in weights(3))
    sent.clear()  # forward's gather
    with Products(sent):
        loss.backward()
    again, total, waits = (["begin gather"], "sum_shard", ["end gather"]) if gathers else ([], "sum", [])
    earlier = ["input", *waits, "weight"] * 2
    assert sent == [*again, *earlier, "input", f"begin {total}", *waits, "weight", f"end {total}"]


def test_backward_keeps_a_shard_of_the_sequence_only(two_ranks):
    kept = []
    shared = SharedInput(torch.randn(1, TOKENS // 2, WIDTH, requires_grad=True), two_ranks, gathers=True)
    with saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        outputs = [shared.linear(weight, None) for weight in weights(2)]
    assert {output.shape[1] for output in outputs} == {TOKENS}
    assert set(kept) == {(OUT, WIDTH), (1, TOKENS // 2, WIDTH)}
