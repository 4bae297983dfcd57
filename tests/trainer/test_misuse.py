"""What a Trainer and its hooks say to arguments that mean nothing, before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

import halfmesh
from halfmesh.hooks import CheckpointHook, CSVHook, EarlyStopHook, JSONLHook, MetricHook, ThroughputHook
from tests.support.models import FEATURES, make_data
from tests.support.ranks import run_ranks


def make(scheduler=None, evaluated=True, **config):
    model = nn.Linear(FEATURES, 4)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(*make_data(8)), 4)
    return halfmesh.initialize(
        model,
        optimizer,
        nn.functional.cross_entropy,
        loader,
        config,
        eval_dataloader=loader if evaluated else None,
        lr_scheduler=None if scheduler is None else scheduler(optimizer),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: EarlyStopHook(patience=0), "patience=0: expected a whole number, 1 or more"),
        (lambda: EarlyStopHook(patience="3"), "patience='3': expected a whole number"),
        (lambda: EarlyStopHook(min_delta="0.1"), r"min_delta='0\.1': expected a number, 0 or more"),
        (lambda: EarlyStopHook(min_delta=-1.0), r"min_delta=-1\.0"),
        (lambda: CheckpointHook("x", every=1.5), r"every=1\.5: expected a whole number"),
        (lambda: CheckpointHook("x", keep=0), "keep=0: expected a whole number"),
        (lambda: ThroughputHook(tokens=128), "tokens=128: expected a function"),
        (lambda: halfmesh.Trainer(nn.Linear(1, 1)), "takes the engine that halfmesh.initialize returns, not a Linear"),
        (lambda: halfmesh.Trainer(make(), compute="mine"), "compute='mine': expected a function"),
        (lambda: halfmesh.Trainer(make(), log_every=1.5), r"log_every=1\.5: expected a whole number"),
        (lambda: halfmesh.Trainer(make()).fit(epochs=1, hooks=None), r"hooks=None: expected a list, hooks=\[\]"),
    ],
)
def test_arguments(build, message):
    with pytest.raises(halfmesh.InputError, match=message):
        build()


@pytest.mark.parametrize("way", ["fit", "evaluate"])
def test_a_compute_that_returns_something_else(way):
    trainer = halfmesh.Trainer(make(), compute=lambda engine, batch: engine.criterion(engine(batch[0]), batch[1]))
    with pytest.raises(halfmesh.InputError, match=r"compute returned a Tensor; it has to return halfmesh\.Outcome"):
        trainer.fit(epochs=1) if way == "fit" else trainer.evaluate()


@pytest.mark.parametrize("hook", [EarlyStopHook, lambda: CheckpointHook("x", monitor="eval_loss")])
@pytest.mark.parametrize("reason", ["no data", "no interval"])
def test_hooks_that_wait_for_an_evaluation_that_never_comes(hook, reason):
    engine = make(evaluated=reason == "no interval")
    with pytest.raises(halfmesh.InputError, match="waits for 'eval_loss' of an evaluation, and this fit has none"):
        halfmesh.Trainer(engine).fit(epochs=1, eval_interval=0 if reason == "no interval" else 1, hooks=[hook()])
    assert engine.global_step == 0


def test_schedulers_that_wait_for_an_evaluation():
    plateau = optim.lr_scheduler.ReduceLROnPlateau
    trainer = halfmesh.Trainer(make(plateau, lr_interval="manual"))
    with pytest.raises(halfmesh.InputError, match="LRSchedulerHook waits for 'eval_loss'"):
        trainer.fit(epochs=1, eval_interval=0, hooks=[{"type": "lr_scheduler", "interval": "eval"}])
    with pytest.raises(halfmesh.InputError, match=r"interval='epoch' does not give it; use LRSchedulerHook"):
        trainer.fit(epochs=1, hooks=["lr_scheduler"])


@pytest.mark.parametrize("hook", [CSVHook, JSONLHook])
def test_a_folder_in_the_place_of_a_file_stays(tmp_path, hook):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years")
    for path in (folder, folder / "thesis.txt" / "log"):
        with pytest.raises(halfmesh.InputError, match="cannot be the file of a run"):
            halfmesh.Trainer(make()).fit(epochs=1, hooks=[hook(path)])
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]
    assert (folder / "thesis.txt").read_text() == "years"


def refuse(rank, world_size, folder):
    torch.manual_seed(0)
    with pytest.raises(halfmesh.InputError, match="is a folder"):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=[JSONLHook(folder)])


def test_all_ranks_hear_of_it(tmp_path):
    run_ranks(refuse, 2, tmp_path)


@pytest.mark.parametrize("method", ["measure", "eval_results", "state_dict"])
def test_a_hook_that_forgets_to_return(tmp_path, method):
    forgetful = type("Forgetful", (halfmesh.Hook,), {method: lambda self, *args: None})
    with pytest.raises(halfmesh.InputError, match=rf"Forgetful\.{method} returned None; it has to return a dict"):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=[CheckpointHook(tmp_path), forgetful()])


@pytest.mark.parametrize("on", ["train", "eval"])
def test_a_metric_does_not_hide_the_loss(on):
    hooks = [MetricHook({"loss": MeanMetric()}, on=on, arguments=lambda outcome: (outcome.target.float(),))]
    with pytest.raises(
        halfmesh.InputError, match=r"MetricHook\.\w+ gives '(eval_)?loss', which the record has already"
    ):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=hooks)


def test_a_metric_that_is_there_twice():
    hooks = [MetricHook({"mean": MeanMetric()}, arguments=lambda outcome: (outcome.target.float(),)) for _ in range(2)]
    with pytest.raises(halfmesh.InputError, match="gives 'eval_mean', which the record has already"):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=hooks)
