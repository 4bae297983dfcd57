"""zero1: each data rank steps its part of the weights. Replicated data parallelism is the oracle."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from halfmesh.errors import InputError
from halfmesh.parallel.data_strategy import WithheldGradient
from tests.support.models import said
from tests.support.ranks import here, run_ranks
from tests.support.sharding import (
    CASES,
    MODES,
    Odd,
    all_equal,
    batch,
    compare,
    differences,
    largest,
    make_engine,
    take_step,
    whole,
)
from tests.support.whole import close_whole

pytestmark = pytest.mark.distributed


@pytest.mark.promise("fp16 does not go with ZeRO")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_trains_as_replicated_weights_do(ranks):
    """Weights, optimizer state, norm and scale. The sums of three ranks are added up in another order."""
    for found in run_ranks(compare, ranks, "zero1", CASES, timeout=150):
        assert len(found) == len(CASES)
        assert largest(found) <= 1, found


def layers() -> nn.Module:
    return nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])


def held(rank, world_size, mode):
    """Bytes of moments and masters, over the number of weights."""
    model = layers()
    total = sum(p.numel() for p in model.parameters())
    engine = make_engine("zero1", model=model, **MODES[mode])
    engine.backward(engine(here(torch.randn(4, 64))).square().mean())
    grads = [param.grad for param in model.parameters() if param.grad is not None]
    assert all(type(grad) is WithheldGradient for grad in grads), "they went to the rank that steps them"
    engine.step()
    moments = [state["exp_avg"] for state in engine.optimizer.state.values()]
    masters = list(engine.master_params()) if mode == "naive_fp16" else []
    return [sum(t.untyped_storage().nbytes() for t in tensors) / total for tensors in (moments, masters)]


@pytest.mark.promise(
    "optimizer state sharding",
    "zero1 and fsdp",
    of="SageMaker",
    page="sharding.md",
)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", ["fp32", "naive_fp16"])
def test_state_and_masters_are_one_part_of_it(ranks, mode):
    for found in run_ranks(held, ranks, mode):
        assert found == [4 / ranks, 4 / ranks if mode == "naive_fp16" else 0]


def edits(rank, world_size):
    """What others do to model and optimizer."""
    engine = make_engine("zero1", **MODES["naive_fp16"])
    take_step(engine, rank, 0)
    weights = {n: torch.full_like(p, 1 / 3) for n, p in Odd().named_parameters()}
    engine.model.load_state_dict(weights, strict=False)
    assert all(torch.equal(m, torch.full_like(m, 1 / 3)) for m in engine.master_params())
    with torch.no_grad():
        engine.model.last.weight.fill_(0.25)
    take_step(engine, rank, 1)
    assert 0 < (engine.model.last.weight.float() - 0.25).abs().max() < 0.05
    with pytest.raises(InputError, match="assign=True"):
        engine.model.load_state_dict(engine.model.state_dict(), assign=True)
    engine.close()

    engine = make_engine("zero1")
    model = engine.model
    take_step(engine, rank, 0)
    for layer, trained in ((model.frozen, True), (model.first, False)):
        layer.requires_grad_(trained)
        before = layer.weight.detach().clone()
        take_step(engine, rank, 1)
        assert torch.equal(before, layer.weight) != trained
    assert all_equal(model)
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


def test_what_others_change():
    run_ranks(edits, 2)


def without_unused(groups):
    return torch.optim.AdamW([param for group in groups for param in group["params"] if param.shape != (3, 5)])


def added(rank, world_size):
    """Parameters and gradients that come from elsewhere; and two backwards in one microbatch."""
    engine = make_engine("zero1", optimizer=without_unused)
    engine.optimizer.add_param_group({"params": [engine.model.unused.weight]})
    with pytest.raises(InputError, match=r"unused.weight came into the optimizer after initialize"):
        take_step(engine, rank, 0)
    engine = make_engine("zero1")
    engine.backward(engine.criterion(engine(batch(rank, 0)[0]), batch(rank, 0)[1]))
    with pytest.raises(InputError, match="to add another loss, call engine"):
        engine.model(batch(rank, 1)[0]).sum().backward()
    engine.zero_grad()
    engine.backward(engine.model.first(batch(rank, 0)[0]).sum())
    engine.model(batch(rank, 1)[0]).sum().backward(inputs=list(engine.model.last.parameters()))
    with pytest.raises(InputError, match="added by a backward outside this engine"):
        engine.step()
    ours, theirs = make_engine("zero1"), make_engine("replicate")
    for engine in (ours, theirs):
        for step in (0, 1):
            engine.backward(engine.criterion(engine(batch(rank, step)[0]), batch(rank, step)[1]))
        engine.step()
    assert max(differences(whole(ours), whole(theirs)).values()) <= 1e-6


def test_what_others_add():
    run_ranks(added, 2)


def fails_in_a_hook(rank, world_size, mode, fails):
    """After a hook around the step failed: which weights moved; then the scale."""
    engine = make_engine("zero1", **MODES[mode])
    take_step(engine, rank, 0)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}

    def fail(*_):
        if rank in fails:
            raise ZeroDivisionError("in a hook")

    handle = engine.optimizer.register_step_post_hook(fail)
    with pytest.raises(ZeroDivisionError) if rank in fails else nullcontext():
        take_step(engine, rank, 1)
    handle.remove()
    moved = {n for n, value in engine.model.state_dict().items() if not torch.equal(value, before[n])}
    assert all_equal(engine.model)
    take_step(engine, rank, 2)
    assert all_equal(engine.model)
    return moved, engine.loss_scale


@pytest.mark.parametrize(("mode", "fails"), [("fp32", (1,)), ("naive_fp16", (1,)), ("naive_fp16", (0, 1))])
def test_a_hook_that_fails_leaves_equal_weights(mode, fails):
    first, second = run_ranks(fails_in_a_hook, 2, mode, fails)
    assert first == second
    assert {"first.weight", "last.weight"} <= first[0], "the update was taken"
