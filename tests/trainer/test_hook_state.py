"""Hooks of a run that was interrupted decide as those of one that was not."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
import halfmesh.hooks
from halfmesh.hooks import CheckpointHook, EarlyStopHook, JSONLHook, LRSchedulerHook
from tests.support.models import FEATURES, make_data

SCORES = {3: 5.0, 6: 4.0, 9: 4.5, 12: 3.0, 15: 3.5, 18: 3.2, 21: 3.1, 24: 1.0}
"""By update. With a patience of 3 training ends after 21."""


class Killed(BaseException):
    """The process ends."""


class Scores(halfmesh.Hook):
    """Gives evaluation its results, and ends the process at `dies`: ("after_step", 4)."""

    def __init__(self, dies=None) -> None:
        self.dies = dies
        self.losses: list[tuple[int, float]] = []

    def _maybe_die(self, event, trainer):
        if self.dies == (event, trainer.engine.global_step):
            raise Killed

    def after_step(self, trainer, result):
        self._maybe_die("after_step", trainer)

    def eval_results(self, trainer):
        self._maybe_die("eval_results", trainer)
        return {"eval_score": SCORES.get(trainer.engine.global_step, 9.0)}

    def after_eval(self, trainer, results):
        self._maybe_die("after_eval", trainer)

    def write(self, trainer, record):
        if "loss" in record:
            self.losses.append((record["step"], record["loss"]))


def make(**config):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return halfmesh.initialize(
        model,
        optimizer,
        nn.functional.cross_entropy,
        DataLoader(TensorDataset(*make_data(12)), 4),
        {"lr_interval": "manual", **config},
        eval_dataloader=DataLoader(TensorDataset(*make_data(2)), 2),
        lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
        device="cpu",
    )


def fit(engine, scores, *more):
    stop = EarlyStopHook("eval_score", patience=3)
    hooks = [scores, LRSchedulerHook("eval", "eval_score"), stop, *more]
    halfmesh.Trainer(engine, log_every=2).fit(epochs=8, hooks=hooks)
    return stop


def finished(engine, scores):
    return engine.global_step, engine.optimizer.param_groups[0]["lr"], engine.model.weight.tolist()


@pytest.fixture(scope="module")
def expected():
    engine, scores = make(), Scores()
    fit(engine, scores)
    assert engine.global_step == 21
    assert engine.optimizer.param_groups[0]["lr"] == 0.05
    return *finished(engine, scores), dict(scores.losses)


MOMENTS = [("after_step", step, who) for step, who in zip(range(2, 22, 2), ["hook", "key"] * 5, strict=True)]
MOMENTS += [(event, step, who) for event in ("eval_results", "after_eval") for step, who in ((9, "key"), (21, "hook"))]


@pytest.mark.parametrize(("event", "step", "who"), MOMENTS)
def test_it_stops_where_it_would_have(tmp_path, event, step, who, expected):
    """Whether CheckpointHook saves after every step, or the config's key `checkpoint` at its boundaries."""
    folder = tmp_path / "saved"
    key = {"checkpoint": {"directory": str(folder), "every": 1, "in_background": False}} if who == "key" else {}
    hooks = [CheckpointHook(folder, every=1, in_background=False)] if who == "hook" else []
    engine = make(**key)
    with pytest.raises(Killed):
        fit(engine, Scores((event, step)), *hooks)
    again, scores = make(), Scores()
    again.load(folder)
    fit(again, scores)
    assert finished(again, scores) == expected[:3]
    assert scores.losses  # the record in progress went on
    assert {step: loss for step, loss in scores.losses if expected[3].get(step) != loss} == {}


def test_an_evaluation_at_the_end_of_an_epoch_is_made_once(tmp_path):
    """By `eval_steps`, then saved by the key `checkpoint`, killed, and at the end of the epoch by `eval_interval`."""

    def train(engine, scores):
        hooks = [scores, LRSchedulerHook("eval", "eval_score")]
        halfmesh.Trainer(engine).fit(epochs=8, eval_steps=3, hooks=hooks)
        return engine.lr_scheduler.state_dict()["last_epoch"]

    assert train(make(), Scores()) == 8
    engine = make(checkpoint={"directory": str(tmp_path), "every": 1, "in_background": False})
    with pytest.raises(Killed):
        train(engine, Scores(("after_step", 4)))
    again = make()
    again.load(tmp_path)
    assert again.global_step == 3
    assert train(again, Scores()) == 8


def test_what_was_stopped_stays_so(tmp_path):
    engine = make()
    fit(engine, Scores(), CheckpointHook(tmp_path))
    again = make()
    again.load(tmp_path)
    stop = fit(again, Scores())
    assert again.global_step == 21
    assert stop.state_dict()["waited"] == 3  # the last evaluation was made again, and is counted once
    more = make()
    more.load(tmp_path)
    patient = EarlyStopHook("eval_score", patience=4)
    halfmesh.Trainer(more).fit(epochs=8, hooks=[Scores(), patient])
    assert more.global_step == 24
    assert patient.state_dict()["best"] == 1.0


