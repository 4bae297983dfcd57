"""Named ranges around the parts of a step (`profile_ranges`)."""

from __future__ import annotations

import gc
import weakref

import pytest
from torch.profiler import ProfilerActivity, profile

from tests.support.models import adamw, make_engine, train
from tests.support.ranks import run_ranks

ON = {"profile_ranges": True}
NAIVE = {"fp16": {"mode": "naive", "loss_scale": 8.0}, "clip_grad_norm": 1.0}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["tied"]}}
UPDATE = ["update", "update/grad_norm", "update/optimizer", "update/publish"]
ALONE = ["forward", "criterion", "backward", *UPDATE]
ON_RANKS = {
    "zero1": ({"data": "zero1"}, ["backward/reduce", "backward/reduce/send_bucket", *UPDATE, "update/publish"]),
    "pipeline": (PIPELINE, ["forward", "criterion", "backward", "backward/stage_RANK", *UPDATE]),
}


def profiled(work):
    """The events while `work` is done, and the paths of those that halfmesh named, in order."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        work()
    events = sorted(found.events(), key=lambda event: event.time_range.start)
    return events, [path(event) for event in events if event.name.startswith("halfmesh.")]


def path(event):
    names = []
    while event is not None:
        names += [event.name.removeprefix("halfmesh.")] if event.name.startswith("halfmesh.") else []
        event = event.cpu_parent
    return "/".join(reversed(names))


def test_a_step_has_ranges_nested_and_in_order_and_all_of_an_update_is_in_its_range():
    engine = make_engine({**ON, **NAIVE}, optimizer=adamw)
    train(engine, max_batches=2)  # in the first ones hooks look for writes
    x, y = next(iter(engine.dataloader))
    _, paths = profiled(lambda: engine.backward(engine.criterion(engine(x), y)))
    events, update = profiled(engine.step)
    assert paths + update == ALONE
    assert {event.name for event in events if event.cpu_parent is None} == {"halfmesh.update"}
    assert len(events) > 10


def test_an_engine_with_ranges_ends_with_its_last_reference():
    engine = make_engine({**ON, **NAIVE})
    train(engine, max_batches=1)
    gc.collect()
    gc.disable()
    try:
        kept = weakref.ref(engine), weakref.ref(engine._executor)
        del engine
        assert [one() for one in kept] == [None, None]
    finally:
        gc.enable()


def on_ranks(rank, world_size):
    found = {}
    for layout, (parallel, _) in ON_RANKS.items():
        engine = make_engine({**ON, **NAIVE, "parallel": parallel})
        train(engine, max_batches=1)  # fsdp and pipelines begin with it
        found[layout] = profiled(lambda own=engine: train(own, max_batches=1))[1]
        engine.close()
    return found


@pytest.mark.distributed
def test_ranges_of_what_ranks_send():
    for rank, found in enumerate(run_ranks(on_ranks, 2)):
        for layout, paths in found.items():
            at = iter(paths)
            assert all(name.replace("RANK", str(rank)) in at for name in ON_RANKS[layout][1]), paths
