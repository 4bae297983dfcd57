"""A run that was interrupted ends as one that was not: weights, schedulers, hooks, records."""

import pytest
import torch
from torch.optim import lr_scheduler

import halfmesh
from halfmesh.hooks import EarlyStopHook, LRSchedulerHook
from tests.support.models import linear_engine, make_loader

SCORES = {3: 5.0, 6: 4.0, 9: 4.5, 12: 3.0, 15: 3.5, 18: 3.2, 21: 3.1, 24: 1.0}
"""By update. With a patience of 3 training ends after 21."""


class Killed(BaseException):
    """The process ends."""


class Scores(halfmesh.Hook):
    """Gives evaluation its results, and ends the process at `dies`: ("after_step", 4)."""

    def __init__(self, *dies) -> None:
        self.dies = dies
        self.losses: dict[int, float] = {}

    def _maybe_die(self, event, trainer):
        if self.dies == (event, trainer.engine.global_step):
            raise Killed

    def after_step(self, trainer, result):
        self._maybe_die("after_step", trainer)

    def eval_results(self, trainer):
        self._maybe_die("eval_results", trainer)
        return {"eval_score": SCORES.get(trainer.engine.global_step, 9.0)}

    def after_eval(self, trainer, results):
        torch.rand(3)
        self._maybe_die("after_eval", trainer)

    def write(self, trainer, record):
        if "loss" in record:
            self.losses[record["step"]] = record["loss"]


def make(folder=None, every=1):
    saves = {"checkpoint": {"directory": str(folder), "every": every, "in_background": False}} if folder else {}
    return linear_engine(
        {"lr_interval": "manual", **saves},
        evaluated=0,
        lr_scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
        eval_dataloader=make_loader(2, 2),
    )


def fit(engine, scores, patience=3, **options):
    stop = EarlyStopHook("eval_score", patience=patience)
    hooks = [scores, LRSchedulerHook("eval_score"), stop]
    halfmesh.Trainer(engine, log_every=2).fit(epochs=8, hooks=hooks, **options)
    return stop


@pytest.mark.parametrize(
    ("event", "step", "every"),
    [("after_step", 2, 1), ("after_step", 11, 3), ("eval_results", 9, 1), ("after_eval", 21, 1)],
)
def test_it_ends_where_it_would_have(tmp_path, event, step, every):
    engine, scores, again, goes_on = make(), Scores(), make(), Scores()
    fit(engine, scores)
    with pytest.raises(Killed):
        fit(make(tmp_path, every), Scores(event, step))
    again.load(tmp_path)
    fit(again, goes_on)
    assert again.global_step == engine.global_step == 21
    assert again.optimizer.param_groups[0]["lr"] == engine.optimizer.param_groups[0]["lr"] < 0.1
    assert torch.equal(again.model.weight, engine.model.weight)
    after_the_first = sorted(goes_on.losses.items())[1:]  # which has the batches since the checkpoint
    assert set(after_the_first) <= set(scores.losses.items())


def test_an_evaluation_at_the_end_of_an_epoch_is_made_once(tmp_path):
    """By `eval_steps`, then saved by the key `checkpoint`, killed, and at the end of the epoch by `eval_interval`."""

    def evaluations(engine, scores):
        fit(engine, scores, patience=9, eval_steps=3)
        return engine.lr_scheduler.state_dict()["last_epoch"]

    assert evaluations(make(), Scores()) == 8
    again = make()
    with pytest.raises(Killed):
        evaluations(make(tmp_path), Scores("after_step", 4))
    again.load(tmp_path)
    assert again.global_step == 3
    assert evaluations(again, Scores()) == 8


def test_what_was_stopped_stays_so_and_another_run_begins_anew(tmp_path):
    engine, again, more = make(), make(), make()
    fit(engine, Scores())
    engine.save(tmp_path)
    again.load(tmp_path)
    stop = fit(again, Scores())
    assert (again.global_step, stop.state_dict()["waited"]) == (21, 3)
    more.load(tmp_path)
    assert fit(more, Scores(), patience=4).state_dict()["best"] == 1.0
    assert more.global_step == 24
    for _ in range(2):
        engine = make()
        for epochs in range(1, 9):
            halfmesh.Trainer(engine).fit(epochs=epochs, hooks=[Scores(), stop])
        assert engine.global_step == 21
