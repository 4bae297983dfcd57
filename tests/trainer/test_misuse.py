"""What a Trainer and its hooks say to arguments that mean nothing, before anything runs."""

import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import halfmesh
from halfmesh.hooks import CheckpointHook, EarlyStopHook, LRSchedulerHook, MemorySnapshotHook, MetricHook, ProfileHook
from tests.support.models import linear_engine, make_data, make_engine


def fit(config=None, engine_options=(), **arguments):
    halfmesh.Trainer(linear_engine(config, **dict(engine_options))).fit(**{"epochs": 1, **arguments})


def fit_without_evaluation(hook, evaluated):
    options = {"evaluated": evaluated, "lr_scheduler": ReduceLROnPlateau}
    fit({"lr_interval": "manual"}, options, eval_interval=0, hooks=[hook])


def fit_with_metrics(times, on, name):
    mean = {"on": on, "arguments": lambda outcome: (outcome.target.float(),)}
    fit(hooks=[MetricHook({name: MeanMetric()}, **mean) for _ in range(times)])


NEEDS = "needs 'eval_loss' from an evaluation, but this fit has none"
NONE = TensorDataset(torch.ones(2))


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EarlyStopHook(patience=0), "patience=0: expected a whole number, 1 or more"),
        (lambda: EarlyStopHook(mode="less"), "mode='less': expected 'min'"),
        (lambda: MetricHook({}, on="test"), "on='test': expected 'eval' or 'train'"),
        (lambda: ProfileHook((1, 4)), r"steps=\(1, 4\): expected .*: 2 or later, after one to warm up"),
        (lambda: ProfileHook((4, 3)), r"steps=\(4, 3\)"),
        (lambda: MemorySnapshotHook((0, 3)), r"steps=\(0, 3\): expected .*: 1 or later"),
        (lambda: halfmesh.Trainer(linear_engine(), log_every=0), "log_every=0"),
        (lambda: halfmesh.Trainer(linear_engine(evaluated=0)).evaluate(), "no data to evaluate on"),
        (lambda: halfmesh.Trainer(linear_engine()).predict([1]), "list is not a DataLoader; wrap it"),
        (lambda: halfmesh.Trainer(make_engine(criterion=None)).fit(epochs=1), "no criterion was given to initialize"),
        *((lambda n=n: fit_without_evaluation(EarlyStopHook(), n), NEEDS) for n in (0, 6)),
        *((lambda n=n: fit_without_evaluation(CheckpointHook("x", "eval_loss"), n), NEEDS) for n in (0, 6)),
        *((lambda n=n: fit_without_evaluation(LRSchedulerHook(), n), NEEDS) for n in (0, 6)),
        (lambda: fit_with_metrics(1, "train", "loss"), "returned 'loss', which the record already has"),
        (lambda: fit_with_metrics(2, "eval", "mean"), "returned 'eval_mean', which the record already has"),
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
        ({"hooks": [EarlyStopHook]}, r"EarlyStopHook'> is not a hook: expected an object of a subclass of"),
        ({"hooks": [{"type": "run"}]}, "hook 'run' takes directory, precision_report: directory is missing"),
        ({"hooks": [{"type": "early_stop", "patienc": 3}]}, "'early_stop' takes .*: patienc=3 is not .*'patience'?"),
        ({"train": DataLoader(NONE)}, "a DataLoader that is not sharded"),
        ({"train": [(torch.ones(2, 8),)]}, r"a batch of 1 item has no target"),
        ({"epochs": 2, "train": iter([make_data(4)])}, "epoch 1 had no batch to train on"),
        ({"eval_dataloader": NONE}, "TensorDataset is not a DataLoader; wrap it"),
        ({"engine_options": {"evaluated": 0}, "eval_steps": 1}, "eval_steps needs data to evaluate on"),
        ({"hooks": [EarlyStopHook("eval_los")]}, "the results of evaluation are eval_loss; did you mean 'eval_loss'"),
        ({"hooks": ["lr_scheduler"]}, "needs an lr_scheduler and .* there is none"),
    ],
)
def test_arguments_of_fit(arguments, message):
    with pytest.raises((halfmesh.InputError, halfmesh.RegistryError), match=message):
        fit(**arguments)
