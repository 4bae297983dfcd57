"""The hooks that record some updates."""

from __future__ import annotations

import gzip
import inspect
import json
import pickle
import re
from types import SimpleNamespace

import pytest
import torch

import halfmesh
from halfmesh.hooks import MemorySnapshotHook, ProfileHook
from tests.support.models import linear_engine, make_engine
from tests.support.ranks import run_ranks

STEPS = {"samples": 32, "evaluated": 4}  # 8 updates an epoch


class Fails(halfmesh.Hook):
    def __init__(self, at, error):
        self.at, self.error = at, error

    def after_step(self, trainer, result):
        if trainer.engine.global_step == self.at:
            raise self.error


def fit(*hooks, engine=None, max_steps=8):
    engine = linear_engine(**STEPS) if engine is None else engine
    halfmesh.Trainer(engine).fit(max_steps=max_steps, hooks=hooks)
    return engine


def read(path):
    """Of a trace: its steps, the ranges by number, and the events."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event["name"] for event in events if event.get("ph") == "X"]
    steps = sorted(name for name in set(names) if name.startswith("ProfilerStep"))
    ranges = {name: names.count(name) for name in names if name.startswith("halfmesh.")}
    return steps, ranges, events


def files(folder):
    return sorted(path.name for path in folder.rglob("*.rank*"))


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_of_some_updates(tmp_path, caplog):
    engine = fit({"type": "profile", "steps": (3, 5), "folder": tmp_path / "traces", "record_shapes": True})
    assert files(tmp_path) == ["updates-3-5.rank0.json.gz"]
    steps, ranges, events = read(tmp_path / "traces" / "updates-3-5.rank0.json.gz")
    assert steps == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    assert ranges == {
        f"halfmesh.{name}": 3 for name in ("forward", "criterion", "backward", "update", "optimizer", "publish")
    }
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert re.search(r"wrote \S+updates-3-5\.rank0\.json\.gz", caplog.text)
    assert "_run" not in vars(engine)


def test_training_is_the_same(tmp_path):
    plain, profiled = fit(), fit({"type": "profile", "steps": (2, 4), "folder": tmp_path, "profile_memory": True})
    assert torch.equal(plain.model.weight, profiled.model.weight)


def test_the_folder_of_the_run_and_the_config_key(tmp_path):
    engine = linear_engine({"profile_ranges": True, "gradient_accumulation": 2}, **STEPS)
    fit(
        {"type": "profile", "steps": (2, 3)}, {"type": "run", "directory": tmp_path / "run"}, engine=engine, max_steps=4
    )
    assert files(tmp_path) == ["updates-2-3.rank0.json.gz"]
    _, ranges, _ = read(tmp_path / "run" / "profile" / "updates-2-3.rank0.json.gz")
    assert (ranges["halfmesh.forward"], ranges["halfmesh.update"]) == (4, 2)
    assert "_run" in vars(engine)


def test_without_a_folder_it_is_the_present_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fit({"type": "profile", "steps": [2, 2]})
    assert files(tmp_path / "profile") == ["updates-2-2.rank0.json.gz"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [(5, ["updates-4-5.rank0.json.gz"]), (3, []), (1, [])],
    ids=["within", "in the warm-up", "before"],
)
def test_training_that_ends_earlier(last, expected, tmp_path, caplog):
    fit({"type": "profile", "steps": (4, 7), "folder": tmp_path}, max_steps=last)
    assert files(tmp_path) == expected
    assert (f"none of the updates 4 to 7 was recorded: this fit made 1 to {last}" in caplog.text) == (last < 4)
    with torch.profiler.profile():  # none is left
        pass


def test_an_error_keeps_what_there_is(tmp_path):
    engine = linear_engine(**STEPS)
    with pytest.raises(KeyError):
        fit({"type": "profile", "steps": (2, 6), "folder": tmp_path}, Fails(4, KeyError("mine")), engine=engine)
    assert files(tmp_path) == ["updates-2-4.rank0.json.gz"]
    assert "_run" not in vars(engine)


@pytest.mark.parametrize(
    ("saved", "steps", "expected"),
    [
        (4, (2, 4), []),
        (4, (3, 5), []),  # update 5 would be the warm-up
        (4, (3, 7), ["updates-6-7.rank0.json.gz"]),
        (4, (6, 7), ["updates-6-7.rank0.json.gz"]),
    ],
    ids=["past", "nothing left", "within", "ahead"],
)
def test_a_resumed_run_counts_its_updates_from_the_beginning(saved, steps, expected, tmp_path, caplog):
    fit(max_steps=saved).save(tmp_path / "checkpoints")
    engine = linear_engine(**STEPS)
    engine.load(tmp_path / "checkpoints")
    fit({"type": "profile", "steps": steps, "folder": tmp_path}, engine=engine)
    assert files(tmp_path) == expected
    assert ("was recorded: this fit made 5 to 8" in caplog.text) == (not expected)


def test_a_folder_that_cannot_be_written_ends_no_training(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    engine = fit({"type": "profile", "steps": (2, 3), "folder": tmp_path / "file"})
    assert engine.global_step == 8
    assert re.search(r"cannot write \S+updates-2-3\.rank0\.json\.gz: ", caplog.text)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ProfileHook(10), r"steps=10: expected the first and the last update, as in \(10, 15\): 2 or later"),
        (lambda: ProfileHook((1, 4)), r"steps=\(1, 4\): expected .*: 2 or later, after one to warm up"),
        (lambda: ProfileHook((4, 3)), r"steps=\(4, 3\)"),
        (lambda: MemorySnapshotHook((0, 3)), r"steps=\(0, 3\): expected .*: 1 or later"),
        (lambda: MemorySnapshotHook(max_entries=0), "max_entries=0"),
        (lambda: fit(ProfileHook(ranks=[1])), r"ranks=\[1\]: expected ranks below 1, or 'all'"),
    ],
)
def test_arguments(build, message):
    with pytest.raises(halfmesh.InputError, match=message):
        build()


def on_ranks(rank, world_size, folder, ranks):
    engine = make_engine({"parallel": {"data": "zero1"}})
    fit({"type": "profile", "steps": (2, 3), "folder": folder, "ranks": ranks}, engine=engine, max_steps=3)


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "expected"), [((1,), [1]), ("all", [0, 1])])
def test_chosen_ranks_write(ranks, expected, tmp_path):
    run_ranks(on_ranks, 2, tmp_path, ranks)
    assert files(tmp_path) == [f"updates-2-3.rank{rank}.json.gz" for rank in expected]
    _, ranges, events = read(tmp_path / files(tmp_path)[-1])
    assert ranges["halfmesh.reduce"] == 2
    assert any("reduce_scatter" in event["name"] for event in events)


# -- memory ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def recorder(monkeypatch):
    """Calls of torch's recorder, in order, as on a GPU."""
    calls = []

    def record(enabled="all", **options):
        calls.append(enabled and options)

    def dump(path):
        calls.append("dump")
        with open(path, "wb") as file:
            pickle.dump({}, file)

    monkeypatch.setattr("torch.cuda.memory._record_memory_history", record)
    monkeypatch.setattr("torch.cuda.memory._dump_snapshot", dump)
    monkeypatch.setattr(halfmesh.Engine, "device", SimpleNamespace(type="cuda"))
    return calls


