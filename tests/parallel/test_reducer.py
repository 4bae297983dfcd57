"""The reducer alone: what it sends, when, and what the shards hold afterwards. torch DDP is the oracle."""

from __future__ import annotations

import contextlib
import itertools
import logging
import logging.handlers

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from halfmesh import torch_private
from halfmesh.errors import InputError
from halfmesh.parallel.reducer import ReduceOptions, Reducer
from halfmesh.shard import ParamShard
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.distributed
TINY = 1  # bytes: one bucket per parameter


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def make_reducer(model: nn.Module, **options) -> tuple[Reducer, list[ParamShard]]:
    shards = [ParamShard(name, p) for name, p in model.named_parameters()]
    group = dist.group.WORLD
    assert group is not None
    return Reducer(shards, dict(model.named_buffers()), group, ReduceOptions(**options)), shards


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(rank + 1))


def backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).square().mean().backward()


def equals_ddp(rank: int, world_size: int) -> dict[str, float]:
    model, other = make_model(), make_model()
    ddp = DistributedDataParallel(other)
    differences = {}
    for bucket_bytes in (TINY, 25 * 2**20):
        reducer, shards = make_reducer(model, bucket_bytes=bucket_bytes)
        for shard in shards:
            shard.clear_grad()
        ddp.zero_grad()
        reducer.open(last=True)
        backward(model, batch(rank))
        reducer.finish()
        backward(ddp, batch(rank))
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        differences[f"bucket {bucket_bytes}"] = max((p.grad - q.grad).abs().max().item() for p, q in pairs)
        reducer.close()
    return differences


def test_bitwise_equal_to_ddp():
    for result in run_ranks(equals_ddp, 2):
        assert result == {"bucket 1": 0.0, f"bucket {25 * 2**20}": 0.0}


def counts(rank: int, world_size: int) -> dict:
    model = make_model()
    reducer, shards = make_reducer(model, bucket_bytes=TINY)
    launched = []
    original = reducer._all_reduce
    reducer._all_reduce = lambda flat, divide=True: (launched.append(flat.numel()), original(flat, divide))[1]
    for _ in range(2):  # microbatches before the last send nothing
        backward(model, batch(rank))
    before = reducer.collectives
    reducer.open(last=True)
    backward(model, batch(rank))
    in_backward = reducer.collectives
    reducer.finish()
    return {
        "before": before,
        "in_backward": in_backward,
        "in_all": reducer.collectives,
        "bytes": reducer.bytes_reduced,
        "order": launched,
        "buckets": len(shards),
    }


def test_one_reduction_per_update_in_order_and_in_backward():
    first, second = run_ranks(counts, 2)
    assert first == second
    sizes = [3, 24, 8, 8, 8, 48]  # the model's parameters, last first
    assert first["before"] == 0
    assert first["in_backward"] == first["buckets"] - 1 == 5  # the last one waits for hooks of its last parameter
    assert first["in_all"] == 7  # and one for BatchNorm's statistics
    assert first["order"] == [size + 1 for size in sizes] + [16]
    assert first["bytes"] == 4 * (sum(sizes) + 6 + 16)


def late_hooks(rank: int, world_size: int) -> list[dict[str, object]]:
    """Hooks that were registered after the reducer's, with one bucket for each parameter and one for all."""
    found = []
    for bucket_bytes in (TINY, 25 * 2**20):
        model, other, seen = make_model(), make_model(), []
        reducer, shards = make_reducer(model, bucket_bytes=bucket_bytes)

        def change(param: nn.Parameter, seen: list[bool] = seen) -> None:
            seen.append(param.grad is not None)
            if param.grad is not None:
                param.grad.clamp_(-0.01, 0.01)

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(change)
        reducer.open(last=True)
        backward(model, batch(rank))
        reducer.finish()
        backward(other, batch(rank))
        for param in other.parameters():
            param.grad.clamp_(-0.01, 0.01)
            dist.all_reduce(param.grad)
        expected = [param.grad / world_size for param in other.parameters()]
        found.append({"seen": seen, "grads": [shard.take_grad() for shard in shards], "expected": expected})
    return found


