"""The folder that keeps what a run was: with skipped updates, on several ranks, and of runs that go on."""

import json
import logging
import math
import re
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


class Acts(halfmesh.Hook):
    """Makes these updates (counted from 1) overflow, on rank 0's part of the data only; saves before the batch that
    follows an update, and fails after one."""

    def __init__(self, *overflows, save=(None, None), fail=None):
        self.overflows, self.save, self.fail = overflows, save, fail

    def before_batch(self, trainer, batch):
        step = trainer.engine.global_step
        if step + 1 in self.overflows and trainer.engine.context.dp_rank == 0:
            batch[0].fill_(math.inf)
        if step == self.save[0]:
            trainer.save(self.save[1])

    def after_step(self, trainer, result):
        if trainer.engine.global_step == self.fail:
            raise KeyError("the user's own")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_with_skipped_updates(tmp_path):
    engine = make(**FP16, NUM_EPOCHS=2, THING=object())
    hooks = [Acts(3, 4, 9, 22), "throughput", "memory", RunHook(tmp_path / "run", precision_report=True)]
    halfmesh.Trainer(engine, log_every=5).fit(epochs=2, hooks=hooks, eval_dataloader=engine.dataloader.loader.given)
    run = data_of(tmp_path / "run")
    assert (run["notes"], run["skipped"], run["skipped_steps"]) == ([], [3, 4, 9, 22], 4)
    records = [(line["step"], line.get("skipped")) for line in lines_of(tmp_path / "run") if "loss" in line]
    assert records == [(5, [3, 4]), (10, [9]), (12, None), (15, None), (20, None), (24, [22])]
    names = {"loss", "lr", "loss_scale", "grad_norm", "samples_per_s", "model_flops_per_s", "memory_mib", "eval_loss"}
    assert set(run["series"]) == names
    (session,) = run["sessions"]
    assert (session["status"], session["to_step"], session["world_size"]) == ("finished", 24, 1)
    assert (session["config"]["NUM_EPOCHS"], session["config"]["THING"][:14]) == (2, "<object object")
    assert (session["settings"]["fp16"]["hysteresis"], session["settings"]["seed"]) == (1, 1024)
    (plan,) = run["plans"]
    assert plan["rows"] == dict(engine.plan.rows)
    assert plan["values"]["batch"] == {"per_rank": 4, "data_ranks": 1, "accumulated": 1, "per_update": 4}
    assert run["precision"]["report"]["compute_dtype"] == "float16"


def test_a_loop_of_ones_own(tmp_path):
    engine = make(**FP16, gradient_accumulation=2)
    with halfmesh.RunFolder(engine, tmp_path) as run:
        logging.getLogger("halfmesh").warning("[rank 0] too warm")
        for number, (x, y) in enumerate(engine.dataloader):
            if number in (2, 11):
                x.fill_(math.inf)
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            result = engine.step()
            assert run.note(run.note(result)) is result  # twice does no harm
            if result is not None and engine.global_step == 4:
                run.record(loss=loss, accuracy=0.5)
                with pytest.raises(ValueError, match="text"):
                    run.record(note="text")
    assert not any(isinstance(handler, Listener) for handler in logging.getLogger("halfmesh").handlers)
    first, last = lines_of(tmp_path)
    expected = {"step": 4, "accuracy": 0.5, "lr": 0.1, "loss_scale": 512.0, "skipped_steps": 1, "skipped": [2]}
    assert {key: first[key] for key in expected} == expected
    assert (first["warnings"], last) == ([[0, "too warm"]], {"step": 6, "skipped": [6]})  # the last written at the end


def test_a_run_that_goes_on(tmp_path):
    """Its checkpoint lies between two records; what was skipped before it stays, what is trained again comes once."""
    folder, saved = tmp_path / "run", tmp_path / "saved"
    hooks = [Acts(2, 6, 8, save=(7, saved), fail=9), RunHook(folder)]
    with pytest.raises(KeyError):
        halfmesh.Trainer(make(**FP16), log_every=5).fit(epochs=1, hooks=hooks)
    assert "failed: KeyError" in page_of(folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "lo')
    again = make(**FP16, clip_grad_norm=1.0)
    again.load(saved)
    loader, stop = again.dataloader.loader.given, {"type": "early_stop", "patience": 1, "min_delta": 1e9}
    hooks = [Acts(11), RunHook(folder), stop]
    halfmesh.Trainer(again, log_every=5).fit(epochs=5, hooks=hooks, eval_dataloader=loader)
    run = data_of(folder)
    assert (run["skipped"], run["skipped_steps"], run["notes"]) == ([2, 6, 11], 3, [])
    assert [line["step"] for line in lines_of(folder) if "loss" in line] == [5, 10, 12, 15, 20, 24]
    sessions = [(s["from_step"], s["status"], s["to_step"]) for s in run["sessions"]]
    assert sessions == [(0, "failed", 9), (7, "finished", 24)]
    assert "from update 7: clip_grad_norm.max_norm 0.0 -&gt; 1.0" in page_of(folder)
    said = status(read_run(folder))
    assert re.fullmatch(r"✓ finished, stopped early: eval_loss did not improve on \S+ in 1 evaluations", said)


def test_another_run_is_never_overwritten(tmp_path):
    for number in range(3):
        with halfmesh.RunFolder(make(SEED_OF_MINE=number), tmp_path) as run:
            run.record(loss=float(number))
    for number, folder in enumerate([tmp_path / "earlier-1", tmp_path / "earlier-2", tmp_path]):
        assert json.loads((folder / "config.json").read_text())["sessions"][0]["config"]["SEED_OF_MINE"] == number
        assert [line["loss"] for line in lines_of(folder)] == [number]


def of_two_ranks(rank, world_size, folder):
    """Rank 0's part of the data alone has the overflow."""
    skipped, layouts = [], {"fsdp": {"data": "fsdp"}, "pp": {"pipeline": {"size": 2, "microbatches": 2}}}
    for name, parallel in layouts.items():
        engine = make(52, layers=4, **FP16, parallel=parallel)
        words = r"(?s)cannot be the folder of a run; give .* rank 0 .*: NotADirectoryError"
        with pytest.raises(InputError, match=words):
            halfmesh.RunFolder(engine, Path(folder) / "file" / "run")  # rank 0 alone has tried
        hooks = [Acts(2, 5), "memory", RunHook(Path(folder) / name)]
        halfmesh.Trainer(engine, log_every=3).fit(max_steps=6, hooks=hooks)
        skipped.append(engine.skipped_steps)
    return skipped


@pytest.mark.distributed
@pytest.mark.sends
def test_two_ranks_write_one_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert run_ranks(of_two_ranks, 2, str(tmp_path)) == [[2, 2], [2, 2]]
    for name in ("fsdp", "pp"):
        run = data_of(tmp_path / name)
        assert (run["notes"], run["skipped"]) == ([], [2, 5])
        assert run["sessions"][0]["world_size"] == 2
        assert ("fsdp 2/2" in page_of(tmp_path / name)) == (name == "fsdp")
    first, second = (rank["holds"] for rank in run["plans"][0]["values"]["ranks"])
    assert [bool(first), bool(second), {*first} & {*second}] == [True, True, set()], "each block on one stage"
