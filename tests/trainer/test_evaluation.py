"""Losses, metrics and outputs of an evaluation are those of one process, whatever ranks have: a sample counts once."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix
from torchmetrics.wrappers import ClasswiseWrapper, Running

import halfmesh
from halfmesh.hooks import MetricHook
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.models import CLASSES, make_data, make_engine, make_loader, said
from tests.support.ranks import run_ranks

cross_entropy = nn.functional.cross_entropy
PIPE = LAYOUTS["pp2"][1]["pipeline"]
CELLS = [*(LAYOUTS[name][1] for name in ("dp2", "tp2", "pp2")), {"pipeline": {**PIPE, "eval_outputs": "all"}}]
CELLS += [LAYOUTS["fsdp"][1]]


def engine_of(parallel):
    """BatchNorm's statistics would be those of microbatches."""
    options = {"loader": make_loader(24, 4), "optimizer": lambda params: torch.optim.SGD(params, lr=0.05)}
    return make_engine({"parallel": parallel}, model=Net(0.0, 0, norm=nn.LayerNorm), **options)


def metrics():
    one, two = MulticlassAccuracy(CLASSES), MulticlassAccuracy(CLASSES, average="micro")
    return {
        "accuracy": MulticlassAccuracy(CLASSES, average="micro"),
        "confusion": MulticlassConfusionMatrix(CLASSES),
        "auroc": MulticlassAUROC(CLASSES, thresholds=None),  # keeps all outputs: its state is a list
        "of": ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
        "formula": one * two / (one + two + 1),
    }


def evaluated(rank, world_size, cells, samples):
    """Metrics and outputs of so many samples in batches of 4: uneven everywhere. Then of batches that a sampler gives,
    and of items that are batches."""
    results = []
    data = TensorDataset(*make_data(samples))
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    loaders = [DataLoader(data, 4), DataLoader(data, batch_sampler=batches), DataLoader(data, None, sampler=batches)]
    for parallel in cells:
        with engine_of(parallel) as engine:
            trainer = halfmesh.Trainer(engine)
            for loader in loaders:
                results.append((trainer.evaluate(loader, hooks=[MetricHook(metrics())]), trainer.predict(loader)))
            if world_size > 1 and samples > 1:
                window = MetricHook({"window": Running(MulticlassAccuracy(CLASSES))})
                assert "metric 'window': a Running cannot be" in said(trainer.evaluate, loaders[0], [window])
    return results


@pytest.mark.promise(
    "evaluation in the same precision", "each sample once, in every layout", of="PyTorch", page="trainer.md"
)
@pytest.mark.distributed
@pytest.mark.sends
@pytest.mark.parametrize("samples", [21, 1])
def test_metrics_and_predictions_of_every_layout_are_those_of_one_process(samples):
    """Of one sample the second data rank has nothing at all, which fsdp rejects."""
    model, (x, y) = Net(0.0, 0, norm=nn.LayerNorm).eval(), make_data(samples)
    outputs = model(x)
    (expected, _), *others = evaluated(0, 1, [{}], samples)
    assert set(expected) >= {"eval_accuracy", "eval_confusion_0_0", "eval_auroc", "eval_loss", "eval_formula"}
    assert expected["eval_loss"] == pytest.approx(cross_entropy(outputs, y).item(), rel=1e-5)
    everyone = run_ranks(evaluated, 2, CELLS[: None if samples > 1 else -1], samples, timeout=120)
    for results in (others, *everyone):
        for result, found in results:
            assert {**result, "eval_loss": 0, "eval_auroc": 0} == {**expected, "eval_loss": 0, "eval_auroc": 0}
            assert result["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
            assert result["eval_auroc"] == pytest.approx(expected["eval_auroc"], rel=1e-5)
            torch.testing.assert_close(found, outputs, rtol=1e-5, atol=1e-5)
    first, second = ([result["eval_loss"] for result, _ in results] for results in everyone)
    assert first == second


def trained(rank, world_size, parallel):
    seen, keep = [], halfmesh.Hook()
    keep.write = lambda trainer, record: seen.append(record["accuracy"])
    hook = MetricHook({"accuracy": MulticlassAccuracy(CLASSES, average="micro")}, on="train")
    halfmesh.Trainer(engine_of(parallel), log_every=2).fit(epochs=1, eval_interval=0, hooks=[hook, keep])
    return seen


@pytest.mark.distributed
@pytest.mark.sends
def test_metrics_of_training():
    engine, hits = engine_of({}), []
    for x, y in engine.dataloader:
        output = engine(x)
        hits.append((output.argmax(1) == y).float().mean().item())
        engine.backward(engine.criterion(output, y))
        engine.step()
    expected = [(one + other) / 2 for one, other in zip(hits[::2], hits[1::2], strict=True)]
    assert run_ranks(trained, 2, {"pipeline": {**PIPE, "keep_outputs": True}}) == [pytest.approx(expected)] * 2


SEQUENCES = [torch.arange(length) + length for length in (3, 3, 2, 5, 4)]


class Tagger(nn.Module):
    """Scores of each token, and a state of each sequence."""

    def __init__(self, extra=None):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.extra, self.calls = nn.Embedding(16, 8), nn.Linear(8, 5), extra, 0

    def forward(self, x):
        self.calls += 1
        scores = self.head(self.embedding(x))
        extra = f"call {self.calls}: {x.sum()}" if self.extra == "new" else self.extra
        return {"scores": scores, "state": (scores[:, 0],)} | ({} if extra is None else {"extra": extra})


def predicted(rank, world_size, extra=None, rejected=False):
    """The outputs for sequences, padded to the longest of a batch; or what they are rejected with."""
    loader = DataLoader(SEQUENCES, 2, collate_fn=partial(nn.utils.rnn.pad_sequence, batch_first=True))
    with make_engine(model=Tagger(extra), criterion=None) as engine:
        predict = halfmesh.Trainer(engine).predict
        return said(predict, loader) if rejected else predict(loader)


@pytest.mark.distributed
def test_predictions_of_other_lengths_are_a_list():
    """Of batches, or of samples."""
    model, alone = Tagger(), predicted(0, 1)
    assert [tuple(output["scores"].shape[:2]) for output in alone] == [(2, 3), (2, 5), (1, 4)]
    everyone = run_ranks(predicted, 2)
    assert [[len(output["scores"]) for output in outputs] for outputs in everyone] == [[1] * 5] * 2
    for outputs in (alone, *everyone):
        rows = [row for output in outputs for row in zip(output["scores"], output["state"][0], strict=True)]
        for x, (scores, state) in zip(SEQUENCES, rows, strict=True):
            expected = model(x[None])
            torch.testing.assert_close(scores[: len(x)], expected["scores"][0])
            torch.testing.assert_close(state, expected["state"][0][0])


@pytest.mark.distributed
def test_outputs_without_a_row_for_each_sample():
    """Lists of batches in one process; rejected on data ranks, which split batches."""
    for extra in (torch.tensor(1.0), torch.ones(7, 5)):
        assert [output["extra"].shape for output in predicted(0, 1, extra)] == [extra.shape] * 3
        for words in run_ranks(predicted, 2, extra, True):
            assert "predict joins outputs along the first dim, which must be the batch" in words
    assert [output["extra"][:6] for output in predicted(0, 1, "new")] == ["call 1", "call 2", "call 3"]
