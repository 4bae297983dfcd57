"""Metrics are those of one process, whatever the layout: each sample counts once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.hooks import MetricHook
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import CLASSES, make_data, make_loader
from tests.support.ranks import rank_device, run_ranks

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix  # noqa: E402

PIPE = LAYOUTS["pp2"][1]["pipeline"]
ALL = {"pipeline": {**PIPE, "eval_outputs": "all"}}
CELLS = [LAYOUTS["dp2"][1], LAYOUTS["tp2"][1], LAYOUTS["pp2"][1], ALL, {"data": "fsdp"}]


def metrics():
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "auroc": MulticlassAUROC(CLASSES, thresholds=None),  # keeps all outputs: its state is a list
    }


def engine_of(parallel, evaluated=21):
    """The samples that are evaluated come in batches of 4 per rank: uneven over 2 data ranks."""
    return halfmesh.initialize(
        Net(0.0, 0, norm=nn.LayerNorm),  # BatchNorm's statistics would be those of microbatches
        lambda params: torch.optim.SGD(params, lr=0.05),
        nn.functional.cross_entropy,
        make_loader(24, 4),
        {"parallel": parallel},
        eval_dataloader=DataLoader(TensorDataset(*make_data(evaluated)), 4),
        device=rank_device(),
    )


def measured(rank, world_size, cells, evaluated):
    results = []
    for parallel in cells:
        with engine_of(parallel, evaluated) as engine:
            results.append(halfmesh.Trainer(engine).evaluate(hooks=[MetricHook(metrics())]))
    return results


@pytest.mark.promise(
    "evaluation in the same precision", "each sample once, in every layout", of="PyTorch", page="trainer.md"
)
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("evaluated", [21, 1])
def test_metrics_of_every_layout_are_those_of_one_process(evaluated):
    """Of one sample the second data rank has nothing at all, which fsdp rejects."""
    (expected,) = measured(0, 1, [{}], evaluated)
    assert set(expected) >= {"eval_accuracy", "eval_confusion_0_0", "eval_auroc", "eval_loss"}
    cells = [parallel for parallel in CELLS if evaluated > 1 or parallel.get("data") != "fsdp"]
    for results in run_ranks(measured, 2, cells, evaluated, timeout=120):
        for result in results:
            assert {**result, "eval_loss": 0, "eval_auroc": 0} == {**expected, "eval_loss": 0, "eval_auroc": 0}
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
            assert result["eval_auroc"] == pytest.approx(expected["eval_auroc"], rel=1e-5)


def trained(rank, world_size, parallel):
    seen = []

    class Keep(halfmesh.Hook):
        def write(self, trainer, record):
            seen.append(record["accuracy"])

    hook = MetricHook({"accuracy": MulticlassAccuracy(CLASSES, average="micro")}, on="train")
    halfmesh.Trainer(engine_of(parallel), log_every=2).fit(epochs=1, eval_interval=0, hooks=[hook, Keep()])
    return seen


@pytest.mark.distributed
@pytest.mark.sends
def test_metrics_of_training():
    engine, hits, expected = engine_of({}), [], []
    for step, (x, y) in enumerate(engine.dataloader):
        output = engine(x)
        hits.append((output.argmax(1) == y).float().mean().item())
        engine.backward(engine.criterion(output, y))
        engine.step()
        if step % 2 == 1:
            expected.append(sum(hits[-2:]) / 2)
    assert run_ranks(trained, 2, {"pipeline": {**PIPE, "keep_outputs": True}}) == [pytest.approx(expected)] * 2
