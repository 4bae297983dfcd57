"""Trainer: the loop that a user would write, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

import halfmesh
from halfmesh.trainer.evaluation import MeanLoss
from tests.support.checkpoint_runs import LAYOUTS, Net, make_engine
from tests.support.models import FEATURES, make_data
from tests.support.ranks import run_ranks

CELLS = [("one", "none"), ("dp2", "naive"), ("tp2", "torch"), ("pp2", "naive"), ("fsdp", "none"), ("pp2_zero1", "none")]


class Events(halfmesh.Hook):
    """Notes what is called."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.records: list[dict[str, float]] = []

    def before_fit(self, trainer):
        self.seen.append("before_fit")

    def after_fit(self, trainer):
        self.seen.append("after_fit")

    def close(self, trainer):
        self.seen.append("close")

    def before_epoch(self, trainer):
        self.seen.append(f"before_epoch {trainer.epoch}")

    def after_epoch(self, trainer):
        self.seen.append(f"after_epoch {trainer.epoch}")

    def before_batch(self, trainer, batch):
        self.seen.append(f"before_batch {len(batch[0])}")

    def after_batch(self, trainer, outcome):
        self.seen.append(f"after_batch {outcome.rows}")

    def after_step(self, trainer, result):
        assert result is trainer.result
        self.seen.append(f"after_step {trainer.engine.global_step}")

    def before_eval(self, trainer):
        assert not trainer.engine.training
        self.seen.append("before_eval")

    def after_eval_batch(self, trainer, outcome):
        self.seen.append(f"after_eval_batch {outcome.rows}")

    def eval_results(self, trainer):
        return {"eval_answer": 42.0}

    def after_eval(self, trainer, results):
        self.seen.append(f"after_eval {sorted(results)}")

    def before_save(self, trainer):
        self.seen.append("before_save")

    def after_save(self, trainer, path):
        self.seen.append(f"after_save {path.name}")

    def measure(self, trainer):
        return {"answer": 42.0}

    def write(self, trainer, record):
        self.records.append(record)


def engine_of_one(samples=12, batch=4, *, evaluated=6, lr=0.1, **config):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    loader = DataLoader(TensorDataset(*make_data(samples)), batch)
    eval_loader = DataLoader(TensorDataset(*make_data(evaluated)), 4) if evaluated else None
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return halfmesh.initialize(
        model, optimizer, nn.functional.cross_entropy, loader, config, eval_dataloader=eval_loader, device="cpu"
    )


def by_hand(engine, epochs):
    for _ in range(epochs):
        engine.train()
        for x, y in engine.dataloader:
            engine.zero_grad()
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
    engine.close()
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def fitted(engine, epochs):
    halfmesh.Trainer(engine).fit(epochs=epochs)
    engine.close()
    return {name: value.clone() for name, value in engine.model.state_dict().items()}


def same_as_by_hand(rank, world_size, cells):
    def weights(train, layout, mode):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)
        return train(make_engine(layout, mode, dropout=0.1, gradient_accumulation=2, samples=40), 2)

    same = []
    for cell in cells:
        a, b = weights(by_hand, *cell), weights(fitted, *cell)
        same.append(all(torch.equal(a[name], b[name]) for name in a))
    return same


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fit_is_the_loop_by_hand_bit_by_bit(ranks):
    cells = [(layout, mode) for layout, mode in CELLS if LAYOUTS[layout][0] == ranks]
    assert run_ranks(same_as_by_hand, ranks, cells, init=ranks > 1) == [[True] * len(cells)] * ranks


def test_hooks_hear_what_happens_in_order(tmp_path):
    events = Events()
    trainer = halfmesh.Trainer(engine_of_one(gradient_accumulation=2), log_every=1)

    class Saves(halfmesh.Hook):
        def after_epoch(self, trainer):
            trainer.save(tmp_path)

    trainer.fit(epochs=1, hooks=[events, Saves()])
    assert events.seen == [
        "before_fit",
        "before_epoch 0",
        *("before_batch 4", "after_batch 4"),
        *("before_batch 4", "after_batch 4", "after_step 1"),
        *("before_batch 4", "after_batch 4", "after_step 2"),
        "after_epoch 0",
        *("before_save", "after_save step-00000002"),
        *("before_eval", "after_eval_batch 4", "after_eval_batch 2"),
        "after_eval ['eval_answer', 'eval_loss']",
        *("after_fit", "close"),
    ]
    steps = [(record["step"], record.get("answer"), "eval_loss" in record) for record in events.records]
    assert steps == [(1, 42.0, False), (2, 42.0, False), (2, None, True)]


