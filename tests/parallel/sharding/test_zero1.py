"""zero1: each data rank steps its part of the weights. Replicated data parallelism is the oracle."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from halfmesh.amp import stepper
from halfmesh.errors import IncompatibleConfigError, InputError
from tests.support.ranks import run_ranks
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

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("ranks", [2, 3])
def test_trains_as_replicated_weights_do(ranks):
    """Weights, optimizer state, norm and scale. The sums of three ranks are added up in another order."""
    for found in run_ranks(compare, ranks, "zero1", CASES, timeout=150):
        assert len(found) == len(CASES)
        assert largest(found) <= 1, found


def held(rank, world_size):
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    found = {}
    for mode in ("fp32", "naive_fp16"):
        engine = make_engine({"strategy": "zero1"}, model=copy.deepcopy(model), **MODES[mode])
        x = torch.randn(4, 64)
        engine.backward(engine(x).square().mean())
        full = [p.grad for p in engine.model.parameters()]
        engine.step()
        states = engine.optimizer.state.values()
        found[mode] = {
            "moments": sum(s["exp_avg"].untyped_storage().nbytes() for s in states),
            "masters": sum(m.untyped_storage().nbytes() for m in engine._update.holdings.masters.values()),
            "grads of the model": full.count(None) == len(full),
        }
        engine.close()
    return found, sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("ranks", [2, 4])
def test_state_and_masters_are_one_part_of_it(ranks):
    found = run_ranks(held, ranks, timeout=60)
    for by_mode, total in found:
        for mode, counted in by_mode.items():
            assert counted["moments"] == total // ranks * 4
            assert counted["masters"] == (total // ranks * 4 if mode == "naive_fp16" else 0)
            assert counted["grads of the model"]


def overlaps(rank, world_size):
    """What happens in which order in one update of many parts."""
    stepper.STREAM_BYTES = 4096  # of the parts
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(6)])
    engine = make_engine({"strategy": "zero1", "bucket_mb": 0.02}, model=model, **MODES["naive_bf16"])
    events = []
    slices, reducer, direct = engine._division.slices, engine._cycle.reducer, engine._update.stepper
    for owner, name in ((slices, "_gather"), (slices, "_land"), (reducer, "_send"), (direct, "step_part")):
        original = getattr(owner, name)

        def noted(*args, name=name, original=original):
            events.append(name)
            return original(*args)

        setattr(owner, name, noted)
    for _ in range(3):
        del events[:]
        engine.zero_grad()
        loss = engine(torch.randn(4, 64)).square().mean()
        handle = model[0].weight.register_hook(lambda grad: events.append("last gradient"))
        engine.backward(loss)
        handle.remove()
        sent = reducer.bytes_reduced
        engine.step()
    buckets = len(slices.buckets)
    engine.close()
    return events, buckets, sent


def test_collectives_overlap_with_backward_and_with_the_update():
    for events, buckets, _ in run_ranks(overlaps, 2, timeout=60):
        assert buckets >= 5
        assert events.count("_send") == events.count("_gather") == events.count("_land") == buckets
        # All but the bucket of the first layer are under way when the last gradient comes.
        assert events[: events.index("last gradient")].count("_send") >= buckets - 2
        last = len(events) - 1 - events[::-1].index("step_part")
        assert events[:last].count("_gather") >= buckets - 2
        assert events[:last].count("_land") < events[:last].count("_gather")


def bytes_of_a_step(rank, world_size):
    from benchmarks.counts import OpCounter

    found = {}
    for data in ("replicate", "zero1"):
        engine = make_engine({"strategy": data}, model=nn.Linear(64, 64))
        take = partial(lambda e: (e.backward(e(torch.ones(2, 64)).mean()), e.step()), engine)
        take()
        with OpCounter(engine.optimizer) as counter:
            take()
        found[data] = counter.reads
        engine.close()
    return found


def test_no_host_reads():
    for found in run_ranks(bytes_of_a_step, 2, timeout=60):
        assert found == {"replicate": 0, "zero1": 0}


def without_unused(groups):
    return torch.optim.AdamW([param for group in groups for param in group["params"] if param.shape != (3, 5)])


def edits(rank, world_size):
    """What others do to model and optimizer."""
    found = {}
    engine = make_engine("zero1", **MODES["naive_fp16"])
    take_step(engine, rank, 0)
    weights = {n: torch.full_like(p, 1 / 3) for n, p in Odd().named_parameters()}
    engine.model.load_state_dict(weights, strict=False)
    masters = list(engine.master_params())
    found["loaded"] = all(torch.equal(m, torch.full_like(m, 1 / 3)) for m in masters)
    with torch.no_grad():
        engine.model.last.weight.fill_(0.25)
    take_step(engine, rank, 1)
    found["edited"] = (engine.model.last.weight.float() - 0.25).abs().max().item()
    with pytest.raises(InputError, match="assign=True"):
        engine.model.load_state_dict(engine.model.state_dict(), assign=True)
    engine.close()

    engine = make_engine("zero1")
    take_step(engine, rank, 0)
    engine.model.frozen.requires_grad_(True)
    before = engine.model.frozen.weight.detach().clone()
    take_step(engine, rank, 1)
    found["unfrozen"] = (engine.model.frozen.weight - before).abs().max().item()
    engine.model.first.requires_grad_(False)
    before = engine.model.first.weight.detach().clone()
    take_step(engine, rank, 2)
    found["frozen"] = torch.equal(before, engine.model.first.weight)
    found["equal"] = all_equal(engine.model)
    engine.model.first.weight.data = engine.model.first.weight.data.clone()  # moved, in the same order
    take_step(engine, rank, 3)
    engine.model.conv.to(memory_format=torch.contiguous_format)
    engine.model.conv.weight.data = engine.model.conv.weight.data.clone(memory_format=torch.contiguous_format)
    with pytest.raises(InputError, match=r"memory of 'conv.weight' was laid out anew"):
        take_step(engine, rank, 4)
    with pytest.raises(InputError, match=r"memory of 'conv.weight' was laid out anew"):
        engine.close()
    engine.model.conv.to(memory_format=torch.channels_last)
    engine.close()

    engine = make_engine("zero1", optimizer=without_unused)
    engine.optimizer.add_param_group({"params": [engine.model.unused.weight]})
    with pytest.raises(InputError, match=r"unused.weight came into the optimizer after initialize"):
        take_step(engine, rank, 0)
    engine.close()

    engine = make_engine("zero1")
    engine.backward(engine.criterion(engine(batch(rank, 0)[0]), batch(rank, 0)[1]))
    engine.model(batch(rank, 1)[0]).sum().backward()
    with pytest.raises(InputError, match="added by a backward outside this engine"):
        engine.step()
    engine.close()

    ours, theirs = make_engine("zero1"), make_engine("replicate")
    for engine in (ours, theirs):  # two backwards in one microbatch
        for step in (0, 1):
            engine.backward(engine.criterion(engine(batch(rank, step)[0]), batch(rank, step)[1]))
        engine.step()
    found["twice"] = max(differences(whole(ours), whole(theirs)).values())
    return found


def test_what_others_change():
    for found in run_ranks(edits, 2, timeout=60):
        assert found["loaded"]
        assert 0 < found["edited"] < 0.05
        assert found["unfrozen"] > 0
        assert found["frozen"]
        assert found["equal"]
        assert found["twice"] <= 1e-6


def fails_in_a_hook(rank, world_size, mode, fails):
    """Whether the ranks' weights and loss scales are equal after a hook around the step failed, and in the end."""
    engine = make_engine("zero1", **MODES[mode])
    take_step(engine, rank, 0)
    before = {name: value.clone() for name, value in engine.model.state_dict().items()}

    def fail(*_):
        if rank in fails:
            raise ZeroDivisionError("in a hook")

    handle = engine.optimizer.register_step_post_hook(fail)
    try:
        take_step(engine, rank, 1)
    except ZeroDivisionError:
        assert rank in fails
    else:
        assert rank not in fails
    handle.remove()
    moved = {n for n, value in engine.model.state_dict().items() if not torch.equal(value, before[n])}
    equal = all_equal(engine.model)
    take_step(engine, rank, 2)
    losses = engine.loss_scale, engine._update.losses.state_dict()
    model, equal = engine.model, equal and all_equal(engine.model)
    engine.close()
    return equal and all_equal(model), moved, repr(losses)


@pytest.mark.parametrize("mode", ["fp32", "naive_fp16"])
@pytest.mark.parametrize("fails", [(0, 1), (1,)])
def test_a_hook_that_fails_leaves_equal_weights(mode, fails):
    first, second = run_ranks(fails_in_a_hook, 2, mode, fails, timeout=60)
    assert first == second
    equal, moved, _ = first
    assert equal
    assert {"first.weight", "last.weight"} <= moved, "the update was taken"


class Normed(torch.optim.SGD):
    """Looks at a parameter as a whole."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.sub_(param.grad / (param.grad.norm() + 1e-6), alpha=group["lr"])


def refused(rank, world_size):
    with pytest.raises(IncompatibleConfigError) as caught:
        make_engine("zero1", optimizer=partial(Normed, lr=0.1))
    return str(caught.value)


def test_optimizers_that_need_whole_parameters_are_refused():
    for message in run_ranks(refused, 2, timeout=60):
        assert "Normed steps a parameter as a whole" in message
        assert "data='replicate'" in message
        assert "parallel.data with this model and optimizer" in message


def test_one_process_has_nothing_to_cut():
    engine = make_engine("zero1")
    assert engine._division.slices is None
    assert take_step(engine, 0, 0) is not None
    engine.close()
