"""What a Trainer and its hooks say to arguments that mean nothing, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import optim
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import halfmesh
from halfmesh.hooks import CheckpointHook, EarlyStopHook, LRSchedulerHook, MetricHook
from tests.support.models import linear_engine, make_data

MANUAL = {"lr_interval": "manual"}
PLATEAU = optim.lr_scheduler.ReduceLROnPlateau


def fit(config=None, engine_options=(), **arguments):
    halfmesh.Trainer(linear_engine(config, **dict(engine_options))).fit(**{"epochs": 1, **arguments})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EarlyStopHook(patience=0), "patience=0: expected a whole number, 1 or more"),
        (lambda: EarlyStopHook(mode="less"), "mode='less': expected 'min'"),
        (lambda: MetricHook({}, on="test"), "on='test': expected 'eval' or 'train'"),
        (lambda: halfmesh.Trainer(linear_engine(), log_every=0), "log_every=0"),
        (lambda: halfmesh.Trainer(linear_engine(evaluated=0)).evaluate(), "no data to evaluate on"),
        (lambda: halfmesh.Trainer(linear_engine()).predict([1]), "list is not a DataLoader; wrap it"),
    ],
)
def test_arguments(build, message):
    with pytest.raises(halfmesh.InputError, match=message):
        build()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": None}, "fit needs an end: give it epochs=, max_steps=, or both"),
        ({"epochs": 0}, "epochs=0: expected a whole number, 1 or more"),
        ({"eval_interval": -1}, "eval_interval=-1: expected a whole number, 0 or more"),
        ({"hooks": ["progres"]}, "no hook named 'progres'; did you mean 'progress'"),
        (
            {"hooks": [EarlyStopHook]},
            r"EarlyStopHook'> is not a hook: expected an object of a subclass of",
        ),
        ({"hooks": [{"type": "run"}]}, "hook 'run' takes directory, precision_report: directory is missing"),
        ({"hooks": [{"type": "early_stop", "patienc": 3}]}, "'early_stop' takes .*: patienc=3 is not .*'patience'?"),
        ({"train": DataLoader(TensorDataset(torch.ones(2)))}, "a DataLoader that is not sharded"),
        ({"train": [(torch.ones(2, 8),)]}, r"a batch of 1 item has no target"),
        ({"epochs": 2, "train": iter([make_data(4)])}, "epoch 1 had no batch to train on"),
        ({"eval_dataloader": TensorDataset(torch.ones(2))}, "TensorDataset is not a DataLoader; wrap it"),
        ({"engine_options": {"evaluated": 0}, "eval_steps": 1}, "eval_steps needs data to evaluate on"),
        ({"hooks": [EarlyStopHook("eval_los")]}, "the results of evaluation are eval_loss; did you mean 'eval_loss'"),
        ({"hooks": ["lr_scheduler"]}, "needs an lr_scheduler and .* there is none"),
    ],
)
def test_arguments_of_fit(arguments, message):
    with pytest.raises((halfmesh.InputError, halfmesh.RegistryError), match=message):
        fit(**arguments)


@pytest.mark.parametrize("evaluated", [0, 6])
def test_hooks_that_wait_for_an_evaluation_that_never_comes(evaluated):
    for hook in (EarlyStopHook(), CheckpointHook("x", "eval_loss"), LRSchedulerHook()):
        with pytest.raises(halfmesh.InputError, match="needs 'eval_loss' from an evaluation, but this fit has none"):
            fit(MANUAL, {"evaluated": evaluated, "lr_scheduler": PLATEAU}, eval_interval=0, hooks=[hook])


@pytest.mark.parametrize(("on", "name", "times"), [("train", "loss", 1), ("eval", "mean", 2)])
def test_a_metric_does_not_hide_another_value(on, name, times):
    hooks = [
        MetricHook({name: MeanMetric()}, on=on, arguments=lambda outcome: (outcome.target.float(),))
        for _ in range(times)
    ]
    with pytest.raises(halfmesh.InputError, match=rf"returned '(eval_)?{name}', which the record already has"):
        fit(hooks=hooks)