def test_records_hold_what_the_update_was():
    events = Events()
    engine = engine_of_one(clip_grad_norm=1e-3, fp16={"mode": "torch", "init_scale": 64.0})
    halfmesh.Trainer(engine, log_every=2).fit(epochs=1, hooks=[events])
    first = events.records[0]
    assert first["step"] == 2
    assert first["lr"] == 0.1
    assert first["loss_scale"] == 64.0
    assert first["skipped_steps"] == 0
    assert first["grad_norm"] == engine.grad_norm or first["grad_norm"] > 1e-3


@pytest.mark.parametrize(
    ("scale", "warned"),
    [(2.0**-2, ["the loss scale is 0.25, below 1"]), (2.0**25, ["is 3.35544e+07, above 2**24"]), (2.0**10, [])],
)
def test_a_warning_of_a_scale_that_is_low_or_high(scale, warned, caplog):
    """Once, not with each record."""
    engine = engine_of_one(fp16={"mode": "naive", "loss_scale": scale})
    halfmesh.Trainer(engine, log_every=1).fit(epochs=2)
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    said = [line for line in said if "loss scale is" in line]
    assert len(said) == len(warned)
    assert all(words in line for words, line in zip(warned, said, strict=True))


def test_the_loss_is_the_mean_since_the_last_record():
    losses, events = [], Events()

    class Losses(halfmesh.Hook):
        def after_batch(self, trainer, outcome):
            losses.append(outcome.loss.item())

    halfmesh.Trainer(engine_of_one(16), log_every=2).fit(epochs=1, hooks=[Losses(), events])
    found = [record["loss"] for record in events.records if "loss" in record]
    assert found == pytest.approx([sum(losses[:2]) / 2, sum(losses[2:]) / 2])


def test_max_steps_counts_updates_of_the_whole_run():
    engine = engine_of_one(gradient_accumulation=2)
    trainer = halfmesh.Trainer(engine)
    trainer.fit(max_steps=3)
    assert engine.global_step == 3
    trainer.fit(max_steps=5)
    assert engine.global_step == 5
    trainer.fit(epochs=1, max_steps=5)  # nothing is left
    assert engine.global_step == 5


def test_fit_goes_on_after_a_load(tmp_path):
    engine, events = engine_of_one(), Events()
    halfmesh.Trainer(engine).fit(epochs=3, max_steps=4)
    engine.save(tmp_path)
    never_stopped, again = engine_of_one(), engine_of_one()
    halfmesh.Trainer(never_stopped).fit(epochs=3)
    again.load(tmp_path)
    halfmesh.Trainer(again).fit(epochs=3, hooks=[events])
    assert again.global_step == 9
    assert torch.equal(again.model.weight, never_stopped.model.weight)
    assert [event for event in events.seen if "before_epoch" in event] == ["before_epoch 1", "before_epoch 2"]


def test_a_hook_stops_training_and_the_last_weights_are_evaluated():
    events = Events()

    class Stops(halfmesh.Hook):
        def after_step(self, trainer, result):
            if trainer.engine.global_step == 2:
                trainer.stop("enough")

    engine = engine_of_one()
    halfmesh.Trainer(engine).fit(epochs=5, eval_interval=5, hooks=[Stops(), events])
    assert engine.global_step == 2
    assert events.seen[-3:] == ["after_eval ['eval_answer', 'eval_loss']", "after_fit", "close"]


