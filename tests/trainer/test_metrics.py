"""Metrics are those of one process, whatever the layout: each sample counts once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.hooks import MetricHook
from tests.support.checkpoint_runs import FP16, LAYOUTS, Net
from tests.support.models import CLASSES, make_data
from tests.support.ranks import run_ranks

torchmetrics = pytest.importorskip("torchmetrics")

EVALUATED = 21
"""In batches of 4 per rank: uneven over 2 data ranks."""


def metrics():
    from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "auroc": MulticlassAUROC(CLASSES, thresholds=None),  # keeps all outputs: its state is a list
    }


def engine_of(layout, parallel=None, evaluated=EVALUATED):
    given = LAYOUTS[layout][1]
    return halfmesh.initialize(
        Net(0.0, 0, norm=nn.LayerNorm),  # BatchNorm's statistics would be those of microbatches
        lambda params: torch.optim.SGD(params, lr=0.05),
        nn.functional.cross_entropy,
        DataLoader(TensorDataset(*make_data(24)), 4),
        {**FP16["none"], "parallel": parallel or given},
        eval_dataloader=DataLoader(TensorDataset(*make_data(evaluated)), 4),
        device="cpu",
    )


def measured(rank, world_size, cells, evaluated=EVALUATED):
    results = []
    for layout, parallel in cells:
        engine = engine_of(layout, parallel, evaluated)
        results.append(halfmesh.Trainer(engine).evaluate(hooks=[MetricHook(metrics())]))
        engine.close()
    return results


PIPE = LAYOUTS["pp2"][1]["pipeline"]
CELLS = {
    2: [
        ("dp2", None),
        ("tp2", None),
        ("pp2", None),
        ("pp2", {"pipeline": {**PIPE, "eval_outputs": "last"}}),
        ("zero1", None),
    ],
    4: [("pp2_zero1", None), ("pp2_zero1", {"pipeline": {**PIPE, "eval_outputs": "last"}, "data": "zero1"})],
}


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "evaluated"), [(2, EVALUATED), (4, EVALUATED), (2, 1)])
def test_metrics_of_every_layout_are_those_of_one_process(ranks, evaluated):
    """Of one sample the second data rank has nothing at all."""
    (expected,) = measured(0, 1, [("one", None)], evaluated)
    assert set(expected) >= {"eval_accuracy", "eval_confusion_0_0", "eval_auroc", "eval_loss"}
    for results in run_ranks(measured, ranks, CELLS[ranks], evaluated, timeout=120):
        for result in results:
            assert {**result, "eval_loss": 0, "eval_auroc": 0} == {**expected, "eval_loss": 0, "eval_auroc": 0}
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
            assert result["eval_auroc"] == pytest.approx(expected["eval_auroc"], rel=1e-5)


def trained(rank, world_size, layout, parallel):
    seen = []

    class Keep(halfmesh.Hook):
        def write(self, trainer, record):
            seen.append(record)

    from torchmetrics.classification import MulticlassAccuracy

    hook = MetricHook({"accuracy": MulticlassAccuracy(CLASSES, average="micro")}, on="train")
    halfmesh.Trainer(engine_of(layout, parallel), log_every=2).fit(epochs=1, eval_interval=0, hooks=[hook, Keep()])
    return [record["accuracy"] for record in seen]


@pytest.mark.distributed
def test_metrics_of_training():
    engine, hits, expected = engine_of("one"), [], []
    for step, (x, y) in enumerate(engine.dataloader):
        output = engine(x)
        hits.append((output.argmax(1) == y).float().mean().item())
        engine.backward(engine.criterion(output, y))
        engine.step()
        if step % 2 == 1:
            expected.append(sum(hits[-2:]) / 2)
    assert trained(0, 1, "one", None) == pytest.approx(expected)
    kept = {"pipeline": {**PIPE, "keep_outputs": True}}
    assert run_ranks(trained, 2, "pp2", kept) == [pytest.approx(expected)] * 2


def test_a_collection():
    from torchmetrics import MetricCollection
    from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

    both = MetricCollection({"a": MulticlassAccuracy(CLASSES), "f1": MulticlassF1Score(CLASSES)})
    result = halfmesh.Trainer(engine_of("one")).evaluate(hooks=[MetricHook(both)])
    assert {"eval_a", "eval_f1"} <= set(result)
