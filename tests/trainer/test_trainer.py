"""Trainer: the loop that a user would write, and nothing else."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import halfmesh
from halfmesh.errors import InputError
from tests.support.checkpoint_runs import LAYOUTS, Net
from tests.support.checkpoint_runs import make_engine as engine_in_layout
from tests.support.models import (
    CLASSES,
    FEATURES,
    linear_engine,
    make_data,
    make_engine,
    make_loader,
    summed_loss,
    train,
)
from tests.support.ranks import run_ranks

CELLS = [("one", "none"), ("dp2", "naive"), ("tp2", "torch"), ("pp2", "naive"), ("fsdp", "none"), ("pp2_zero1", "none")]
RANKS = [1, pytest.param(2, marks=pytest.mark.sends), pytest.param(4, marks=[pytest.mark.slow, pytest.mark.sends])]
cross_entropy = nn.functional.cross_entropy


class Events(halfmesh.Hook):
    """Notes what is called, and fails at one of these events if asked to."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.seen: list[str] = []
        self.records: list[dict[str, float]] = []

    def note(self, event, what):
        self.seen.append(f"{event} {what}".strip())
        if event == self.fails:
            raise KeyError("mine")

    def eval_results(self, trainer):
        return {} if self.fails else {"eval_answer": 42.0}

    def measure(self, trainer):
        return {} if self.fails else {"answer": 42.0}

    def write(self, trainer, record):
        self.records.append(record)

    def updates(self, event):
        return [int(seen.split()[1]) for seen in self.seen if seen.startswith(event)]

    @property
    def losses(self):
        return [record["loss"] for record in self.records if "loss" in record]


def _note(event, what):
    setattr(Events, event, lambda self, trainer, *given: self.note(event, what(trainer, *given)))


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


def fit(engine, *args, log_every=50, **options):
    """Returns the events."""
    events = Events()
    hooks = [*options.pop("hooks", []), events]
    halfmesh.Trainer(engine, log_every=log_every).fit(*args, hooks=hooks, **options)
    return events


def same_as_by_hand(rank, world_size, cells):
    same = []
    for layout, mode in cells:
        weights = []
        for by_hand in (True, False):
            for seed in (random.seed, np.random.seed, torch.manual_seed):
                seed(0)
            engine = engine_in_layout(layout, mode, dropout=0.1, gradient_accumulation=2, samples=40)
            train(engine, epochs=2) if by_hand else halfmesh.Trainer(engine).fit(epochs=2)
            engine.close()
            weights.append({name: value.clone() for name, value in engine.model.state_dict().items()})
        same.append(all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]))
    return same


@pytest.mark.promise(
    "the Trainer with hooks",
    "bitwise the same as the loop by hand",
    of="Colossal-AI",
    page="trainer.md",
)
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", RANKS)
def test_fit_is_the_loop_by_hand_bit_by_bit(ranks):
    cells = [(layout, mode) for layout, mode in CELLS if LAYOUTS[layout][0] == ranks]
    assert run_ranks(same_as_by_hand, ranks, cells, init=ranks > 1) == [[True] * len(cells)] * ranks


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
@pytest.mark.parametrize("ranks", RANKS)
def test_loss_and_predictions_are_those_of_one_process(ranks):
    model, (x, y) = Net(0.0, 0).eval(), make_data(13)
    expected = model(x)
    layouts = [layout for layout, _ in CELLS if LAYOUTS[layout][0] == ranks]
    everyone = run_ranks(evaluated, ranks, layouts, init=ranks > 1)
    for results in everyone:
        for loss, outputs in results:
            assert loss == pytest.approx(cross_entropy(expected, y).item(), rel=1e-5)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
        assert [loss for loss, _ in results] == [loss for loss, _ in everyone[0]]