@pytest.mark.parametrize(
    ("interval", "expected"), [(0, [2, 4, 6, 8, 9]), (1, [2, 3, 4, 6, 8, 9]), (2, [2, 4, 6, 8, 9])]
)
def test_evaluation_within_epochs(interval, expected):
    """Of three updates each; once after an update at most. Training goes on as without it."""
    seen = []

    class Notes(halfmesh.Hook):
        def after_eval(self, trainer, results):
            seen.append(trainer.engine.global_step)

        def before_batch(self, trainer, batch):
            assert trainer.engine.training

    engine, other = engine_of_one(), engine_of_one()
    halfmesh.Trainer(engine).fit(epochs=3, eval_interval=interval, eval_steps=2, hooks=[Notes()])
    assert seen == expected
    halfmesh.Trainer(other).fit(epochs=3, eval_interval=0)
    assert torch.equal(engine.model.weight, other.model.weight)


def test_hooks_are_closed_after_an_error():
    events = Events()

    class Fails(halfmesh.Hook):
        def after_step(self, trainer, result):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        halfmesh.Trainer(engine_of_one()).fit(epochs=1, hooks=[events, Fails()])
    assert events.seen[-1] == "close"
    assert "after_fit" not in events.seen


def test_all_hooks_are_closed_where_one_fails():
    events = Events()

    class Fails(halfmesh.Hook):
        def close(self, trainer):
            raise KeyError("mine")

    trainer = halfmesh.Trainer(engine_of_one())
    with pytest.raises(KeyError, match="mine"):
        trainer.fit(epochs=1, hooks=[Fails(), events, Fails()])
    assert events.seen[-1] == "close"
    trainer.fit(epochs=2)  # without them


def test_what_an_error_has_left_is_not_in_the_next_record():
    class Fails(halfmesh.Hook):
        def after_batch(self, trainer, outcome):
            raise KeyError("mine")

    events, trainer = Events(), halfmesh.Trainer(engine_of_one(lr=0.0), log_every=100)
    with pytest.raises(KeyError, match="mine"):
        trainer.fit([make_data(8)], epochs=1, hooks=[Fails()])
    x, y = make_data(4)
    trainer.fit([(x, y)], epochs=1, eval_interval=0, hooks=[events])
    expected = nn.functional.cross_entropy(trainer.engine.model(x), y).item()
    assert [record["loss"] for record in events.records] == [pytest.approx(expected)]


def test_an_evaluation_of_a_hooks_own_is_not_the_last_one():
    events = Events()

    class Evaluates(halfmesh.Hook):
        def after_epoch(self, trainer):
            trainer.evaluate()

    halfmesh.Trainer(engine_of_one()).fit(epochs=1, eval_interval=2, hooks=[Evaluates(), events])
    assert events.seen[-3:] == ["after_eval ['eval_answer', 'eval_loss']", "after_fit", "close"]


def test_a_loss_that_is_a_sum():
    model, (x, y) = nn.Linear(FEATURES, 4), make_data(6)
    engine = halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        nn.CrossEntropyLoss(reduction="sum"),
        config={"loss_reduction": "sum"},
        device="cpu",
    )
    result = halfmesh.Trainer(engine).evaluate(DataLoader(TensorDataset(x, y), 4))
    assert result["eval_loss"] == pytest.approx(nn.functional.cross_entropy(model(x), y).item())


def predicted(rank, world_size):
    """Of batches that the sampler gives, and of items that are batches."""
    engine = make_engine("dp2", "none")
    data = TensorDataset(*make_data(13))
    batches = BatchSampler(SequentialSampler(data), 4, drop_last=False)
    trainer = halfmesh.Trainer(engine)
    return [
        trainer.predict(loader)
        for loader in (DataLoader(data, batch_sampler=batches), DataLoader(data, batch_size=None, sampler=batches))
    ]


@pytest.mark.distributed
def test_the_order_of_predictions_where_ranks_take_turns_in_batches():
    model = Net(0.0, 0).eval()
    expected = model(make_data(13)[0])
    for outputs in run_ranks(predicted, 2):
        for output in outputs:
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)


