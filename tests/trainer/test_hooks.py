"""The hooks that come with halfmesh."""

import json
import math
import re
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.optim import lr_scheduler

import halfmesh
from halfmesh.hooks import CheckpointHook, EarlyStopHook, LRSchedulerHook, TensorBoardHook, ThroughputHook
from tests.support.models import CLASSES, FEATURES, linear_engine, make_engine, make_loader, said
from tests.support.ranks import run_ranks


class Results(halfmesh.Hook):
    """Gives evaluation these results, one after another, and collects records and the weights that were evaluated."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.records: list[dict[str, float]] = []
        self.weights: list[torch.Tensor] = []

    def eval_results(self, trainer):
        return {"eval_score": self.values.pop(0)} if self.values else {}

    def after_eval(self, trainer, results):
        self.weights.append(trainer.engine.model.weight.detach().clone())

    def write(self, trainer, record):
        self.records.append(record)


@pytest.mark.parametrize(
    ("options", "values", "steps"),
    [
        ({"patience": 2, "mode": "max"}, [1.0, 3.0, 2.0, math.nan, 9.0], 12),
        ({"patience": 2}, [3.0, 2.0, 1.0], 9),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.6, 1.0], 6),
    ],
)
def test_early_stop(options, values, steps, caplog):
    engine = linear_engine()
    stop = EarlyStopHook("eval_score", **options)
    halfmesh.Trainer(engine).fit(epochs=len(values), hooks=[Results(*values), stop])
    assert engine.global_step == steps
    assert ("stopped after update" in caplog.text) == (steps < 3 * len(values))


def test_the_plateaus_of_two_optimizers_follow_the_evaluation():
    engine = make_engine(
        {"lr_interval": "manual"},
        model=nn.Linear(FEATURES, CLASSES),
        optimizer=lambda params: [torch.optim.SGD([param], lr=0.1) for param in params],
        lr_scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
        eval_dataloader=make_loader(6, 4),
    )
    hooks = [Results(1.0, 1.0, 1.0), LRSchedulerHook("eval_score")]
    halfmesh.Trainer(engine).fit(epochs=2, hooks=hooks)
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.01, 0.01])


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    halfmesh.Trainer(linear_engine(), log_every=1).fit(epochs=1, hooks=[TensorBoardHook(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("eval/loss")] == [3]
    assert events.Scalars("train/lr")[0].value == pytest.approx(0.1)
    (text,) = events.Tensors("settings/text_summary")
    assert b"| optimizer.lr | 0.1 |" in text.tensor_proto.string_val[0]
    assert b"optimizer.lr" in events.PluginTagToContent("hparams")["_hparams_/session_start_info"]


class Calls(ModuleType):
    """Stands in for wandb or mlflow, and keeps what is called, in order."""

    def __init__(self):
        super().__init__("tracker")
        self.calls, self.run, self.settings = [], None, {}
        self.log_params = self.settings.update
        self.log = self.log_metrics = lambda record, step: self.calls.append((step, record))
        self.finish = lambda exit_code: self.calls.append(("finish", exit_code))
        self.end_run = lambda status: self.calls.append(("finish", status))

    def active_run(self):
        return self.run

    def start_run(self, **options):
        self.calls.append(("begin", options))
        of_wandb = {"config": SimpleNamespace(setdefaults=self.settings.update), "finish": self.finish}
        self.run = SimpleNamespace(log=self.log, data=SimpleNamespace(params={}), **of_wandb)
        return self.run

    init = start_run


@pytest.mark.parametrize(("package", "good", "bad"), [("wandb", 0, 1), ("mlflow", "FINISHED", "FAILED")])
def test_trackers(monkeypatch, package, good, bad):
    monkeypatch.setitem(sys.modules, package, tracker := Calls())
    results, options = Results(), {"name": "first", "mode": "offline"}
    names = {"eval_loss": "eval/loss", "epoch": "epoch"}
    try:
        raise MemoryError
    except MemoryError:  # a smaller model is trained then, which is no failure
        halfmesh.Trainer(linear_engine(), log_every=1).fit(epochs=1, hooks=[{"type": package, **options}, results])
    records = [(r["step"], {names.get(n, f"train/{n}"): r[n] for n in r if n != "step"}) for r in results.records]
    assert [step for step, _ in records] == [1, 2, 3, 3]
    assert records[-1][1].keys() == {"epoch", "eval/loss"}
    assert tracker.calls == [("begin", options), *records, ("finish", good)]
    assert (tracker.settings["optimizer.type"], tracker.settings["optimizer.lr"]) == ("SGD", 0.1)
    monkeypatch.setitem(sys.modules, package, tracker := Calls())

    class Fails(halfmesh.Hook):
        def after_epoch(self, trainer):
            raise KeyError("the user's own")

    with pytest.raises(KeyError):
        halfmesh.Trainer(linear_engine()).fit(epochs=1, hooks=[package, Fails()])
    assert (tracker.calls[0], tracker.calls[-1]) == (("begin", {}), ("finish", bad))


def tracked(rank, world_size):
    """Begins of runs on this rank; then what is said where rank 0 cannot begin one: the package is not installed."""
    trainer, tracker = halfmesh.Trainer(linear_engine()), Calls()
    with patch.dict(sys.modules, wandb=tracker):
        trainer.fit(epochs=1, hooks=["wandb"])
    with patch.dict(sys.modules, wandb=Calls() if rank else None):
        words = said(trainer.fit, epochs=2, hooks=["wandb"])
    return [call[0] for call in tracker.calls].count("begin"), words


@pytest.mark.distributed
def test_rank_0_alone_tracks():
    (begun, words), other = run_ranks(tracked, 2)
    assert (begun, other) == (1, (0, words))
    assert words.startswith("WandbHook cannot start:\n  - rank 0: wandb is not installed; run: pip install wandb")


def test_the_best_weights(tmp_path):
    def fit(engine, epochs, *values):
        results, hook = Results(*values), CheckpointHook(tmp_path, monitor="eval_score", mode="max")
        halfmesh.Trainer(engine).fit(epochs=epochs, hooks=[results, hook])
        return results.weights

    def best():
        return json.loads((tmp_path / "best.json").read_text()), load_file(tmp_path / "best.safetensors")["weight"]

    engine = linear_engine()
    weights = fit(engine, 3, 1.0, 5.0, 2.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.json", "best.safetensors"]
    engine.save(tmp_path / "saved")
    again = linear_engine()
    again.load(tmp_path / "saved")
    fit(again, 5, 3.0, 4.0)
    assert best()[0] == {"step": 6, "eval_score": 5.0}
    assert torch.equal(best()[1], weights[1])
    fit(linear_engine(), 1, 0.5)
    assert best()[0] == {"step": 3, "eval_score": 0.5}


def test_throughput_and_memory():
    results = Results()
    hooks = [ThroughputHook(tokens=lambda outcome: outcome.rows * 7, flops_per_sample=100.0), "memory", results]
    halfmesh.Trainer(linear_engine(), log_every=3).fit(epochs=1, hooks=hooks)
    record = results.records[0]
    assert record["samples_per_s"] > 0
    assert record["tokens_per_s"] == pytest.approx(7 * record["samples_per_s"])
    assert record["model_flops_per_s"] == pytest.approx(100 * record["samples_per_s"])
    assert "mfu" not in record  # of a CPU nobody knows
    assert 50 < record["memory_mib"] < 50_000
    halfmesh.Trainer(linear_engine(), log_every=1).fit(max_steps=3, hooks=["throughput", counted := Results()])
    found = ["model_flops_per_s" in record for record in counted.records]
    assert found == [False, False, True, False]  # not timed up to the batch that is counted; the last has no batch


@pytest.mark.promise("advice on batch size and data loading")
@pytest.mark.parametrize(  # above, below, few batches, short records
    ("records", "warnings"),
    [([(0.31, 0.69, 40)], 1), ([(0.28, 0.72, 40)], 0), ([(5.0, 5.0, 3)], 0), ([(0.6, 0.4, 4)] * 10, 1)],
)
def test_a_loop_that_waits_for_its_data_is_warned_once(records, warnings, monkeypatch, caplog):
    """Records: seconds to fetch a batch, to train on it, and how many; between them an evaluation takes long, which is
    not counted in throughput."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    hook, trainer = ThroughputHook(flops_per_sample=None), halfmesh.Trainer(linear_engine())
    trainer.engine.dataloader.waited_s = 50.0  # before this fit
    hook.before_fit(trainer)
    for fetch_s, train_s, count in records:
        for _ in range(count):
            now[0] += fetch_s + train_s
            trainer.engine.dataloader.waited_s += fetch_s
            hook.after_batch(trainer, halfmesh.Outcome(None, None, None, 1))
        hook.before_eval(trainer)
        now[0] += 100
        hook.before_save(trainer)  # as a hook does that keeps the best weights
        hook.after_save(trainer, None)
        hook.after_eval(trainer, {})
        assert hook.measure(trainer)["samples_per_s"] == pytest.approx(1 / (fetch_s + train_s))
    warned = [text for text in caplog.messages if text.startswith("the loop waited for engine.dataloader")]
    assert len(warned) == warnings
    assert all("give the DataLoader more workers (num_workers=0; this machine has " in text for text in warned)


