"""The folder that a run keeps: of real training, with skipped updates, several ranks, and runs that go on."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.hooks import CheckpointHook, RunHook
from halfmesh.report.facts import make_plain
from halfmesh.report.folder import _MOST_UNREAD
from halfmesh.report.page import make_page
from halfmesh.report.run import read_run
from tests.support.models import FEATURES, make_data
from tests.support.ranks import run_ranks

FP16 = {"fp16": {"mode": "naive", "initial_scale": 1024.0, "hysteresis": 1}}


def make(samples=48, **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.GELU(), nn.Linear(8, 4))
    return halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(),
        DataLoader(TensorDataset(*make_data(samples)), 4),
        config,
        device="cpu",
    )


class Overflow(halfmesh.Hook):
    """Makes these updates (counted from 1) overflow, on rank 0's part of the data only."""

    def __init__(self, *updates: int) -> None:
        self.updates = updates

    def before_batch(self, trainer, batch):
        if trainer.engine.global_step + 1 in self.updates and trainer.engine.context.dp_rank == 0:
            batch[0].fill_(math.inf)


class Dies(halfmesh.Hook):
    """Ends the run after an update, as a bug would."""

    def __init__(self, update: int) -> None:
        self.update = update

    def after_step(self, trainer, result):
        if trainer.engine.global_step == self.update:
            raise KeyError("the user's own")


def sessions_of(folder):
    return json.loads((folder / "config.json").read_text())["sessions"]


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_page_has_the_updates_that_were_skipped(tmp_path):
    engine = make(**FP16, NUM_EPOCHS=2, THING=object())
    hooks = [Overflow(3, 4, 9, 22), "throughput", "memory", RunHook(tmp_path / "run", precision_report=True)]
    halfmesh.Trainer(engine, log_every=5).fit(epochs=2, hooks=hooks, eval_dataloader=engine.dataloader.loader)
    run = read_run(tmp_path / "run")
    assert run.notes == []
    assert run.skipped == [3, 4, 9, 22]
    assert run.skipped_count == engine.skipped_steps == 4
    records = [line for line in lines_of(tmp_path / "run") if "loss" in line]
    assert [line["step"] for line in records] == [5, 10, 12, 15, 20, 24]
    assert [line.get("skipped") for line in records] == [[3, 4], [9], None, None, None, [22]]
    names = {"loss", "lr", "loss_scale", "grad_norm", "samples_per_s", "model_flops_per_s", "memory_mib", "eval_loss"}
    assert set(run.series) == names
    session = run.session
    assert (session["status"], session["to_step"], session["world_size"]) == ("finished", 24, 1)
    assert session["versions"]["torch"] == torch.__version__
    assert session["config"]["NUM_EPOCHS"] == 2
    assert session["config"]["THING"].startswith("<object object")
    assert session["settings"]["fp16"]["hysteresis"] == 1
    assert session["settings"]["seed"] == 1024
    assert run.plan["rows"] == dict(engine.plan.rows)
    values = run.plan["values"]
    assert (values["mode"], values["compute_dtype"], values["mesh"]) == (
        "naive",
        "float16",
        {"pp": 1, "dp": 1, "tp": 1},
    )
    assert values["batch"] == {"per_rank": 4, "data_ranks": 1, "accumulated": 1, "per_update": 4}
    assert values["loss_scale"] == {"initial": 1024.0, "dynamic": True}
    assert values["ranks"] == [{"place": [0, 0, 0], "holds": ["0", "2"], "part": "", "bytes": values_sum(values)}]
    assert run.precision["report"]["compute_dtype"] == "float16"
    assert "3-4, 9, 22" in make_page([run])


def values_sum(values):
    return sum(values["bytes"].values())


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
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 6]
    assert lines[0] == {
        "step": 4,
        "loss": pytest.approx(lines[0]["loss"]),
        "accuracy": 0.5,
        "lr": 0.1,
        "grad_norm": pytest.approx(lines[0]["grad_norm"]),
        "loss_scale": 512.0,
        "skipped_steps": 1,
        "skipped": [2],
    }
    assert lines[1] == {"step": 6, "skipped": [6]}  # written at the end


def test_what_a_record_takes(tmp_path):
    engine = make()
    run = halfmesh.RunFolder(engine, tmp_path / "run")
    with pytest.raises(halfmesh.InputError, match="step= is what a record says by itself; give the value another name"):
        run.record(step=3)
    with pytest.raises(
        halfmesh.InputError, match="note=str is no number; give record numbers, or tensors of one element"
    ):
        run.record(note="text")
    run.close()
    run.record(loss=1.0)
    run.close(ValueError("late"))
    assert lines_of(tmp_path / "run") == []
    assert sessions_of(tmp_path / "run")[0]["status"] == "finished"


