"""The hooks that record some updates."""

import contextlib
import gzip
import json
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch

import halfmesh
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
    return steps, {name: names.count(name) for name in names if name.startswith("halfmesh.")}, events


def files(folder):
    return sorted(path.name for path in folder.rglob("*.rank*"))


def test_a_trace_of_some_updates(tmp_path, caplog):
    options = {"record_shapes": True, "profile_memory": True}
    engine = fit({"type": "profile", "steps": (3, 5), "folder": tmp_path / "traces", **options})
    assert files(tmp_path) == ["updates-3-5.rank0.json.gz"]
    steps, ranges, events = read(tmp_path / "traces" / "updates-3-5.rank0.json.gz")
    assert steps == ["ProfilerStep#3", "ProfilerStep#4", "ProfilerStep#5"]
    names = ("forward", "criterion", "backward", "update", "optimizer", "publish")
    assert ranges == {f"halfmesh.{name}": 3 for name in names}
    assert any("Input Dims" in event.get("args", {}) for event in events)
    assert re.search(r"wrote \S+updates-3-5\.rank0\.json\.gz", caplog.text)
    assert "_run" not in vars(engine)
    assert torch.equal(engine.model.weight, fit().model.weight)
    engine = linear_engine({"profile_ranges": True, "gradient_accumulation": 2}, **STEPS)
    hooks = {"type": "profile", "steps": (2, 3)}, {"type": "run", "directory": tmp_path / "run"}
    fit(*hooks, engine=engine, max_steps=4)
    _, ranges, _ = read(tmp_path / "run" / "profile" / "updates-2-3.rank0.json.gz")
    assert (ranges["halfmesh.forward"], ranges["halfmesh.update"]) == (4, 2)
    assert "_run" in vars(engine)


def test_an_error_keeps_what_there_is(tmp_path):
    engine = linear_engine(**STEPS)
    with pytest.raises(KeyError):
        fit({"type": "profile", "steps": (2, 6), "folder": tmp_path}, Fails(4, KeyError("mine")), engine=engine)
    assert files(tmp_path) == ["updates-2-4.rank0.json.gz"]
    assert "_run" not in vars(engine)
    with torch.profiler.profile():  # none is left
        pass


PIPELINE = {"pipeline": {"size": 2, "microbatches": 2, "partition": ["tied"]}}


def on_ranks(rank, world_size, folder, *chosen):
    for number, (ranks, parallel) in enumerate(zip(chosen, ({"data": "zero1"}, PIPELINE), strict=True)):
        engine = make_engine({"parallel": parallel})
        fit({"type": "profile", "steps": (2, 3), "folder": folder / str(number), "ranks": ranks}, engine=engine)


@pytest.mark.distributed
def test_chosen_ranks_write(tmp_path):
    run_ranks(on_ranks, 2, tmp_path, (1,), "all")
    names = [f"updates-2-3.rank{rank}.json.gz" for rank in range(2)]
    assert [files(tmp_path / "0"), files(tmp_path / "1")] == [names[1:], names]
    _, ranges, events = read(tmp_path / "0" / names[1])
    assert (ranges["halfmesh.reduce"], "halfmesh.send_bucket" in ranges) == (2, True)
    assert any("reduce_scatter" in event["name"] for event in events)
    assert "halfmesh.stage_1" in read(tmp_path / "1" / names[1])[1]


@pytest.fixture
def recorder(monkeypatch):
    """Calls of torch's recorder, in order, as on a GPU."""
    calls = []

    def dump(filename):
        calls.append("dump")
        Path(filename).touch()

    def record(enabled="all", **options):
        calls.append(enabled and options)

    for name, fake in (("_record_memory_history", record), ("_dump_snapshot", dump)):
        as_in_torch = create_autospec(getattr(torch.cuda.memory, name), side_effect=fake)
        monkeypatch.setattr(torch.cuda.memory, name, as_in_torch)
    monkeypatch.setattr(halfmesh.Engine, "device", SimpleNamespace(type="cuda"))
    return calls


ON, TOO_MUCH = {"max_entries": 100_000, "stacks": "python"}, torch.OutOfMemoryError("too much")


@pytest.mark.parametrize(
    ("options", "error", "calls", "expected"),
    [
        ({"steps": (3, 5)}, None, [ON, "dump", None], ["updates-3-5.rank0.pickle"]),
        ({"steps": (3, 5), "ranks": ()}, None, [ON, None], []),
        ({}, None, [ON, None], []),
        ({}, TOO_MUCH, [ON, "dump", None], ["out-of-memory-4.rank0.pickle"]),
        ({"ranks": ()}, TOO_MUCH, [ON, "dump", None], ["out-of-memory-4.rank0.pickle"]),
        ({}, KeyError("mine"), [ON, None], []),
    ],
)
def test_a_snapshot_after_some_updates_and_of_a_rank_without_memory(
    options, error, calls, expected, recorder, tmp_path
):
    with contextlib.suppress(torch.OutOfMemoryError, KeyError):
        fit(dict(type="memory_snapshot", folder=tmp_path, **options), Fails(3 if error else 0, error))
    assert (recorder, files(tmp_path)) == (calls, expected)