def test_progress_in_plain_lines(caplog):
    engine = linear_engine({"fp16": {"mode": "naive", "initial_scale": 65536}})
    halfmesh.Trainer(engine, log_every=2).fit(epochs=2, hooks=["progress", "throughput", "memory"])
    first, second, *_, last = [line for line in caplog.messages if line.startswith("epoch")]
    assert first.startswith("epoch 1/2  step 2/6  loss ")
    row = r"epoch 1/2  step 3/6  loss \S+  lr \S+  grad_norm \S+  loss_scale 65536  "
    assert re.fullmatch(row + r"[\d.,]+ samples/s  \S+ [kM]?FLOP/s  memory \d+\.\d [MG]iB", second)
    assert last.startswith("epoch 2/2  step 6/6  eval_loss ")
    caplog.clear()
    halfmesh.Trainer(linear_engine({"bf16": {"mode": "naive"}})).fit(max_steps=1, hooks=["progress"])
    assert re.fullmatch(r"epoch 1  step 1/1  loss \S+  lr \S+", caplog.messages[-2]), "nothing is scaled or skipped"


def on_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_the_bar_shows_how_far_an_evaluation_is_and_is_not_drawn_again_after_an_interrupt(error, monkeypatch, capsys):
    """The line about the interrupt stays the last one."""
    on_terminal(monkeypatch)
    bar, seen = halfmesh.hooks.ProgressHook(), []

    class Looks(halfmesh.Hook):
        def after_eval_batch(self, trainer, outcome):
            seen.append(bar._bar.tasks[0].fields["numbers"])

        def after_eval(self, trainer, results):
            seen.append(bar._bar.tasks[0].fields["numbers"].split()[0])

        def after_step(self, trainer, result):
            if trainer.epoch == 1:
                print("interrupted by a signal", file=sys.stderr)
                raise error

    with pytest.raises(error):
        halfmesh.Trainer(linear_engine(evaluated=8), log_every=1).fit(epochs=2, hooks=[bar, Looks()])
    assert seen == ["evaluating 1/2", "evaluating 2/2", "loss"]
    text = capsys.readouterr().err.replace("\x1b[?25h", "").rstrip()
    *_, after = text.partition("interrupted by a signal")
    *_, last = after.rpartition("\x1b[2K")  # of the bar that is drawn under a line, what is left at the end
    assert ("epoch" in last) == (error is ValueError)


