"""Colwise layers: what backward sends for their input, when, and what it keeps of that input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from halfmesh.parallel import collectives
from halfmesh.parallel.tensor.colwise import SharedInput
from tests.support.ranks import run_ranks
from tests.support.tensor_parity import divide, random

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
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self._log.append({(OUT, WIDTH): "weight", (TOKENS, WIDTH): "input"}[tuple(result.shape)])
        return result


@pytest.fixture
def sent(monkeypatch):
    """What is begun and ended, in order."""
    log: list[str] = []

    def watched(name, inner):
        def start(*args):
            wait = inner(*args)
            log.append(f"begin {name}")

            def end():
                log.append(f"end {name}")
                return wait()

            return end

        return start

    for name in ("start_sum", "start_sum_shard", "start_gather"):
        monkeypatch.setattr(collectives, name, watched(name.removeprefix("start_"), getattr(collectives, name)))
    return log


def weights(count: int) -> list[torch.Tensor]:
    return [torch.randn(OUT, WIDTH, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("gathers", [False, True])
def test_a_weight_gradient_is_computed_while_the_sum_is_in_flight(count, gathers, two_ranks, sent):
    x = torch.randn(1, TOKENS // 2 if gathers else TOKENS, WIDTH, requires_grad=True)
    shared = SharedInput(x, two_ranks, gathers)
    loss = sum(shared.linear(weight, None).sum() for weight in weights(count))
    sent.clear()  # forward's gather
    with Products(sent):
        loss.backward()
    again, total = (["begin gather"], "sum_shard") if gathers else ([], "sum")
    waits = ["end gather"] if gathers else []
    earlier = ["input", *waits, "weight"] * (count - 1)
    if gathers and count > 1:  # once for all layers
        earlier = ["input", "end gather", "weight", *["input", "end gather", "weight"] * (count - 2)]
    assert sent == [*again, *earlier, "input", f"begin {total}", *waits, "weight", f"end {total}"]


def test_a_layer_that_is_not_linear_has_a_sum_beside_that_of_the_others(two_ranks, sent):
    x = torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    shared = SharedInput(x, two_ranks)
    (shared.branch().square().sum() + shared.linear(*weights(1), None).sum()).backward()
    assert sorted(sent) == ["begin sum", "begin sum", "end sum", "end sum"]


@pytest.mark.parametrize("hands_on", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_gradient_is_copied_before_its_sum_only_where_something_else_may_use_it(hands_on, half, two_ranks):
    """That of `x + y` is the gradient of both; those of products are new, and so is one that autograd has cast."""
    x, y = (torch.randn(1, TOKENS, WIDTH, requires_grad=True) for _ in range(2))
    shared, copies = SharedInput(x, two_ranks), []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.extend([func] * (func is torch.ops.aten.clone.default))
            return func(*args, **(kwargs or {}))

    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        outputs = [shared.linear(weight, None) for weight in weights(2)]
    loss = sum(output.float().square().sum() for output in outputs)
    if hands_on:
        loss = loss + ((shared.whole + y) * 3).sum()
    with Copies():
        loss.backward()
    assert len(copies) == hands_on


def test_the_two_halves_of_a_backward_compute_their_own_products_only(two_ranks, sent):
    """As zero-bubble schedules call them."""
    x, (weight,) = torch.randn(TOKENS, WIDTH, requires_grad=True), weights(1)
    output = SharedInput(x, two_ranks).linear(weight, None)
    with Products(sent):
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        assert sent == ["input", "begin sum", "end sum"]
        sent.clear()
        torch.autograd.grad(output.sum(), weight)
        assert sent == ["weight"]


class Branches(nn.Module):
    """Three projections of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, OUT) for _ in range(3))
        self.out = nn.Linear(OUT, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.q(x) * self.k(x).sigmoid() + self.v(x))


PLAN = {"1": "sequence_begin", "[1]*": "sequence", "2": "region", "2.[qkv]": "colwise", "2.out": "rowwise"}
PLAN |= {"3": "sequence_end"}


def kept(rank: int, world_size: int) -> list[list[tuple[int, ...]]]:
    """The shapes that backward keeps of a region's input, in fp32 and under autocast; the same memory once."""
    found = []
    for half in (False, True):
        config = {"bf16": {"mode": "torch"}} if half else {}
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), Branches(), nn.LayerNorm(WIDTH))
        engine = divide(model, PLAN, True, **config)
        storages: dict[int, torch.Tensor] = {}

        def pack(tensor: torch.Tensor, storages: Any = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        def watch(module: nn.Module, args: Any, storages: Any = storages, pack: Any = pack) -> None:
            storages.clear()
            module.hooks = saved_tensors_hooks(pack, lambda tensor: tensor)
            module.hooks.__enter__()

        region = engine.model[2]
        region.register_forward_pre_hook(watch)
        region.v.register_forward_hook(lambda *_, region=region: region.hooks.__exit__())
        engine(random(2, TOKENS, WIDTH, dtype=torch.float32))
        own = {p.untyped_storage().data_ptr() for p in engine.model.parameters()}
        inputs = [t for at, t in storages.items() if at not in own and t.shape[-1] == WIDTH and t.dim() == 3]
        found.append([tuple(t.shape) for t in inputs])
    return found


@pytest.mark.distributed
def test_backward_keeps_a_shard_of_the_sequence_only():
    for shapes in run_ranks(kept, 2):
        assert shapes == [[(2, TOKENS // 2, WIDTH)]] * 2