def test_batches_of_ones_own_end_a_short_cycle():
    engine = engine_of_one(gradient_accumulation=2)
    x, y = make_data(12)
    halfmesh.Trainer(engine).fit([(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)], epochs=2)
    assert engine.global_step == 4


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
    batches = [(torch.randn(4, FEATURES), torch.randint(3, (4,))) for _ in range(5)]
    ours, theirs = (engine_of_one(gradient_accumulation=accumulation) for _ in range(2))
    halfmesh.Trainer(ours).fit(OneBuffer(batches), epochs=1)
    halfmesh.Trainer(theirs).fit(batches, epochs=1)
    assert ours.global_step == theirs.global_step == (5 if accumulation == 1 else 3)
    for one, other in zip(ours.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("accumulation", "ahead"), [(1, 0), (2, 1)])
def test_batches_of_ones_own_are_not_fetched_ahead_for_nothing(accumulation, ahead):
    engine = engine_of_one(gradient_accumulation=accumulation)
    batches = OneBuffer([(torch.randn(4, FEATURES), torch.randint(3, (4,))) for _ in range(5)])
    asked = []

    class Asked(halfmesh.Hook):
        def before_batch(self, trainer, batch):
            asked.append(batches.asked)

    halfmesh.Trainer(engine).fit(batches, epochs=1, hooks=[Asked()])
    assert asked == [min(count + ahead, 5) for count in range(1, 6)]


def test_evaluation_leaves_the_mode_as_it_was():
    engine = engine_of_one()
    trainer = halfmesh.Trainer(engine)
    engine.eval()
    trainer.evaluate()
    assert not engine.training
    engine.train()
    result = trainer.evaluate()
    assert engine.training
    x, y = make_data(6)
    assert result == {"eval_loss": pytest.approx(nn.functional.cross_entropy(engine.model(x), y).item())}


def evaluated(rank, world_size, cells):
    """The loss, and outputs, of 13 samples in batches of 4: uneven everywhere."""
    results = []
    for layout, mode in cells:
        engine = make_engine(layout, mode)
        trainer = halfmesh.Trainer(engine)
        loader = DataLoader(TensorDataset(*make_data(13)), 4)
        results.append((trainer.evaluate(loader)["eval_loss"], trainer.predict(loader)))
        engine.close()
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_loss_and_predictions_are_those_of_one_process(ranks):
    model, (x, y) = Net(0.0, 0), make_data(13)
    model.eval()
    expected = model(x)
    cells = [(layout, "none") for layout, _ in CELLS if LAYOUTS[layout][0] == ranks and layout != "fsdp"]
    everyone = run_ranks(evaluated, ranks, cells, init=ranks > 1)
    for results in everyone:
        for loss, outputs in results:
            assert loss == pytest.approx(nn.functional.cross_entropy(expected, y).item(), rel=1e-5)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-5)
    assert all(theirs[0][0] == everyone[0][0][0] for theirs in everyone)