def test_the_next_fit_goes_on_with_what_the_last_one_counted():
    engine = make()
    for epochs in range(1, 9):
        halfmesh.Trainer(engine).fit(epochs=epochs, hooks=[Scores(), EarlyStopHook("eval_score", patience=3)])
    assert engine.global_step == 21


def test_hooks_of_another_run():
    stop = EarlyStopHook("eval_score", patience=3)
    for _ in range(2):
        engine = make()
        halfmesh.Trainer(engine).fit(epochs=8, hooks=[Scores(), stop])
        assert engine.global_step == 21


def test_another_monitor_begins_anew(tmp_path):
    engine = make()
    fit(engine, Scores())
    stop = EarlyStopHook("eval_loss", patience=3)
    halfmesh.Trainer(engine).fit(epochs=8, hooks=[Scores(), stop])
    assert engine.global_step == 24
    assert stop.state_dict()["waited"] == 0


def test_after_an_error_nothing_is_kept():
    engine = make()
    with pytest.raises(Killed):
        fit(engine, Scores(("after_step", 20)))
    assert engine.state_dict()["attached"] == {}
    fit(engine, Scores())
    assert engine.global_step == 23  # the epoch after; a new hook, which knows of no evaluation before


def test_checkpoints_without_it(tmp_path):
    """Of a plain loop."""
    engine = make()
    for _ in range(4):
        for x, y in engine.dataloader:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    engine.save(tmp_path)
    again = make()
    again.load(tmp_path)
    fit(again, Scores())
    assert again.global_step == 24


def test_the_best_value_is_that_of_the_checkpoint(tmp_path):
    """It was killed after better weights were written than those that the checkpoint knows."""

    def hook(**options):
        return CheckpointHook(tmp_path, in_background=False, monitor="eval_score", **options)

    with pytest.raises(Killed):
        halfmesh.Trainer(make()).fit(epochs=8, hooks=[hook(), Scores(("after_eval", 6))])
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 6
    again, seen = make(), hook()
    assert again.load(tmp_path).name == "step-00000003"
    halfmesh.Trainer(again).fit(epochs=1, hooks=[seen, Scores()])
    assert seen.state_dict()["best"] == 5.0
    assert json.loads((tmp_path / "best.json").read_text())["step"] == 6  # 5.0 is no better than 5.0
    elsewhere = CheckpointHook(tmp_path / "other", monitor="eval_score")
    halfmesh.Trainer(again).fit(epochs=3, hooks=[Scores(), elsewhere])  # there is no best in that folder yet
    assert json.loads((tmp_path / "other" / "best.json").read_text()) == {"step": 6, "eval_score": 4.0}


def test_a_record_that_was_written_is_not_written_again(tmp_path):
    path, folder = tmp_path / "metrics.jsonl", tmp_path / "saved"
    key = {"checkpoint": {"directory": str(folder), "every": 1, "in_background": False}}
    engine = make(**key)
    with pytest.raises(Killed):  # saved after the last batch; the epoch's record was written since
        fit(engine, Scores(("eval_results", 3)), JSONLHook(path))
    again = make()
    again.load(folder)
    assert again.global_step == 3
    fit(again, Scores(), JSONLHook(path))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [record["step"] for record in records if "loss" in record]
    assert trained == sorted(set(trained))
    assert trained[:3] == [2, 3, 4]


def test_metrics_of_a_record_in_progress(tmp_path):
    """Saved and killed between two records."""
    classification = pytest.importorskip("torchmetrics.classification")
    found = []

    class Keep(halfmesh.Hook):
        def write(self, trainer, record):
            found.append((record["step"], record.get("accuracy"), record.get("auroc")))

    def train(engine, *more):
        auroc = classification.MulticlassAUROC(4, thresholds=None)  # its state is a list
        metrics = {"accuracy": classification.MulticlassAccuracy(4, average="micro"), "auroc": auroc}
        hooks = [halfmesh.hooks.MetricHook(metrics, on="train"), *more, Keep()]
        halfmesh.Trainer(engine, log_every=5).fit(max_steps=5, eval_interval=0, hooks=hooks)

    train(make_longer())
    engine = make_longer()
    with pytest.raises(Killed):
        train(engine, CheckpointHook(tmp_path, every=2, in_background=False), Scores(("after_step", 4)))
    again = make_longer()
    assert again.load(tmp_path).name == "step-00000002"
    train(again)
    assert [step for step, *_ in found] == [5, 5]
    assert found[0] == found[1]


def make_longer():
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*make_data(24)), 4)
    return halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, loader, {}, device="cpu")