def test_hooks_that_were_registered_later_change_what_is_sent():
    for one in itertools.chain(*run_ranks(late_hooks, 2)):
        assert one["seen"] == [True] * 6
        torch.testing.assert_close(one["grads"], one["expected"])


def unarmed(rank: int, world_size: int) -> list[torch.Tensor]:
    """A cycle that is closed after its last backward: everything is sent in finish."""
    model = make_model()
    reducer, _ = make_reducer(model, max_inflight=1, bucket_bytes=TINY)
    backward(model, batch(rank))
    mine = [p.grad.clone() for p in model.parameters()]
    reducer.finish()
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, mine)
    expected = [torch.stack(grads).mean(0) for grads in zip(*gathered, strict=True)]
    return [(p.grad - e).abs().max() for p, e in zip(model.parameters(), expected, strict=True)]


def test_unarmed_backward_is_reduced_in_finish():
    for differences in run_ranks(unarmed, 3):
        assert max(differences) < 1e-6


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.common = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.never = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x, use):
        x = self.frozen(self.common(x))
        return self.sometimes(x) if use else x


def unused(rank: int, world_size: int) -> dict[str, torch.Tensor | None]:
    model = Branches()
    reducer, shards = make_reducer(model)
    reducer.open(last=True)
    model(batch(rank), use=rank == 0).sum().backward()
    local = model.sometimes.weight.grad.clone() if rank == 0 else None
    del local
    reducer.finish()
    return {shard.name: shard.param.grad for shard in shards}


def test_unused_and_frozen_parameters():
    first, second = run_ranks(unused, 2)
    model = Branches()
    (model(batch(0), True).sum() / 2).backward()
    torch.testing.assert_close(first["sometimes.weight"], model.sometimes.weight.grad)
    assert first["never.weight"] is None
    assert first["frozen.weight"] is None
    assert second["never.weight"] is None
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def half_precision(rank: int, world_size: int) -> dict[str, tuple]:
    """fp16 gradients of 40000: their fp16 sum is inf."""
    results = {}
    for name, dtype in {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}.items():
        param = nn.Parameter(torch.zeros(4, dtype=torch.float16))
        shard = ParamShard("p", param)
        reducer = Reducer([shard], {}, dist.group.WORLD, ReduceOptions(dtype=dtype))
        reducer.open(last=True)
        (param * 40000).sum().backward()
        reducer.finish()
        grad = shard.take_grad()
        results[name] = (grad.tolist(), grad.dtype, reducer.bytes_reduced)
    return results


def test_half_precision_gradients_do_not_overflow():
    for result in run_ranks(half_precision, 2):
        assert result == {
            "fp32": ([40000.0] * 4, torch.float32, 20),
            "fp16": ([40000.0] * 4, torch.float16, 10),
            "bf16": ([39936.0] * 4, torch.bfloat16, 10),
        }


def sums(rank: int, world_size: int) -> list[float]:
    param = nn.Parameter(torch.zeros(2))
    shard = ParamShard("p", param)
    reducer = Reducer([shard], {}, dist.group.WORLD, ReduceOptions(mean=False))
    (param * (rank + 1)).sum().backward()
    reducer.finish()
    return param.grad.tolist()


def test_sum_instead_of_mean():
    assert run_ranks(sums, 2) == [[3.0, 3.0]] * 2


def twice(rank: int, world_size: int) -> list[float]:
    """Two backwards before one update, both armed: the second adds to what is already averaged."""
    results = []
    for dtype in (torch.float32, torch.float16):
        param = nn.Parameter(torch.zeros(2, dtype=dtype))
        shard = ParamShard("p", param)
        reducer = Reducer([shard], {}, dist.group.WORLD, ReduceOptions())
        for factor in (1.0, 10.0):
            reducer.open(last=True)
            (param * factor * (rank + 1)).sum().backward()
            reducer.finish()
        results.append(shard.take_grad().tolist())
        reducer.close()
    return results


def test_two_backwards_before_an_update():
    assert run_ranks(twice, 2) == [[[16.5, 16.5], [16.5, 16.5]]] * 2


def channels_last(rank: int, world_size: int) -> bool:
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    reducer, _ = make_reducer(conv)
    reducer.open(last=True)
    conv(torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last)).sum().backward()
    reducer.finish()
    return conv.weight.grad.stride() == conv.weight.stride()