ON = {"max_entries": 100_000, "stacks": "python"}


@pytest.mark.parametrize(
    ("options", "last", "calls", "expected"),
    [
        ({"steps": (3, 5)}, 8, [ON, "dump", None], ["updates-3-5.rank0.pickle"]),
        ({"steps": (1, 5), "max_entries": 9}, 3, [ON | {"max_entries": 9}, "dump", None], ["updates-1-3.rank0.pickle"]),
        ({"steps": (5, 7)}, 3, [], []),
        ({"steps": (3, 5), "ranks": ()}, 8, [ON, None], []),
        ({}, 8, [ON, None], []),
    ],
    ids=["some", "ends earlier", "ends before", "other ranks", "all"],
)
def test_a_snapshot_after_some_updates(options, last, calls, expected, recorder, tmp_path):
    fit(dict(type="memory_snapshot", folder=tmp_path, **options), max_steps=last)
    assert recorder == calls
    assert files(tmp_path) == expected


@pytest.mark.parametrize("options", [{}, {"steps": (2, 6)}, {"ranks": ()}], ids=["all", "some", "other ranks"])
def test_a_snapshot_of_a_rank_without_memory(options, recorder, tmp_path):
    full = torch.OutOfMemoryError("too much")
    with pytest.raises(torch.OutOfMemoryError):
        fit(dict(type="memory_snapshot", folder=tmp_path, **options), Fails(3, full))
    assert recorder == [ON, "dump", None]
    assert files(tmp_path) == ["out-of-memory-4.rank0.pickle"]


def test_another_error_writes_none(recorder, tmp_path):
    with pytest.raises(KeyError):
        fit({"type": "memory_snapshot", "folder": tmp_path}, Fails(3, KeyError("mine")))
    assert (recorder, files(tmp_path)) == ([ON, None], [])


def test_on_a_cpu_it_says_that_it_does_nothing(tmp_path, caplog):
    fit({"type": "memory_snapshot", "steps": (1, 2), "folder": tmp_path})
    assert "the hook memory_snapshot records nothing on the device cpu" in caplog.text
    assert files(tmp_path) == []


def test_torch_has_its_recorder():
    options = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "stacks", "max_entries"} <= set(options)
    assert "filename" in inspect.signature(torch.cuda.memory._dump_snapshot).parameters
