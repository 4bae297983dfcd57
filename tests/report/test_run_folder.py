"""The folder that keeps what a run was: with skipped updates, on several ranks, and of runs that go on."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import InputError
from halfmesh.hooks import RunHook
from halfmesh.report.run import read_run
from halfmesh.report.tables import status
from halfmesh.utils.log import Listener
from tests.report.report_runs import data_of, page_of
from tests.support.models import FEATURES, make_data
from tests.support.ranks import rank_device, run_ranks

FP16 = {"fp16": {"mode": "naive", "initial_scale": 1024.0, "hysteresis": 1}}


def make(samples=48, layers=1, **config):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(layers)], nn.GELU(), nn.Linear(FEATURES, 4))
    loader = DataLoader(TensorDataset(*make_data(samples)), 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return halfmesh.initialize(model, optimizer, nn.CrossEntropyLoss(), loader, config, device=rank_device())


class Overflow(halfmesh.Hook):
    """Makes these updates (counted from 1) overflow, on rank 0's part of the data only."""

    def __init__(self, *updates: int) -> None:
        self.updates = updates

    def before_batch(self, trainer, batch):
        if trainer.engine.global_step + 1 in self.updates and trainer.engine.context.dp_rank == 0:
            batch[0].fill_(math.inf)


class Save(halfmesh.Hook):
    """Saves before the batch that follows update `step`."""

    def __init__(self, step, directory):
        self.step, self.directory = step, directory

    def before_batch(self, trainer, batch):
        if trainer.engine.global_step == self.step:
            trainer.save(self.directory)


class After(halfmesh.Hook):
    """Calls `what` with the engine after an update."""

    def __init__(self, update: int, what) -> None:
        self.update, self.what = update, what

    def after_step(self, trainer, result):
        if trainer.engine.global_step == self.update:
            self.what(trainer.engine)


def sessions_of(folder):
    return json.loads((folder / "config.json").read_text())["sessions"]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_that_early_stopping_ended_says_so(tmp_path):
    engine = make()
    loader = engine.dataloader.loader.given
    stop = {"type": "early_stop", "monitor": "eval_loss", "patience": 1, "min_delta": 1e9}
    halfmesh.Trainer(engine).fit(epochs=5, hooks=[stop, RunHook(tmp_path)], eval_dataloader=loader)
    said = status(read_run(tmp_path))
    assert re.fullmatch(r"✓ finished, stopped early: eval_loss did not improve on \S+ in 1 evaluations", said)


def test_a_run_with_skipped_updates(tmp_path):
    engine = make(**FP16, NUM_EPOCHS=2, THING=object())
    hooks = [Overflow(3, 4, 9, 22), "throughput", "memory", RunHook(tmp_path / "run", precision_report=True)]
    halfmesh.Trainer(engine, log_every=5).fit(epochs=2, hooks=hooks, eval_dataloader=engine.dataloader.loader.given)
    run = data_of(tmp_path / "run")
    assert run["notes"] == []
    assert run["skipped"] == [3, 4, 9, 22]
    assert run["skipped_steps"] == engine.skipped_steps == 4
    records = [line for line in lines_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in records] == [5, 10, 12, 15, 20, 24]
    assert [line.get("skipped") for line in records] == [[3, 4], [9], None, None, None, [22]]
    names = {"loss", "lr", "loss_scale", "grad_norm", "samples_per_s", "model_flops_per_s", "memory_mib", "eval_loss"}
    assert set(run["series"]) == names
    (session,) = run["sessions"]
    assert (session["status"], session["to_step"], session["world_size"]) == ("finished", 24, 1)
    assert session["versions"]["torch"] == torch.__version__
    assert session["config"]["NUM_EPOCHS"] == 2
    assert session["config"]["THING"].startswith("<object object")
    assert (session["settings"]["fp16"]["hysteresis"], session["settings"]["seed"]) == (1, 1024)
    (plan,) = run["plans"]
    assert plan["rows"] == dict(engine.plan.rows)
    values = plan["values"]
    assert (values["mode"], values["compute_dtype"]) == ("naive", "float16")
    assert values["mesh"] == {"pp": 1, "dp": 1, "tp": 1}
    assert values["batch"] == {"per_rank": 4, "data_ranks": 1, "accumulated": 1, "per_update": 4}
    assert values["loss_scale"] == {"initial": 1024.0, "dynamic": True}
    assert run["precision"]["report"]["compute_dtype"] == "float16"
    assert "3-4, 9, 22" in page_of(tmp_path / "run")


def test_warnings_are_kept(tmp_path):
    engine = make(fp16={"mode": "torch"})
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        engine.model(make_data(4)[0])
        for x, y in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            run.note(engine.step())
        run.record(loss=1.0)
    assert not any(isinstance(handler, Listener) for handler in logging.getLogger("halfmesh").handlers)
    read = data_of(tmp_path / "run")
    (text,) = read["warnings"]
    assert text.startswith("the model itself was called in training")
    assert read["warnings"][text] == 0
    assert "after 0 updates: the model itself was called" in page_of(tmp_path / "run")


def test_a_loop_of_ones_own(tmp_path):
    engine = make(**FP16, gradient_accumulation=2)
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        for number, (x, y) in enumerate(engine.dataloader):
            if number in (2, 11):
                x.fill_(math.inf)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            result = engine.step()
            assert run.note(result) is result
            run.note(result)  # twice does no harm
            if result is not None and engine.global_step == 4:
                run.record(loss=loss, accuracy=0.5)
    first, last = lines_of(tmp_path / "run")
    assert {key: first[key] for key in ("step", "accuracy", "lr", "loss_scale", "skipped_steps", "skipped")} == {
        "step": 4, "accuracy": 0.5, "lr": 0.1, "loss_scale": 512.0, "skipped_steps": 1, "skipped": [2],
    }  # fmt: skip
    assert last == {"step": 6, "skipped": [6]}  # written at the end