def test_gradients_keep_the_parameters_strides():
    assert run_ranks(channels_last, 2) == [True, True]


def statistics(rank: int, world_size: int) -> tuple[list[float], int]:
    norm = nn.BatchNorm1d(2)
    reducer, _ = make_reducer(norm)
    reducer.open(last=True)
    norm(torch.full((4, 2), 10.0 * rank)).sum().backward()
    reducer.finish()
    return norm.running_mean.tolist(), int(norm.num_batches_tracked)


def test_batchnorm_statistics_are_averaged():
    assert run_ranks(statistics, 2) == [([0.5, 0.5], 1)] * 2  # the mean of 0 and 0.1 * 10


def refusals(rank: int, world_size: int) -> list[str]:
    messages = []
    embedding = nn.Embedding(4, 3, sparse=True)
    reducer, _ = make_reducer(embedding)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(InputError) as caught:
        reducer.finish()
    messages.append(str(caught.value))
    linear = nn.Linear(2, 2)
    reducer, _ = make_reducer(linear, bucket_bytes=TINY)
    reducer.open(last=True)
    x = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(InputError) as caught:
        checkpoint(linear, checkpoint(linear, x, use_reentrant=True), use_reentrant=True).sum().backward()
    messages.append(str(caught.value))
    return messages


def test_refusals():
    for sparse, reentrant in run_ranks(refusals, 2):
        assert "gradient of 'weight' is sparse" in sparse
        assert "sparse=False" in sparse
        assert "arrived twice in one backward" in reentrant
        assert "use_reentrant=False" in reentrant


def recover(rank: int, world_size: int) -> list[bool]:
    """Unfreezing a parameter: the reducer notices, and takes it in."""
    model = Branches()
    reducer, shards = make_reducer(model)
    covered = [reducer.covers(shards)]
    model.frozen.requires_grad_(True)
    covered.append(reducer.covers(shards))
    reducer.cover(shards)
    covered.append(reducer.covers(shards))
    reducer.open(last=True)
    model(batch(rank), True).sum().backward()
    reducer.finish()
    gathered: list = [None] * world_size
    dist.all_gather_object(gathered, model.frozen.weight.grad)
    return [*covered, torch.equal(gathered[0], gathered[1])]


def test_unfrozen_parameters_are_taken_in():
    assert run_ranks(recover, 2) == [[True, False, True, True]] * 2


