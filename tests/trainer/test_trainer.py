"""Trainer: the loop that a user would write, and nothing else."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import halfmesh
from tests.support.checkpoint_runs import differing, weights
from tests.support.checkpoint_runs import make_engine as engine_in_layout
from tests.support.models import FEATURES, linear_engine, make_data, make_engine, summed_loss, train
from tests.support.ranks import run_ranks

cross_entropy = nn.functional.cross_entropy


class Events(halfmesh.Hook):
    """Notes what is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.records: list[dict[str, float]] = []

    def eval_results(self, trainer):
        return {"eval_answer": 42.0}

    def measure(self, trainer):
        return {"answer": 42.0}

    def write(self, trainer, record):
        self.records.append(record)

    def updates(self, event):
        return [int(seen.split()[1]) for seen in self.seen if seen.startswith(event)]

    @property
    def losses(self):
        return [record["loss"] for record in self.records if "loss" in record]


def _note(event, what):
    def note(self, trainer, *given):
        self.seen.append(f"{event} {what(trainer, *given)}".strip())

    setattr(Events, event, note)


for _event in ("before_fit", "after_fit", "close", "before_save"):
    _note(_event, lambda trainer: "")
for _event in ("before_epoch", "after_epoch"):
    _note(_event, lambda trainer: trainer.epoch)
for _event in ("after_batch", "after_eval_batch"):
    _note(_event, lambda trainer, outcome: outcome.rows)
_note("before_batch", lambda trainer, batch: len(batch[0]) if trainer.engine.training else "in evaluation")
_note("after_step", lambda trainer, result: trainer.engine.global_step if result is trainer.result else "other result")
_note("before_eval", lambda trainer: "in training" if trainer.engine.training else trainer.engine.global_step)
_note("after_eval", lambda trainer, results: sorted(results))
_note("after_save", lambda trainer, path: path.name)


def fit(engine, log_every=50, hooks=(), **options):
    """Returns the events."""
    events = Events()
    halfmesh.Trainer(engine, log_every=log_every).fit(hooks=[*hooks, events], **options)
    return events


def compare_with_a_loop_by_hand(rank, world_size, cells):
    for layout, mode in cells:
        found = []
        for by_hand in (True, False):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            with engine_in_layout(layout, mode, dropout=0.1, gradient_accumulation=2, samples=40) as engine:
                train(engine, epochs=2) if by_hand else halfmesh.Trainer(engine).fit(epochs=2)
            found.append(weights(engine))
        assert differing(*found) == []


@pytest.mark.promise("the Trainer with hooks", "bitwise equal to the loop by hand", of="Colossal-AI", page="trainer.md")
@pytest.mark.distributed
@pytest.mark.sends
def test_fit_is_the_loop_by_hand_bit_by_bit():
    compare_with_a_loop_by_hand(0, 1, [("one", "none")])
    cells = [("dp2", "naive"), ("tp2", "torch"), ("pp2", "naive"), ("fsdp", "none")]
    run_ranks(compare_with_a_loop_by_hand, 2, cells)


@pytest.mark.promise("the Trainer with hooks")
def test_hooks_hear_what_happens_in_order(tmp_path):
    class Saves(halfmesh.Hook):
        def after_epoch(self, trainer):
            trainer.save(tmp_path)

    events, engine = Events(), linear_engine({"gradient_accumulation": 2})
    halfmesh.Trainer(engine, log_every=1).fit(epochs=1, hooks=[events, Saves()])
    assert events.seen == [
        "before_fit",
        "before_epoch 0",
        *("before_batch 4", "after_batch 4"),
        *("before_batch 4", "after_batch 4", "after_step 1"),
        *("before_batch 4", "after_batch 4", "after_step 2"),
        "after_epoch 0",
        *("before_save", "after_save step-00000002"),
        *("before_eval 2", "after_eval_batch 4", "after_eval_batch 2"),
        "after_eval ['eval_answer', 'eval_loss']",
        *("after_fit", "close"),
    ]
    steps = [(record["step"], record.get("answer"), "eval_loss" in record) for record in events.records]
    assert steps == [(1, 42.0, False), (2, 42.0, False), (2, None, True)]


@pytest.mark.promise(
    "monitoring the loss scale, inf and nan", "warnings, logs and a diagnosis", of="PyTorch", page="health.md"
)
@pytest.mark.parametrize(
    ("scale", "warned"),
    [(2.0**-2, ["the loss scale is 0.25, below 1"]), (2.0**25, ["is 3.35544e+07, above 2**24"]), (2.0**10, [])],
)
def test_a_warning_of_a_scale_that_is_low_or_high(scale, warned, caplog):
    """Once, not with each record."""
    engine = linear_engine({"fp16": {"mode": "naive", "loss_scale": scale}})
    halfmesh.Trainer(engine, log_every=1).fit(epochs=2)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [line for line in said if "loss scale is" in line]
    assert [words in line for words, line in zip(warned, said, strict=True)] == [True] * len(warned)