def test_what_a_record_takes(tmp_path):
    with halfmesh.RunFolder(make(), tmp_path / "run") as run:
        for value in ("text", torch.ones(3)):
            with pytest.raises((ValueError, RuntimeError)):
                run.record(note=value)
        run.record(loss=torch.ones(1, 1), lr=7.0)
    assert lines_of(tmp_path / "run") == [{"step": 0, "loss": 1.0, "lr": 7.0}]
    with pytest.raises(InputError, match="cannot be the folder of a run"):
        halfmesh.RunFolder(make(), "a\0b")


def test_a_run_that_goes_on(tmp_path):
    """Its checkpoint lies between two records; what was skipped before it stays, what is trained again comes once."""

    def die(engine):
        shutil.copytree(folder, killed)
        raise KeyError("the user's own")

    folder, saved, killed = (tmp_path / name for name in ("run", "saved", "killed"))
    hooks = [Overflow(2, 6, 8), Save(7, saved), RunHook(folder), After(9, die)]
    with pytest.raises(KeyError):
        halfmesh.Trainer(make(**FP16), log_every=5).fit(epochs=1, hooks=hooks)
    assert data_of(killed)["skipped"] == [2, 6], "those before the checkpoint"
    assert "still running, or killed" in page_of(killed)
    assert sessions_of(folder)[0]["error"].startswith("KeyError: ")
    assert "failed: KeyError" in page_of(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    again = make(**FP16, clip_grad_norm=1.0)
    again.load(saved)
    assert again.global_step == 7
    halfmesh.Trainer(again, log_every=5).fit(epochs=1, hooks=[Overflow(11), RunHook(folder)])
    run = data_of(folder)
    assert (run["skipped"], run["skipped_steps"], run["notes"]) == ([2, 6, 11], 3, [])
    assert [line["step"] for line in lines_of(folder) if "loss" in line] == [5, 10, 12]
    sessions = [(s["from_step"], s["status"], s["to_step"]) for s in run["sessions"]]
    assert sessions == [(0, "failed", 9), (7, "finished", 12)]
    assert [plan["from_step"] for plan in run["plans"]] == [0, 7]
    assert "from update 7: clip_grad_norm.max_norm 0.0 -&gt; 1.0" in page_of(folder)


def test_another_run_is_never_overwritten(tmp_path):
    folder = tmp_path / "run"
    texts = []
    for number in range(3):
        with halfmesh.RunFolder(make(SEED_OF_MINE=number), folder) as run:
            run.record(loss=float(number))
        texts.append({path.name: path.read_text() for path in folder.iterdir() if path.is_file()})
    for number, earlier in enumerate(["earlier-1", "earlier-2"]):
        assert {path.name: path.read_text() for path in (folder / earlier).iterdir()} == texts[number]
    assert data_of(folder)["series"]["loss"]["value"] == [2.0]


def test_a_damaged_line_does_not_stop_a_run_that_is_resumed(tmp_path):
    folder, engine = tmp_path / "run", make()
    engine._progress.global_step = 5
    folder.mkdir()
    (folder / "metrics.jsonl").write_text('{"step": 3}\n{"step": 7, "skipped": [4, 6]}\n{"st')
    with halfmesh.RunFolder(engine, folder):
        pass
    assert [session["from_step"] for session in sessions_of(folder)] == [5]
    assert lines_of(folder) == [{"step": 3}, {"step": 5, "skipped": [4]}]
    (folder / "config.json").write_text('{"sessions": [1')
    with pytest.raises(InputError, match=r"cannot be the folder of a run; .*: JSONDecodeError"):
        halfmesh.RunFolder(engine, folder)
    assert (folder / "config.json").read_text() == '{"sessions": [1'


LAYOUTS = {"fsdp": {"data": "fsdp"}, "pp": {"pipeline": {"size": 2, "microbatches": 2}}}


def of_two_ranks(rank, world_size, folder):
    skipped = []
    for name, parallel in LAYOUTS.items():
        engine = make(52, layers=4, **FP16, parallel=parallel)
        with pytest.raises(
            InputError, match=r"(?s)cannot be the folder of a run; give .* rank 0 .*: NotADirectoryError"
        ):
            halfmesh.RunFolder(engine, Path(folder) / "file" / "run")  # rank 0 alone has tried
        hooks = [Overflow(2, 5), "memory", RunHook(Path(folder) / name)]
        halfmesh.Trainer(engine, log_every=3).fit(max_steps=6, hooks=hooks)
        skipped.append(engine.skipped_steps)
    return skipped


@pytest.mark.distributed
@pytest.mark.sends
def test_two_ranks_write_one_folder(tmp_path):
    """Rank 0's part of the data alone has the overflow."""
    (tmp_path / "file").write_text("")
    assert run_ranks(of_two_ranks, 2, str(tmp_path)) == [[2, 2], [2, 2]]
    for name in LAYOUTS:
        run = data_of(tmp_path / name)
        assert (run["notes"], run["skipped"]) == ([], [2, 5])
        assert [line["step"] for line in lines_of(tmp_path / name)] == [3, 6]
        assert run["sessions"][0]["world_size"] == 2
        page = page_of(tmp_path / name)
        assert "rank 1" in page
        assert ("fsdp 2/2" in page) == (name == "fsdp")
    first, second = (rank["holds"] for rank in run["plans"][0]["values"]["ranks"])
    assert first
    assert second
    assert not {*first} & {*second}  # each block on one stage