def own_buffers(rank: int, world_size: int) -> str:
    class Codebook(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("constant", torch.ones(2))
            self.register_buffer("codes", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.codes.add_(x.mean(0))
            return super().forward(x) * self.constant

    model = nn.Sequential(Codebook(), nn.BatchNorm1d(2))
    reducer, _ = make_reducer(model)
    handler = logging.handlers.BufferingHandler(100)
    logging.getLogger("halfmesh").addHandler(handler)
    for _ in range(3):
        reducer.open(last=True)
        model(torch.randn(4, 2)).sum().backward()
        reducer.finish()
    return "\n".join(record.getMessage() for record in handler.buffer)


def test_buffers_that_each_rank_changes_for_itself_are_named_once():
    first, second = run_ranks(own_buffers, 2)
    assert first.count("the buffers 0.codes change during training, on each data rank from its own batches") == 1
    assert "constant" not in first
    assert second == ""


def doubles(rank: int, world_size: int) -> tuple[list[float], int]:
    params = [nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.float64, torch.float32)]
    shards = [ParamShard(f"p{i}", p) for i, p in enumerate(params)]
    reducer = Reducer(shards, {}, dist.group.WORLD, ReduceOptions())
    (params[0] * (1 + rank * 1e-12) + params[1]).sum().backward()
    reducer.finish()
    return params[0].grad.tolist(), reducer.collectives


def test_double_gradients_are_reduced_in_double():
    assert run_ranks(doubles, 2) == [([1 + 5e-13] * 2, 2)] * 2


def views(rank: int, world_size: int) -> dict[str, object]:
    """Three updates; the last layer of the second is not used by rank 1, that of the third by nobody."""
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
    reducer, shards = make_reducer(layers)
    copies, inner = [], torch_private.foreach_copy_
    torch_private.foreach_copy_ = lambda targets, sources: (copies.append(len(targets)), inner(targets, sources))
    storages, kept, found = [], [], []
    for update in range(3):
        used = list(layers)[: 2 if update == 2 or (update == 1 and rank == 1) else 3]
        for microbatch in range(2):
            reducer.open(last=microbatch == 1)
            x = torch.full((2, 4), float(rank + 1 + microbatch))
            sum(layer(x).square().sum() for layer in used).backward()
        reducer.finish()
        grads = [shard.take_grad() for shard in shards]
        storages.append(len({g.untyped_storage().data_ptr() for g in grads if g is not None}))
        found.append([None if g is None else g.clone() for g in grads])
        kept.append(grads)  # as one does who looks at them later
        for shard in shards:
            shard.clear_grad()
        reducer.forget()
    torch_private.foreach_copy_ = inner
    reducer.close()

    expected = []
    for update in range(3):
        layers.zero_grad()
        for other in range(world_size):
            used = list(layers)[: 2 if update == 2 or (update == 1 and other == 1) else 3]
            for microbatch in range(2):
                x = torch.full((2, 4), float(other + 1 + microbatch))
                (sum(layer(x).square().sum() for layer in used) / world_size).backward()
        expected.append([None if p.grad is None else p.grad.clone() for p in layers.parameters()])
    return {"copies": copies, "storages": storages, "found": found, "kept": kept, "expected": expected}


def test_gradients_are_parts_of_buckets():
    """One copy of all into the bucket, none out of it, and none for the microbatches before the last. What is kept of
    an update stays what it was, and what nobody used has no gradient."""
    for rank, result in enumerate(run_ranks(views, 2)):
        assert result["copies"] == [6, 6 if rank == 0 else 4, 4]
        assert result["storages"] == [1, 1, 1]
        torch.testing.assert_close(result["found"], result["expected"])
        torch.testing.assert_close(result["kept"], result["expected"])


def broken_off(rank: int, world_size: int) -> dict[str, object]:
    """A backward fails on all ranks after its first buckets were sent; the next one is complete."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    reducer, shards = make_reducer(model, bucket_bytes=TINY)
    x = torch.full((2, 4), float(rank + 1))

    def fail(_: torch.Tensor) -> None:
        raise LookupError("no gradient")

    handle = model[0].weight.register_hook(fail)
    reducer.open(last=True)
    with contextlib.suppress(LookupError):
        (model(x).sum() * 1e6).backward()
    sent = reducer.collectives
    handle.remove()
    for shard in shards:
        shard.clear_grad()
    reducer.forget()
    reducer.open(last=True)
    model(x).sum().backward()
    reducer.finish()
    found = [p.grad.clone() for p in model.parameters()]
    reducer.close()
    model.zero_grad()
    for other in range(world_size):
        (model(torch.full((2, 4), float(other + 1))).sum() / world_size).backward()
    expected = [p.grad for p in model.parameters()]
    return {"sent": sent, "found": found, "expected": expected}


def test_an_error_in_backward_leaves_nothing_behind():
    for result in run_ranks(broken_off, 2):
        assert result["sent"] >= 4
        torch.testing.assert_close(result["found"], result["expected"])


def others(rank: int, world_size: int) -> list[list[float]]:
    """Gradients that others put in place of the buckets' parts, before and after a backward."""
    results = []
    for when in ("before", "between", "after"):
        param = nn.Parameter(torch.zeros(2))
        shard = ParamShard("p", param)
        reducer = Reducer([shard], {}, dist.group.WORLD, ReduceOptions())
        if when == "before":
            param.grad = torch.full((2,), 100.0)
        for _ in range(2):
            reducer.open(last=False)
            (param * (rank + 1)).sum().backward()
            if when == "between":
                param.grad = param.grad * 10
        if when == "after":
            param.grad = torch.full((2,), float(rank))
        reducer.finish()
        results.append(shard.take_grad().tolist())
        reducer.close()
    return results


def test_gradients_of_others_take_part():
    assert run_ranks(others, 2) == [[[103.0] * 2, [165.0] * 2, [0.5] * 2]] * 2