def test_the_loss_is_the_mean_since_the_last_record():
    x, y = make_data(16)
    engine = linear_engine(samples=16, lr=0.0)
    expected = [cross_entropy(engine.model(a), b).item() for a, b in zip(x.split(8), y.split(8), strict=True)]
    assert fit(engine, epochs=1, log_every=2).losses == pytest.approx(expected)
    engine = linear_engine({"loss_reduction": "weighted"}, samples=6, lr=0.0, criterion=summed_loss)
    x, y = make_data(6)
    expected = cross_entropy(engine.model(x), y).item()
    assert fit(engine, epochs=1, log_every=2).losses == [pytest.approx(expected)]
    engine = linear_engine({"loss_reduction": "sum"}, criterion=nn.CrossEntropyLoss(reduction="sum"))
    assert halfmesh.Trainer(engine).evaluate() == {"eval_loss": pytest.approx(expected)}


@pytest.mark.parametrize("fails", ["after_step", "close"])
def test_all_hooks_are_closed_after_an_error(fails):
    def fail(*_):
        raise KeyError("mine")

    events, later, trainer = Events(), Events(), halfmesh.Trainer(linear_engine(lr=0.0))
    failing = type("Fails", (halfmesh.Hook,), {fails: fail})()
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(epochs=1, hooks=[failing, events, failing])
    assert events.seen[-1] == "close"
    assert ("after_fit" in events.seen) == (fails == "close")
    x, y = make_data(4)
    trainer.fit([(x, y)], epochs=2, eval_interval=0, hooks=[later])  # without what the error has left
    assert later.losses[-1] == pytest.approx(cross_entropy(trainer.engine.model(x), y).item())


def test_max_steps_counts_updates_of_the_whole_run_and_a_hook_stops_it_after_the_accumulation_cycle(tmp_path):
    engine = linear_engine({"gradient_accumulation": 2})
    for epochs, steps, expected in [(None, 3, 3), (None, 5, 5), (1, 5, 5)]:  # the last time nothing is left
        halfmesh.Trainer(engine).fit(epochs=epochs, max_steps=steps)
        assert engine.global_step == expected

    class Stops(halfmesh.Hook):
        def after_batch(self, trainer, *_):
            trainer.stop("enough")

    class StopsBefore(Stops):
        before_epoch = Stops.after_batch

    assert fit(engine, train=[make_data(4)], epochs=1, hooks=[StopsBefore()]).updates("after_step") == []
    engine = linear_engine({"gradient_accumulation": 3})
    events = fit(engine, epochs=5, eval_interval=5, hooks=[Stops()])
    assert (events.updates("after_step"), events.updates("before_eval")) == ([1], [1]), "the last weights are evaluated"
    engine.save(tmp_path)


@pytest.mark.parametrize(("interval", "expected"), [(0, [2, 4, 6, 8, 9]), (1, [2, 3, 4, 6, 8, 9])])
def test_evaluation_within_epochs(interval, expected):
    """Of three updates each; once after an update at most. Training goes on as without it."""
    engine, other = linear_engine(), linear_engine()
    assert fit(engine, epochs=3, eval_interval=interval, eval_steps=2).updates("before_eval") == expected
    assert fit(other, epochs=3, eval_interval=0).updates("before_eval") == []
    assert torch.equal(engine.model.weight, other.model.weight)


def test_batches_of_ones_own():
    """A short last cycle is stepped; no batch is fetched ahead, which may be in the same memory."""
    x, y = make_data(20)
    batches, held = list(zip(x.split(4), y.split(4), strict=True)), [torch.empty_like(x[:4]), torch.empty_like(y[:4])]

    class InOneBuffer:
        def __iter__(self):
            for batch in batches:
                held[0].copy_(batch[0]), held[1].copy_(batch[1])
                yield held

    ours, theirs = (linear_engine({"gradient_accumulation": 2}) for _ in range(2))
    halfmesh.Trainer(ours).fit(InOneBuffer(), epochs=1)
    halfmesh.Trainer(theirs).fit(batches, epochs=1)
    assert ours.global_step == theirs.global_step == 3
    assert torch.equal(ours.model.weight, theirs.model.weight)


class OwnLoss(nn.Linear):
    """As models of Hugging Face do it."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {"logits": logits} | ({} if labels is None else {"loss": cross_entropy(logits, labels)})


def test_batches_that_are_dicts_with_a_loss_of_the_models_own():
    rows = [{"x": x, "labels": y} for x, y in zip(*make_data(12), strict=True)]
    engine = make_engine(model=OwnLoss(FEATURES, 4), criterion=None, loader=DataLoader(rows, 4))
    trainer = halfmesh.Trainer(engine)
    trainer.fit(epochs=1)
    assert engine.global_step == 3
    assert trainer.evaluate(DataLoader(rows, 4))["eval_loss"] > 0
    assert trainer.predict(DataLoader(rows, 4))["logits"].shape == (12, 4)


@pytest.mark.parametrize("kind", [lambda x: (x, None), lambda x: {"input": x, "labels": None}], ids=["pair", "dict"])
def test_a_target_of_none_is_the_criterions(kind):
    seen = []

    def criterion(output, target):
        seen.append(target)
        return output.square().mean()

    engine = make_engine(model=nn.Linear(FEATURES, 4), criterion=criterion)
    halfmesh.Trainer(engine).fit([kind(make_data(4)[0])], epochs=1)
    assert seen == [None]