def test_progress_on_a_terminal_is_one_bar(monkeypatch, capsys, caplog, tmp_path):
    """Of a run that goes on in an epoch, too."""
    on_terminal(monkeypatch)
    config = {"fp16": {"mode": "naive", "initial_scale": 65536}}
    engine, again = linear_engine(config), linear_engine(config)
    halfmesh.Trainer(engine, log_every=1).fit(max_steps=2)
    engine.save(tmp_path)
    again.load(tmp_path)
    capsys.readouterr()
    halfmesh.Trainer(again, log_every=1).fit(epochs=40, hooks=["progress", "throughput", "memory"])
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).replace("\r", "\n").splitlines()
    evaluated = [line for line in lines if "eval_loss" in line]  # on a slow machine the bar says "evaluating 1/1", too
    bars = [line for line in lines if "/120 " in line and line not in evaluated]
    assert len(evaluated) == 40, "each once"
    assert evaluated[0].startswith("epoch 1/40  step 3/120  eval_loss ")
    assert bars[0].split()[1] == "1/40"
    row = r"epoch 40/40 \S{4,} 120/120 \S+ (it/s|s/it) \d:\d\d:\d\d loss \S+  norm \S+  lr 0\.1"
    assert re.fullmatch(row, bars[-1].rstrip())
    assert max(map(len, lines)) <= 80
    halfmesh.Trainer(again).evaluate(hooks=["progress"])
    assert "eval_loss" in caplog.messages[-1]
