"""zero1: each data rank steps its part of the weights, and follows what others do to them."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from halfmesh.parallel.data_strategy import WithheldGradient
from halfmesh.parallel.sharding.zero1 import SliceBucket
from halfmesh.utils.param_shard import ParamShard
from tests.parallel.sharding.runs import all_equal, batch, make_engine, take_step
from tests.support.models import MODES, said
from tests.support.ranks import here, run_ranks
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


def group_of(rank, size):
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


SIZES = (10, 3, 4096), (21,), (1,), (5000,), (7, 5), (4, 4, 3, 3), (0,), (300,)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("is_whole", [False, True])
def test_slices_begin_at_multiples_of_16_bytes_and_hold_each_element_once(ranks, is_whole):
    torch.manual_seed(0)
    shards = [ParamShard(str(index), nn.Parameter(torch.randn(size))) for index, size in enumerate(SIZES)]
    wholes = [shard.param for shard in shards] if is_whole else []
    buckets = [SliceBucket(shards, torch.float32, group_of(rank, ranks), wholes, Counter()) for rank in range(ranks)]
    for shard in shards:
        shard.param.grad = shard.param.detach().clone()
    torch.use_deterministic_algorithms(True)  # new memory is nan
    try:
        flat = buckets[0].pack()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not flat.isnan().any(), "what is sent is checked for nan by TORCH_NCCL_NAN_CHECK"
    assert all(offset % 8 == 0 for offset in buckets[0].offsets)
    assert is_whole or len(flat) <= 17 / 16 * sum(shard.param.numel() for shard in shards)
    held = Counter()
    for bucket, chunk in zip(buckets, flat.chunk(ranks), strict=True):
        assert bucket.chunk % 128 == 0
        for part, grad in zip(bucket.slices, bucket.split(chunk), strict=True):
            assert torch.equal(part.param.detach(), grad)
            held[part.name] += len(grad)
            if len(grad):
                assert (grad.storage_offset() % 8, part.start % 8) == (0, 0)
    assert [held[shard.name] for shard in shards] == [shard.param.numel() for shard in shards]


def held(rank, world_size):
    """By mode, bytes of moments and masters, over the number of weights."""
    found = {}
    for mode in ("none", "naive_fp16"):
        model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
        total = sum(p.numel() for p in model.parameters())
        engine = make_engine("zero1", model=model, **MODES[mode])
        engine.backward(engine(here(torch.randn(4, 64))).square().mean())
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        assert all(type(grad) is WithheldGradient for grad in grads), "they went to the rank that steps them"
        engine.step()
        moments = [state["exp_avg"] for state in engine.optimizer.state.values()]
        masters = list(engine.master_params()) if mode == "naive_fp16" else []
        found[mode] = [sum(t.untyped_storage().nbytes() for t in tensors) / total for tensors in (moments, masters)]
        engine.close()
    return found


@pytest.mark.promise("optimizer state sharding", "zero1 and fsdp", of="SageMaker", page="sharding.md")
def test_state_and_masters_are_one_part_of_it():
    assert run_ranks(held, 2) == [{"none": [4 / 2, 0], "naive_fp16": [4 / 2, 4 / 2]}] * 2


def edits(rank, world_size):
    """What others do to model and optimizer."""
    engine = make_engine("zero1")
    model = engine.model
    take_step(engine, rank, 0)
    model.first.weight.data = model.first.weight.data.clone()  # moved, in the same order
    take_step(engine, rank, 3)
    with torch.no_grad():
        for param in model.parameters():
            param.data = torch.full_like(param, 0.5)
    model.conv.weight.data = model.conv.weight.data.clone(memory_format=torch.contiguous_format)
    for use in (partial(take_step, engine, rank, 4), engine.full_state_dict):
        assert "memory format of 'conv.weight' was changed after" in said(use)
    model.conv.to(memory_format=torch.channels_last)
    weights = close_whole(engine)
    assert all(bool((weights[n] == 0.5).all()) for n, _ in model.named_parameters()), "its memory is followed"

    def without_unused(groups):
        return torch.optim.AdamW([param for group in groups for param in group["params"] if param.shape != (3, 5)])

    engine = make_engine("zero1", optimizer=without_unused)
    engine.optimizer.add_param_group({"params": [engine.model.unused.weight]})
    assert "unused.weight joined the optimizer after initialize" in said(take_step, engine, rank, 0)
    engine = make_engine("zero1")
    engine.backward(engine.model.first(batch(rank, 0)[0]).sum())
    engine.model(batch(rank, 1)[0]).sum().backward(inputs=list(engine.model.last.parameters()))
    assert "a backward outside this engine" in said(engine.step)


def test_what_others_change_and_add():
    run_ranks(edits, 2)


def fails_in_a_hook(rank, world_size):
    """The scale, after one rank or both have failed in a hook around the step."""
    found = []
    for fails in ((1,), (0, 1)):
        engine = make_engine("zero1", **MODES["naive_fp16"])
        take_step(engine, rank, 0)
        before = {name: value.clone() for name, value in engine.model.state_dict().items()}

        def fail(*_, fails=fails):
            if rank in fails:
                raise ZeroDivisionError("in a hook")

        handle = engine.optimizer.register_step_post_hook(fail)
        with pytest.raises(ZeroDivisionError) if rank in fails else nullcontext():
            take_step(engine, rank, 1)
        handle.remove()
        moved = {n for n, value in engine.model.state_dict().items() if not torch.equal(value, before[n])}
        assert {"first.weight", "last.weight"} <= moved, "the update was taken"
        take_step(engine, rank, 2)
        assert all_equal(engine.model)
        found.append(engine.loss_scale)
        engine.close()
    return found


def test_a_hook_that_fails_leaves_equal_weights():
    first, second = run_ranks(fails_in_a_hook, 2)
    assert first == second
