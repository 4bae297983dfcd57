"""Outputs and losses of an evaluation are those of one process, whatever ranks have."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import Net
from tests.support.checkpoint_runs import make_engine as engine_in_layout
from tests.support.models import make_data, make_engine
from tests.support.ranks import run_ranks

cross_entropy = nn.functional.cross_entropy


def evaluated(rank, world_size, layouts):
    """The loss, and outputs, of 13 samples in batches of 4: uneven everywhere. Then of batches that a sampler gives,
    and of items that are batches."""
    results = []
    data = TensorDataset(*make_data(13))
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    loaders = [DataLoader(data, 4), DataLoader(data, batch_sampler=batches), DataLoader(data, None, sampler=batches)]
    for layout in layouts:
        with engine_in_layout(layout, "none") as engine:
            trainer = halfmesh.Trainer(engine)
            results += [(trainer.evaluate(loader)["eval_loss"], trainer.predict(loader)) for loader in loaders]
    return results


@pytest.mark.distributed
@pytest.mark.sends
def test_loss_and_predictions_are_those_of_one_process():
    model, (x, y) = Net(0.0, 0).eval(), make_data(13)
    expected = model(x)
    everyone = run_ranks(evaluated, 2, ["dp2", "tp2", "pp2", "fsdp"])
    for results in [evaluated(0, 1, ["one"]), *everyone]:
        for loss, outputs in results:
            assert loss == pytest.approx(cross_entropy(expected, y).item(), rel=1e-5)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert [[loss for loss, _ in results] for results in everyone] == [[loss for loss, _ in everyone[0]]] * 2


LENGTHS = 3, 3, 2, 5, 4
SEQUENCES = [torch.arange(length) + length for length in LENGTHS]


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
    """The outputs for sequences, padded to the longest of a batch."""
    model = Tagger(extra)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    with make_engine(model=model, criterion=None) as engine:
        trainer = halfmesh.Trainer(engine)
        if not rejected:
            return trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        with pytest.raises(InputError, match=r"predict joins outputs along the first dim, which must be the batch"):
            trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        return True


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_of_other_lengths_are_a_list(ranks):
    """Of batches, or of samples."""
    model = Tagger()
    for outputs in run_ranks(predicted, 2) if ranks == 2 else [predicted(0, 1)]:
        assert [len(output["scores"]) for output in outputs] == ([2, 2, 1] if ranks == 1 else [1] * 5)
        if ranks == 1:
            assert [output["scores"].shape[1] for output in outputs] == [3, 5, 4]
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
        assert run_ranks(predicted, 2, extra, True) == [True, True]
    assert [output["extra"][:6] for output in predicted(0, 1, "new")] == ["call 1", "call 2", "call 3"]