def test_results_are_read_late_and_in_time(tmp_path):
    """Of a run that is recorded seldom: what was read early are updates of long ago."""

    class Result:
        def __init__(self, skipped):
            self.asked, self.is_skipped, self.lr, self.grad_norm = 0, skipped, 0.1, None

        @property
        def skipped(self):
            self.asked += 1
            return self.is_skipped

    engine, results = make(), []
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        for step in range(1, 2 * _MOST_UNREAD + 1):
            engine.global_step = step
            results.append(Result(step % 500 == 0))
            run.note(results[-1])
            assert not any(result.asked for result in results[-_MOST_UNREAD // 2 :])
            assert sum(not result.asked for result in results) <= _MOST_UNREAD
        run.record(loss=1.0)
    assert all(result.asked == 1 for result in results)
    assert lines_of(tmp_path / "run")[0]["skipped"] == [500, 1000, 1500, 2000]


def test_a_run_that_goes_on(tmp_path):
    """Its checkpoint lies between two records; what was skipped before it stays, what is trained again comes once."""
    folder, saved = tmp_path / "run", tmp_path / "saved"
    hooks = [Overflow(2, 6, 8), CheckpointHook(saved, every=7, in_background=False), RunHook(folder), Dies(9)]
    with pytest.raises(KeyError):
        halfmesh.Trainer(make(**FP16), log_every=5).fit(epochs=1, hooks=hooks)
    assert sessions_of(folder)[0]["error"].startswith("KeyError: ")
    assert "failed: KeyError" in make_page([read_run(folder)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    again = make(**FP16, clip_grad_norm=1.0)
    again.load(saved)
    assert again.global_step == 7
    halfmesh.Trainer(again, log_every=5).fit(epochs=1, hooks=[Overflow(11), RunHook(folder)])
    run = read_run(folder)
    assert run.skipped == [2, 6, 11]
    assert run.skipped_count == 3
    assert run.notes == []
    assert [line["step"] for line in lines_of(folder) if "loss" in line] == [5, 10, 12]
    assert [(s["from_step"], s["status"], s["to_step"]) for s in run.sessions] == [
        (0, "failed", 9),
        (7, "finished", 12),
    ]
    assert "from update 7: clip_grad_norm.max_norm 0.0 -&gt; 1.0" in make_page([run])
    assert [plan["from_step"] for plan in run.plans] == [0, 7]


def test_what_was_skipped_before_a_checkpoint_is_kept_when_the_run_is_killed(tmp_path):
    class Killed(halfmesh.Hook):
        """The folder as it is when nothing more can be written."""

        def after_step(self, trainer, result):
            if trainer.engine.global_step == 9:
                shutil.copytree(tmp_path / "run", tmp_path / "killed")

    save = CheckpointHook(tmp_path / "saved", every=7, in_background=False, keep=None)
    hooks = [Overflow(2, 6), save, RunHook(tmp_path / "run"), Killed()]
    halfmesh.Trainer(make(**FP16), log_every=5).fit(max_steps=9, hooks=hooks)
    killed = read_run(tmp_path / "killed")
    assert killed.skipped == [2, 6]
    assert "no end was written: it still runs, or was killed" in make_page([killed])


def test_skips_in_records_that_are_taken_away_stay(tmp_path):
    """No hook knew of the checkpoint: it lies before a record that goes, and after skips that are in it."""
    folder = tmp_path / "run"
    engine = make(**FP16)
    trainer = halfmesh.Trainer(engine, log_every=5)

    class Saves(halfmesh.Hook):
        def after_step(self, trainer, result):
            if trainer.engine.global_step == 8:
                trainer.engine.save(tmp_path / "saved")

    trainer.fit(epochs=1, hooks=[Overflow(7, 9), RunHook(folder), Saves()])
    again = make(**FP16)
    again.load(tmp_path / "saved")
    halfmesh.Trainer(again, log_every=5).fit(epochs=1, hooks=[RunHook(folder)])
    assert read_run(folder).skipped == [7]
    assert [line["step"] for line in lines_of(folder)] == [5, 8, 10, 12]


def test_a_run_that_was_preempted(tmp_path):
    engine = make()
    run = halfmesh.RunFolder(engine, tmp_path / "run")
    engine.close()  # the folder can still be closed
    run.close(halfmesh.Preempted())
    assert sessions_of(tmp_path / "run")[0]["status"] == "preempted"
    assert "preempted, and saved" in make_page([read_run(tmp_path / "run")])


def test_another_run_is_never_overwritten(tmp_path):
    folder = tmp_path / "run"
    texts = []
    for number in range(3):
        with halfmesh.RunFolder(make(SEED_OF_MINE=number), folder) as run:
            run.record(loss=float(number))
        texts.append({path.name: path.read_text() for path in folder.iterdir() if path.is_file()})
    for number, earlier in enumerate(["earlier-1", "earlier-2"]):
        assert {path.name: path.read_text() for path in (folder / earlier).iterdir()} == texts[number]
    assert read_run(folder).series["loss"].values == [2.0]
    assert read_run(folder / "earlier-1").series["loss"].values == [0.0]


def test_a_damaged_folder_does_not_stop_a_run_that_goes_on(tmp_path):
    folder, engine = tmp_path / "run", make()
    engine.global_step = 5
    folder.mkdir()
    (folder / "config.json").write_text('{"sessions": [1')
    (folder / "plan.json").write_text("[]")
    (folder / "metrics.jsonl").write_text('{"step": 3, "skipped": "x"}\n{"step": 7, "skipped": [null]}\n{"st')
    with halfmesh.RunFolder(engine, folder):
        pass
    assert (folder / "config.1.json").read_text() == '{"sessions": [1'
    assert (folder / "plan.1.json").read_text() == "[]"
    assert [session["from_step"] for session in sessions_of(folder)] == [5]


def test_why_there_is_no_precision_report(tmp_path, caplog):
    with halfmesh.RunFolder(make(), tmp_path / "run") as run:
        run.save_precision_report()
    assert "has no precision report: engine.precision_report() computes the last batch" in caplog.text
    assert "There is none: engine.precision_report() computes the last batch" in make_page([read_run(tmp_path / "run")])


def test_plain_values():
    nested = value = []
    for _ in range(40):
        value.append([])
        value = value[0]
    given = {"a": (1, {2}), 3: math.nan, "path": Path("x"), "mode": halfmesh.AMP_TYPE.NAIVE, "big": 10**40, "n": nested}
    plain = make_plain(given)
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["a"] == [1, [2]]
    assert (plain["3"], plain["path"], plain["mode"], plain["big"]) == ("nan", "x", "naive", "1" + "0" * 40)


LAYOUTS = {"fsdp": {"data": "fsdp"}, "pp": {"pipeline": {"size": 2, "microbatches": 2}}}


def of_two_ranks(rank, world_size, folder):
    skipped = []
    for name, parallel in LAYOUTS.items():
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Linear(FEATURES, FEATURES) for _ in range(4)], nn.Linear(FEATURES, 4))
        engine = halfmesh.initialize(
            model,
            torch.optim.SGD(model.parameters(), lr=0.01),
            nn.CrossEntropyLoss(),
            DataLoader(TensorDataset(*make_data(52)), 4),
            {**FP16, "parallel": parallel},
            device="cpu",
        )
        with pytest.raises(
            halfmesh.InputError, match=r"cannot be the folder of a run \(.*Error.*\); give a folder that"
        ):
            halfmesh.RunFolder(engine, Path(folder) / "file" / "run")  # rank 0 alone has tried
        hooks = [Overflow(2, 5), "memory", RunHook(Path(folder) / name, precision_report=True)]
        halfmesh.Trainer(engine, log_every=3).fit(max_steps=6, hooks=hooks)
        skipped.append(engine.skipped_steps)
    return skipped


@pytest.mark.distributed
def test_two_ranks_write_one_folder(tmp_path):
    """Rank 0's part of the data alone has the overflow."""
    (tmp_path / "file").write_text("")
    assert run_ranks(of_two_ranks, 2, str(tmp_path)) == [[2, 2], [2, 2]]
    for name in LAYOUTS:
        run = read_run(tmp_path / name)
        assert run.notes == []
        assert run.skipped == [2, 5]
        assert [line["step"] for line in lines_of(tmp_path / name)] == [3, 6]
        assert run.session["world_size"] == 2
        assert "report" in run.precision
        page = make_page([run])
        assert "rank 1" in page
        assert ("fsdp 2/2" in page) == (name == "fsdp")
    first, second = (rank["holds"] for rank in read_run(tmp_path / "pp").plan["values"]["ranks"])
    assert first
    assert second
    assert not {*first} & {*second}  # each block on one stage


@pytest.mark.parametrize("value", [torch.ones(3), torch.tensor(1j), np.array("abc"), torch.ones(0), "x", [1]])
def test_a_value_that_is_no_number(value, tmp_path):
    engine = make()
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        with pytest.raises(halfmesh.InputError, match=r"loss=.* is no number"):
            run.record(loss=value)
        run.record(loss=torch.ones(1, 1), other=np.float32(2))
    assert lines_of(tmp_path / "run") == [{"step": 0, "loss": 1.0, "other": 2.0}]


def test_a_value_of_ones_own_under_a_name_that_is_recorded(tmp_path):
    engine = make()
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        for images, labels in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(images), labels))
            run.note(engine.step())
        run.record(lr=7.0)
        run.record()
    first, second = lines_of(tmp_path / "run")
    assert first["lr"] == 7.0
    assert second["lr"] == engine.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("damage", [b"\xff\xfe\x00", b"[" * 100_000])
def test_bytes_that_are_no_text_do_not_stop_a_run_that_goes_on(damage, tmp_path):
    engine = make()
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        run.record(loss=1.0)
    engine.save(tmp_path / "checkpoints")
    with (tmp_path / "run" / "metrics.jsonl").open("ab") as file:
        file.write(damage + b"\n")
    (tmp_path / "run" / "plan.json").write_bytes(damage)
    engine = make()
    for images, labels in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(images), labels))
        engine.step()
    with halfmesh.RunFolder(engine, tmp_path / "run") as run:
        run.record(loss=2.0)
    assert [line["loss"] for line in lines_of(tmp_path / "run")] == [1.0, 2.0]


def test_a_name_that_no_folder_can_have(tmp_path):
    engine = make()
    with pytest.raises(halfmesh.InputError, match="cannot be the folder of a run"):
        halfmesh.RunFolder(engine, "a\0b")
