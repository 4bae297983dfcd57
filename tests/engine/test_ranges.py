"""Named ranges around the parts of a step (`profile_ranges`)."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import halfmesh
from halfmesh.engine.ranges import add_ranges
from tests.support.compiling import NAME, watched
from tests.support.fake_gpu import fake_gpu, give_gradients
from tests.support.models import MLP, adamw, make_engine, sgd, train
from tests.support.ranks import run_ranks

ON = {"profile_ranges": True}
NAIVE = {"fp16": {"mode": "naive", "loss_scale": 8.0}, "clip_grad_norm": 1.0}
PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["tied"]}}
UPDATE = ["update", "update/grad_norm", "update/optimizer", "update/publish"]
ALONE = ["forward", "criterion", "backward", *UPDATE]
ON_RANKS = {
    "replicate": ({"data": {"bucket_mb": 0.001}}, ["backward", "backward/send_bucket", "backward/reduce", *UPDATE]),
    "zero1": ({"data": "zero1"}, ["backward/reduce", "backward/reduce/send_bucket", *UPDATE, "update/publish"]),
    "fsdp": ({"data": "fsdp"}, ["backward", "backward/reduce", *UPDATE]),
    "pipeline": (PIPELINE, ["forward", "criterion", "backward", "backward/stage_RANK", *UPDATE]),
}


def profiled(engine, work):
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


def test_a_step_has_ranges_nested_and_in_order():
    engine = make_engine({**ON, **NAIVE})
    _, paths = profiled(engine, lambda: train(engine, max_batches=1))
    assert paths == ALONE


def test_all_operations_of_an_update_are_in_its_range():
    engine = make_engine({**ON, **NAIVE}, optimizer=adamw)
    train(engine, max_batches=2)  # in the first ones hooks look for writes
    for x, y in engine.dataloader:
        engine.backward(engine.criterion(engine(x), y))
        events, _ = profiled(engine, engine.step)
        break
    outside = {event.name for event in events if event.cpu_parent is None}
    assert len(events) > 10
    assert outside == {"halfmesh.update"}


def test_without_the_key_no_object_of_the_engine_has_them():
    engine, with_ranges = make_engine(NAIVE), make_engine({**ON, **NAIVE})
    parts = [
        (given, given._executor, given._accumulation, given._update, given._update.stepper)
        for given in (engine, with_ranges)
    ]
    assert profiled(engine, lambda: train(engine, max_batches=1))[1] == []
    added = [set(vars(ranged)) - set(vars(plain)) for plain, ranged in zip(*parts, strict=True)]
    assert added == [{"_run"}, {"criterion"}, {"backward", "step"}, {"_measure", "_publish"}, {"step"}]


def test_the_scope_ends_and_leaves_nothing():
    engine = make_engine(NAIVE)
    before = set(vars(engine)), set(vars(engine._update))
    with add_ranges(engine):
        assert profiled(engine, lambda: train(engine, max_batches=1))[1] == ALONE
    assert (set(vars(engine)), set(vars(engine._update))) == before
    assert profiled(engine, lambda: train(engine, max_batches=1))[1] == []


def test_several_losses():
    engine = make_engine({**ON, "fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}})

    def update():
        for x, y in engine.dataloader:
            output = engine(x)
            for loss_id in range(2):
                engine.backward(engine.criterion(output, y), loss_id, retain_graph=True)
            engine.step()
            return

    assert profiled(engine, update)[1] == ["forward", *["criterion", "backward"] * 2, *UPDATE]


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


def test_compiled_code_has_none_of_them():
    with watched() as compiled:
        engine = make_engine({**ON, "compile": {"backend": NAME, "fullgraph": True}})
        _, paths = profiled(engine, lambda: train(engine, max_batches=2))
    assert paths == ["forward", "criterion", "backward", "update", "update/optimizer", "update/publish"] * 2
    assert (compiled.graphs, compiled.breaks) == (1, [])


def on_ranks(rank, world_size, parallel):
    engine = make_engine({**ON, **NAIVE, "parallel": parallel})
    train(engine, max_batches=1)  # fsdp and pipelines begin with it
    _, paths = profiled(engine, lambda: train(engine, max_batches=1))
    return paths


@pytest.mark.distributed
@pytest.mark.parametrize("layout", ON_RANKS)
def test_ranges_of_what_ranks_send(layout):
    parallel, expected = ON_RANKS[layout]
    for rank, paths in enumerate(run_ranks(on_ranks, 2, parallel)):
        at = iter(paths)
        assert all(name.replace("RANK", str(rank)) in at for name in expected), paths


def with_two_losses(rank, world_size):
    engine = make_engine({**ON, "fp16": {"mode": "apex", "opt_level": "O2", "num_losses": 2}})
    output = engine(torch.ones(2, 8))
    for loss_id in range(2):
        engine.backward(engine.criterion(output, torch.zeros(2, dtype=torch.int64)), loss_id, retain_graph=True)
    return profiled(engine, engine.step)[1]


@pytest.mark.distributed
def test_several_losses_are_reduced_in_the_update():
    expected = ["update", "update/reduce", "update/reduce/send_bucket", *UPDATE[1:]]
    assert run_ranks(with_two_losses, 2) == [expected] * 2


@pytest.mark.skipif(not torch.backends.cuda.is_built(), reason="needs a build of torch for CUDA")
def test_on_cuda_they_are_nvtx_ranges_too(monkeypatch):
    seen = []
    monkeypatch.setattr("torch.cuda.nvtx.range_push", seen.append)
    monkeypatch.setattr("torch.cuda.nvtx.range_pop", lambda: seen.append("end"))
    with fake_gpu() as gpu:
        with torch.device("cuda", 0):
            model, x, y = MLP(), torch.empty(8, 8), torch.zeros(8, dtype=torch.int64)
        engine = halfmesh.initialize(model, sgd, nn.functional.cross_entropy, None, ON, device="cuda")
        with give_gradients(gpu, engine.model.parameters):
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    one = [f"halfmesh.{name}" for name in ("forward", "criterion", "backward", "update", "optimizer", "publish")]
    assert seen == [*(name for each in one[:3] for name in (each, "end")), *one[3:5], "end", one[5], "end", "end"]