class OwnLoss(nn.Module):
    """As models of Hugging Face do it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, 4)

    def forward(self, x, labels=None):
        logits = self.layer(x)
        return {"logits": logits} | ({} if labels is None else {"loss": nn.functional.cross_entropy(logits, labels)})


class Named(TensorDataset):
    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return {"x": x, "labels": y}


def test_dicts_and_a_loss_of_the_models_own():
    model, loader = OwnLoss(), DataLoader(Named(*make_data(12)), 4)
    before = model.layer.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, None, loader, {}, eval_dataloader=loader, device="cpu")
    trainer = halfmesh.Trainer(engine)
    trainer.fit(epochs=1)
    assert engine.global_step == 3
    assert not torch.equal(before, engine.model.layer.weight)
    assert trainer.evaluate()["eval_loss"] > 0
    assert set(trainer.predict(loader)) == {"logits"}
    assert trainer.predict(loader)["logits"].shape == (12, 4)


def test_dicts_with_a_criterion():
    class Plain(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    model, loader = Plain(FEATURES, 4), DataLoader(Named(*make_data(12)), 4)
    engine = halfmesh.initialize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.cross_entropy, loader, {}, device="cpu"
    )
    halfmesh.Trainer(engine).fit(epochs=1)
    assert engine.global_step == 3


def test_a_weighted_loss():
    losses = []

    def criterion(output, target):
        each = nn.functional.cross_entropy(output, target, reduction="none")
        return each.sum(), torch.tensor(float(len(target)))

    model, (x, y), events = nn.Linear(FEATURES, 4), make_data(6), Events()
    loader = DataLoader(TensorDataset(x, y), 4)
    engine = halfmesh.initialize(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        criterion,
        loader,
        {"loss_reduction": "weighted"},
        device="cpu",
    )
    halfmesh.Trainer(engine, log_every=2).fit(epochs=1, hooks=[events])
    losses = [record["loss"] for record in events.records]
    assert losses == [pytest.approx(nn.functional.cross_entropy(model(x), y).item())]


def test_no_rows_no_mean():
    assert MeanLoss(engine_of_one()).take() is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "fit needs an end: give it epochs=, max_steps=, or both"),
        ({"epochs": 0}, "epochs=0: expected a whole number, 1 or more"),
        ({"max_steps": 1.5}, "max_steps=1.5: expected a whole number"),
        ({"epochs": 1, "eval_steps": 0}, "eval_steps=0: expected a whole number, 1 or more"),
        ({"epochs": 1, "eval_interval": -1}, "eval_interval=-1: expected a whole number, 0 or more"),
        ({"epochs": 1, "hooks": "progress"}, r"expected a list, hooks=\['progress'\]"),
        ({"epochs": 1, "hooks": ["progres"]}, "no hook named 'progres'; did you mean 'progress'"),
        ({"epochs": 1, "hooks": [{"type": "csv", "file": "x"}]}, "hook 'csv': .*unexpected keyword argument 'file'"),
        ({"epochs": 1, "hooks": [{"path": "x"}]}, r"is no hook: expected an object of halfmesh.Hook, a name \(metric"),
        ({"epochs": 1, "hooks": [Events]}, r"Events is a class; give an object of it: Events\(...\)"),
        ({"epochs": 1, "train": DataLoader(TensorDataset(torch.ones(2)))}, "a DataLoader that is not sharded"),
        ({"epochs": 1, "train": 3}, "fit was given a int to train on, which is no sequence of batches"),
        ({"epochs": 1, "train": {"x": torch.zeros(2, 4)}}, "fit was given a dict to train on, which is no sequence"),
        ({"epochs": 1, "eval_dataloader": TensorDataset(torch.ones(2))}, "TensorDataset is no loader; wrap it"),
        ({"epochs": 2, "train": iter([make_data(4)])}, "epoch 1: there was no batch to train on"),
    ],
)
def test_mistakes(arguments, message):
    with pytest.raises((halfmesh.InputError, halfmesh.RegistryError), match=message):
        halfmesh.Trainer(engine_of_one()).fit(**arguments)


def test_mistakes_in_evaluation():
    with pytest.raises(halfmesh.InputError, match="eval_steps needs something to evaluate on"):
        halfmesh.Trainer(engine_of_one(evaluated=0)).fit(epochs=1, eval_steps=1)
    trainer = halfmesh.Trainer(engine_of_one(evaluated=0))
    with pytest.raises(halfmesh.InputError, match="there is nothing to evaluate on"):
        trainer.evaluate()
    with pytest.raises(halfmesh.InputError, match="predict takes a DataLoader, but a list was given"):
        trainer.predict([1])
    with pytest.raises(halfmesh.InputError, match="log_every=0"):
        halfmesh.Trainer(trainer.engine, log_every=0)
    with pytest.raises(halfmesh.InputError, match=r"a batch of 1 item\(s\) has no target"):
        trainer.fit([(torch.ones(2, FEATURES),)], epochs=1)


def test_ones_own_compute():
    def compute(engine, batch):
        x, y = batch
        output = engine(x)
        return halfmesh.Outcome(engine.criterion(output, y) * 0, output, y, len(x))

    engine = engine_of_one()
    before = engine.model.weight.detach().clone()
    halfmesh.Trainer(engine, compute=compute).fit(epochs=1)
    assert torch.equal(engine.model.weight, before)