class Reader(nn.Module):
    """Scores of packed sequences."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, packed):
        return self.head(self.rnn(packed)[1][-1])


def pack(samples):
    return nn.utils.rnn.pack_sequence([x for x, _ in samples], enforce_sorted=False), torch.tensor(
        [y for _, y in samples]
    )


def read(rank, world_size, parallel):
    rows = make_data(13)[0]
    samples = [(row.repeat(1 + i % 4, 1), i % 4) for i, row in enumerate(rows)]
    config = {"parallel": parallel}
    with make_engine(config, model=Reader(), loader=DataLoader(samples, 6 // world_size, collate_fn=pack)) as engine:
        trainer, evaluated = halfmesh.Trainer(engine), DataLoader(samples[:11], 4, collate_fn=pack)
        trainer.fit(max_steps=2)
        return trainer.evaluate(evaluated)["eval_loss"], trainer.predict(evaluated)


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", [{}, {"data": "fsdp"}])
def test_packed_sequences_count_as_sequences(parallel):
    ((loss, outputs),) = run_ranks(read, 1, {}, init=False)
    assert loss == pytest.approx(cross_entropy(outputs, torch.arange(11) % 4).item(), rel=1e-5)
    for found in run_ranks(read, 2, parallel):
        torch.testing.assert_close(found, (loss, outputs), rtol=1e-5, atol=1e-5)


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


def predicted(rank, world_size, extra=None, refused=False):
    """The outputs for sequences, padded to the longest of a batch."""
    model = Tagger(extra)
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True)
    with make_engine(model=model, criterion=None) as engine:
        trainer = halfmesh.Trainer(engine)
        if not refused:
            return trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        with pytest.raises(InputError, match=r"first dim, .*take turns in samples, but the sizes of one output are"):
            trainer.predict(DataLoader(SEQUENCES, 2, collate_fn=pad))
        return True


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2])
def test_predictions_of_other_lengths_are_a_list(ranks):
    """Of batches, or of samples."""
    model = Tagger()
    for outputs in run_ranks(predicted, ranks, init=ranks > 1):
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
    """Lists of batches in one process; refused on data ranks, which split batches."""
    for extra in (torch.tensor(1.0), torch.ones(7, 5)):
        (outputs,) = run_ranks(predicted, 1, extra, init=False)
        assert [output["extra"].shape for output in outputs] == [extra.shape] * 3
        assert run_ranks(predicted, 2, extra, True) == [True, True]
    (outputs,) = run_ranks(predicted, 1, "new", init=False)
    assert [output["extra"][:6] for output in outputs] == ["call 1", "call 2", "call 3"]
    for outputs in run_ranks(predicted, 2, "the same"):
        assert {output["extra"] for output in outputs} == {"the same"}


@pytest.mark.parametrize("value", [1.5, "a", np.float32(2), np.ones(2)])
def test_values_that_change_from_batch_to_batch_are_kept(value):
    class Valued(nn.Linear):
        def forward(self, x):
            return {"y": super().forward(x), "value": value * int(x[0, 0])}

    engine = make_engine(model=Valued(1, 1), criterion=None)
    trainer, x = halfmesh.Trainer(engine), torch.arange(1.0, 5.0)[:, None]
    assert [str(output["value"]) for output in trainer.predict(DataLoader(x, 2))] == [str(value), str(value * 3)]
    assert trainer.predict(DataLoader(torch.ones(4, 1), 2))["y"].shape == (4, 1)
    engine.close()


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


def test_records_hold_what_the_update_was():
    engine = linear_engine({"clip_grad_norm": 1e-3, "fp16": {"mode": "torch", "init_scale": 64.0}}, samples=8)
    first = fit(engine, epochs=1, log_every=2).records[0]
    expected = {"step": 2, "lr": 0.1, "loss_scale": 64.0, "skipped_steps": 0, "grad_norm": engine.grad_norm}
    assert {name: first[name] for name in expected} == expected
    assert first["grad_norm"] > 1e-3


@pytest.mark.promise(
    "monitoring the loss scale",
    "readable at any time, changes logged; a warning below 1 or above 2**24; a collapsing scale ends the "
    "run with a diagnosis; the precision report shows the room above it",
    of="PyTorch",
    page="health.md",
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
    assert len(said) == len(warned)
    assert all(words in line for words, line in zip(warned, said, strict=True))


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


def test_what_an_error_has_left_is_not_in_the_next_record():
    trainer, events = halfmesh.Trainer(linear_engine(lr=0.0)), Events()
    with pytest.raises(KeyError, match="mine"):
        trainer.fit([make_data(8)], epochs=1, hooks=[Events(fails="after_batch")])
    x, y = make_data(4)
    trainer.fit([(x, y)], epochs=1, eval_interval=0, hooks=[events])
    assert events.losses == [pytest.approx(cross_entropy(trainer.engine.model(x), y).item())]


@pytest.mark.parametrize("fails", ["after_step", "close"])
def test_all_hooks_are_closed_after_an_error(fails):
    events, trainer = Events(), halfmesh.Trainer(linear_engine())
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(epochs=1, hooks=[Events(fails=fails), events, Events(fails=fails)])
    assert events.seen[-1] == "close"
    assert ("after_fit" in events.seen) == (fails == "close")
    trainer.fit(epochs=2)  # without them


class Unclosable(halfmesh.Hook):
    def close(self, trainer):
        raise OSError("the disk is full")


def test_an_error_of_close_has_the_first_one_as_its_context():
    with pytest.raises(OSError, match="the disk is full") as raised:
        halfmesh.Trainer(linear_engine()).fit(epochs=1, hooks=[Unclosable(), Events(fails="after_step")])
    assert isinstance(raised.value.__context__, KeyError)


def test_max_steps_counts_updates_of_the_whole_run():
    engine = linear_engine({"gradient_accumulation": 2})
    for epochs, steps, expected in [(None, 3, 3), (None, 5, 5), (1, 5, 5)]:  # the last time nothing is left
        halfmesh.Trainer(engine).fit(epochs=epochs, max_steps=steps)
        assert engine.global_step == expected


def test_fit_goes_on_after_a_load(tmp_path):
    engine, never_stopped, again = linear_engine(), linear_engine(), linear_engine()
    halfmesh.Trainer(engine).fit(epochs=3, max_steps=4)
    engine.save(tmp_path)
    halfmesh.Trainer(never_stopped).fit(epochs=3)
    again.load(tmp_path)
    assert fit(again, epochs=3).updates("before_epoch") == [1, 2]
    assert again.global_step == 9
    assert torch.equal(again.model.weight, never_stopped.model.weight)


def test_a_hook_stops_training_and_the_last_weights_are_evaluated():
    class Stops(halfmesh.Hook):
        def after_step(self, trainer, result):
            if trainer.engine.global_step == 2:
                trainer.stop("enough")

    events = fit(linear_engine(), epochs=5, eval_interval=5, hooks=[Stops()])
    assert events.updates("after_step") == [1, 2]
    assert events.updates("before_eval") == [2]


def test_training_that_is_stopped_within_an_accumulation_cycle_ends_with_it(tmp_path):
    class Stops(halfmesh.Hook):
        def after_batch(self, trainer, outcome):
            trainer.stop("enough")

    engine = linear_engine({"gradient_accumulation": 3})
    assert fit(engine, epochs=5, hooks=[Stops()]).updates("after_step") == [1]
    engine.save(tmp_path)


@pytest.mark.parametrize(
    ("interval", "expected"), [(0, [2, 4, 6, 8, 9]), (1, [2, 3, 4, 6, 8, 9]), (2, [2, 4, 6, 8, 9])]
)
def test_evaluation_within_epochs(interval, expected):
    """Of three updates each; once after an update at most. Training goes on as without it."""
    engine, other = linear_engine(), linear_engine()
    assert fit(engine, epochs=3, eval_interval=interval, eval_steps=2).updates("before_eval") == expected
    assert fit(other, epochs=3, eval_interval=0).updates("before_eval") == []
    assert torch.equal(engine.model.weight, other.model.weight)


def test_evaluation_leaves_the_mode_as_it_was():
    engine = linear_engine()
    trainer, (x, y) = halfmesh.Trainer(engine), make_data(6)
    for mode in (False, True):
        engine.train(mode)
        result = trainer.evaluate()
        assert engine.training == mode
    assert result == {"eval_loss": pytest.approx(cross_entropy(engine.model(x), y).item())}


def test_evaluation_leaves_frozen_layers_frozen():
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
    engine = make_engine(model=model)
    model[1].eval()
    halfmesh.Trainer(engine).evaluate(make_loader(6, 4))
    assert [module.training for module in model.modules()] == [True, True, False]


class OneBuffer:
    """Gives each batch in the same memory; notes how many were asked for."""

    def __init__(self, batches):
        self.batches, self.asked = batches, 0

    def __iter__(self):
        buffer = [tensor.clone() for tensor in self.batches[0]]
        for batch in self.batches:
            self.asked += 1
            for held, tensor in zip(buffer, batch, strict=True):
                held.copy_(tensor)
            yield buffer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_batches_of_ones_own_in_one_buffer(accumulation):
    """A short last cycle is stepped; no batch is fetched ahead."""
    x, y = make_data(20)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    source, asked = OneBuffer(batches), []

    class PlanRequest(halfmesh.Hook):
        def before_batch(self, trainer, batch):
            asked.append(source.asked)

    ours, theirs = (linear_engine({"gradient_accumulation": accumulation}) for _ in range(2))
    halfmesh.Trainer(ours).fit(source, epochs=1, hooks=[PlanRequest()])
    halfmesh.Trainer(theirs).fit(batches, epochs=1)
    assert ours.global_step == theirs.global_step == (5 if accumulation == 1 else 3)
    assert torch.equal(ours.model.weight, theirs.model.weight)
    assert asked == [1, 2, 3, 4, 5]


class OwnLoss(nn.Linear):
    """As models of Hugging Face do it."""

    def forward(self, x, labels=None):
        logits = super().forward(x)
        return {"logits": logits} | ({} if labels is None else {"loss": cross_entropy(logits, labels)})


class Named(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


def test_batches_that_are_dicts():
    """With a loss of the model's own, and with a criterion."""

    class Plain(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    loader = DataLoader(Named(*make_data(12)), 4)
    weights = []
    for model, criterion in ((OwnLoss, None), (Plain, cross_entropy)):
        torch.manual_seed(0)
        engine = make_engine(model=model(FEATURES, 4), criterion=criterion, loader=loader, eval_dataloader=loader)
        trainer = halfmesh.Trainer(engine)
        trainer.fit(epochs=1)
        weights.append(engine.model.weight)
        assert engine.global_step == 3
        assert trainer.evaluate()["eval_loss"] > 0
        outputs = trainer.predict(loader)
        assert (outputs if criterion else outputs["logits"]).shape == (12, 4)
    assert torch.equal(*weights)


class Scalar(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.mark.parametrize("kind", [lambda x: (x, None), lambda x: {"input": x, "labels": None}], ids=["pair", "dict"])
def test_a_target_of_none_is_the_criterions(kind):
    seen = []

    def criterion(output, target):
        seen.append(target)
        return output.square().mean()

    engine = make_engine(model=nn.Linear(FEATURES, 4), criterion=criterion)
    halfmesh.Trainer(engine).fit([kind(make_data(4)[0])], epochs=1)
    assert seen == [None]


def test_a_target_is_not_ignored_where_there_is_no_criterion():
    engine = make_engine(model=Scalar(FEATURES, 4), criterion=None)
    with pytest.raises(InputError, match="no criterion was given to initialize"):
        halfmesh.Trainer(engine).fit([make_data(4)], epochs=1)


def test_ones_own_compute():
    def compute(engine, batch):
        x, y = batch
        output = engine(x)
        return halfmesh.Outcome(engine.criterion(output, y) * 0, output, y, len(x))

    engine = make_engine(loader=make_loader(12, 4))
    before = engine.model.last.weight.detach().clone()
    halfmesh.Trainer(engine, compute=compute).fit(epochs=1)
    assert torch.equal(engine.model.last.weight, before)
