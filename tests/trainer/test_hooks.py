"""The hooks that come with halfmesh."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh import hooks as hooks_module
from halfmesh.hooks import (
    CheckpointHook,
    CSVHook,
    EarlyStopHook,
    JSONLHook,
    LRSchedulerHook,
    MemoryHook,
    MetricHook,
    ProgressHook,
    TensorBoardHook,
    ThroughputHook,
)
from halfmesh.hooks.peaks import PEAK_FLOPS, least_seconds
from tests.support.models import FEATURES, make_data


def make(lr=0.1, scheduler=None, **config):
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loader = DataLoader(TensorDataset(*make_data(12)), 4)
    return halfmesh.initialize(
        model,
        optimizer,
        nn.functional.cross_entropy,
        loader,
        config,
        eval_dataloader=DataLoader(TensorDataset(*make_data(6)), 4),
        lr_scheduler=None if scheduler is None else scheduler(optimizer),
        device="cpu",
    )


class Results(halfmesh.Hook):
    """Gives evaluation these results, one after another, and collects records."""

    def __init__(self, *values: float) -> None:
        self.values = list(values)
        self.records: list[dict[str, float]] = []

    def eval_results(self, trainer):
        return {"eval_score": self.values.pop(0)} if self.values else {}

    def write(self, trainer, record):
        self.records.append(record)


def test_every_registered_hook_is_public():
    assert {type(made).__name__ for made in [ProgressHook(), MemoryHook()]} <= set(hooks_module.__all__)
    found = {halfmesh.HOOKS.get(name).__name__ for name in halfmesh.HOOKS.names()}
    assert found == set(hooks_module.__all__)
    with pytest.raises(AttributeError, match="no attribute 'CSVHok'; did you mean 'CSVHook'"):
        _ = hooks_module.CSVHok


@pytest.mark.parametrize(
    ("mode", "values", "steps"),
    [("min", [3.0, 2.0, 2.0, 2.5, 1.0], 12), ("max", [1.0, 3.0, 2.0, math.nan, 9.0], 12), ("min", [3.0, 2.0, 1.0], 9)],
)
def test_early_stop(mode, values, steps, caplog):
    engine = make()
    stop = EarlyStopHook("eval_score", patience=2, mode=mode)
    halfmesh.Trainer(engine).fit(epochs=len(values), hooks=[Results(*values), stop])
    assert engine.global_step == steps
    assert ("training was stopped after update 12: eval_score was not better than" in caplog.text) == (steps == 12)


def test_what_has_to_be_gained():
    engine = make()
    stop = EarlyStopHook("eval_score", patience=1, min_delta=0.5)
    halfmesh.Trainer(engine).fit(epochs=3, hooks=[Results(3.0, 2.6, 1.0), stop])
    assert engine.global_step == 6


def test_a_result_that_is_not_there():
    with pytest.raises(
        halfmesh.InputError, match="monitor='eval_los': evaluation gave eval_loss; did you mean 'eval_loss'"
    ):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=[EarlyStopHook("eval_los")])


def test_the_scheduler_is_advanced_once():
    def halves(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    for interval, expected in [("epoch", 0.1 * 0.5**2), ("step", 0.1 * 0.5**6)]:
        engine = make(scheduler=halves, lr_interval="manual")
        halfmesh.Trainer(engine).fit(epochs=2, hooks=[LRSchedulerHook(interval)])
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(expected)
    with pytest.raises(halfmesh.InputError, match=r"the engine advances the scheduler already \(lr_interval='step'\)"):
        halfmesh.Trainer(make(scheduler=halves)).fit(epochs=1, hooks=["lr_scheduler"])
    with pytest.raises(halfmesh.InputError, match="there is no scheduler; give initialize an lr_scheduler"):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=["lr_scheduler"])
    with pytest.raises(halfmesh.InputError, match="interval='day': expected 'step', 'epoch' or 'eval'"):
        LRSchedulerHook("day")


def test_a_skipped_step_does_not_advance_it():
    def halves(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    engine = make(scheduler=halves, lr_interval="manual", fp16={"mode": "torch", "init_scale": 2.0**40})
    halfmesh.Trainer(engine).fit(max_steps=3, hooks=[LRSchedulerHook("step")])
    assert engine.skipped_steps == 3
    assert engine.optimizer.param_groups[0]["lr"] == 0.1


def test_plateau():
    engine = make(scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0), lr_interval="manual")
    hooks = [Results(1.0, 1.0, 1.0), LRSchedulerHook("eval", "eval_score")]
    halfmesh.Trainer(engine).fit(epochs=2, hooks=hooks)
    assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_jsonl_of_a_run_that_goes_on(tmp_path):
    path, engine = tmp_path / "run" / "metrics.jsonl", make()
    halfmesh.Trainer(engine, log_every=1).fit(epochs=1, hooks=[JSONLHook(path)])
    engine.save(tmp_path / "saved")
    halfmesh.Trainer(engine, log_every=1).fit(epochs=2, hooks=[JSONLHook(path), Results(math.nan)])
    with path.open("a") as file:
        file.write('{"step": 5, "lo')  # it was killed here
    again = make()
    again.load(tmp_path / "saved")
    halfmesh.Trainer(again, log_every=1).fit(epochs=2, hooks=[{"type": "jsonl", "path": path}, Results(math.inf)])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert lines[-1]["eval_score"] is None
    assert lines[-1]["eval_loss"] > 0
    assert lines[0]["lr"] == 0.1


def test_csv_of_a_run_that_goes_on(tmp_path):
    path, engine = tmp_path / "metrics.csv", make()
    halfmesh.Trainer(engine, log_every=1).fit(epochs=1, hooks=[CSVHook(path)])
    engine.save(tmp_path / "saved")
    halfmesh.Trainer(engine, log_every=1).fit(epochs=2, hooks=[CSVHook(path)])
    again = make()
    again.load(tmp_path / "saved")
    halfmesh.Trainer(again, log_every=1).fit(epochs=2, hooks=[CSVHook(path), Results(7.0)])
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3", "3", "4", "5", "6", "6"]
    assert rows[-1]["eval_score"] == "7.0"
    assert rows[0]["eval_score"] == ""
    assert float(rows[0]["loss"]) > 0


def test_tensorboard(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    halfmesh.Trainer(make(), log_every=1).fit(epochs=1, hooks=[TensorBoardHook(tmp_path)])
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    assert [event.step for event in events.Scalars("eval_loss")] == [3]
    assert events.Scalars("lr")[0].value == pytest.approx(0.1)


def test_tensorboard_is_not_there(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(halfmesh.InputError, match=r"TensorBoardHook needs tensorboard .* pip install tensorboard"):
        halfmesh.Trainer(make()).fit(epochs=1, hooks=[TensorBoardHook(tmp_path)])


def test_checkpoints(tmp_path):
    engine = make()
    halfmesh.Trainer(engine).fit(epochs=2, hooks=[CheckpointHook(tmp_path, every=2, keep=2)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000004", "step-00000006"]
    again = make()
    assert again.load(tmp_path).name == "step-00000006"
    assert torch.equal(again.model.weight, engine.model.weight)


def test_checkpoints_of_epochs_and_the_best_weights(tmp_path):
    weights = []

    class Watch(halfmesh.Hook):
        def after_eval(self, trainer, results):
            weights.append(trainer.engine.model.weight.detach().clone())

    hook = CheckpointHook(tmp_path, in_background=False, monitor="eval_score", mode="max")
    halfmesh.Trainer(make()).fit(epochs=3, hooks=[Results(1.0, 5.0, 2.0), Watch(), hook])
    names = ["best.json", "best.safetensors", "step-00000003", "step-00000006", "step-00000009"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert torch.equal(load_file(tmp_path / "best.safetensors")["weight"], weights[1])


@pytest.mark.parametrize(("stop", "saved"), [(7, 6), (11, 9)])
@pytest.mark.parametrize("every", [None, 3])
@pytest.mark.parametrize("interval", ["epoch", "eval", "step"])
def test_a_run_that_goes_on_from_its_checkpoints_is_the_same(tmp_path, every, interval, stop, saved):
    """Killed in the middle of an epoch; the evaluation draws random numbers, the checkpoint hook comes first."""

    def run(engine, epochs, folder):
        hooks = [CheckpointHook(folder, every=every), LRSchedulerHook(interval), Killed(engine)]
        halfmesh.Trainer(engine).fit(epochs=epochs, hooks=hooks)
        return engine

    class Killed(halfmesh.Hook):
        def __init__(self, engine):
            self.dies = getattr(engine, "dies", None)

        def after_step(self, trainer, result):
            if trainer.engine.global_step == self.dies:
                raise KeyboardInterrupt

        def after_eval(self, trainer, results):
            torch.rand(3)

    def plateau(optimizer):
        if interval == "eval":
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, threshold=1e9, patience=0, factor=0.5)
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def shuffled():
        engine = make(scheduler=plateau, lr_interval="manual")
        torch.manual_seed(1)
        return engine

    expected = run(shuffled(), 5, tmp_path / "whole")
    engine = shuffled()
    engine.dies = stop
    with pytest.raises(KeyboardInterrupt):
        run(engine, 5, tmp_path / "killed")
    engine.wait_for_save()
    again = shuffled()
    assert again.load(tmp_path / "killed").name == f"step-{saved:08d}"
    run(again, 5, tmp_path / "killed")
    assert again.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"] < 0.1
    assert torch.equal(again.model.weight, expected.model.weight)


def test_the_best_weights_of_a_run_that_goes_on(tmp_path):
    def fit(engine, epochs, *values):
        hook = CheckpointHook(tmp_path, monitor="eval_score")
        halfmesh.Trainer(engine).fit(epochs=epochs, hooks=[Results(*values), hook])

    fit(make(), 2, 3.0, 1.0)
    best = load_file(tmp_path / "best.safetensors")["weight"]
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 6, "eval_score": 1.0}
    again = make()
    again.load(tmp_path)
    fit(again, 4, 2.0, 9.0)
    assert torch.equal(load_file(tmp_path / "best.safetensors")["weight"], best)
    fit(make(), 1, 5.0)  # a run that begins knows nothing of it
    assert json.loads((tmp_path / "best.json").read_text()) == {"step": 3, "eval_score": 5.0}


def test_an_epoch_that_was_left_early_is_no_epoch():
    engine = make(
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), lr_interval="manual"
    )
    halfmesh.Trainer(engine).fit(max_steps=4, hooks=[LRSchedulerHook("epoch")])
    assert engine.optimizer.param_groups[0]["lr"] == 0.05
    x, y = make_data(12)
    batches = [(x[i : i + 4], y[i : i + 4]) for i in (0, 4, 8)]
    for steps, lr in [(6, 0.05), (9, 0.025)]:
        halfmesh.Trainer(engine).fit(batches, max_steps=steps, hooks=[LRSchedulerHook("epoch")])
        assert engine.optimizer.param_groups[0]["lr"] == lr


@pytest.mark.parametrize("hook", [JSONLHook, CSVHook])
def test_a_file_that_is_there_is_renamed(tmp_path, hook, caplog):
    path = tmp_path / "data.jsonl"
    for text in ("mine\n", "mine, too\n"):
        path.write_text(text)
        halfmesh.Trainer(make()).fit(epochs=1, hooks=[hook(path)])
    assert (tmp_path / "data.1.jsonl").read_text() == "mine\n"
    assert (tmp_path / "data.2.jsonl").read_text() == "mine, too\n"
    assert f"{path} was there already, and is data.2.jsonl now" in caplog.text


def test_lines_that_are_no_records_stay(tmp_path):
    path, engine = tmp_path / "metrics.jsonl", make()
    halfmesh.Trainer(engine).fit(epochs=1)
    path.write_text('{"run": "a"}\n[1]\n{"step": 3}\n{"step": 4}\n')
    halfmesh.Trainer(engine).fit(epochs=1, hooks=[JSONLHook(path)])
    assert path.read_text().startswith('{"run": "a"}\n[1]\n{"step": 3}\n')
    assert '{"step": 4}' not in path.read_text()


def test_an_evaluation_that_is_made_again_is_one_record(tmp_path):
    path, engine = tmp_path / "metrics.jsonl", make()
    trainer = halfmesh.Trainer(engine)
    for _ in range(2):
        trainer.fit(epochs=1, hooks=[JSONLHook(path)])  # the second time nothing is left but the last evaluation
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [("loss" in line, "eval_loss" in line) for line in lines] == [(True, False), (False, True)]


def test_throughput_and_memory():
    results = Results()
    hooks = [ThroughputHook(tokens=lambda outcome: outcome.rows * 7, flops_per_sample=100.0), "memory", results]
    halfmesh.Trainer(make(), log_every=3).fit(epochs=1, hooks=hooks)
    record = results.records[0]
    assert record["samples_per_s"] > 0
    assert record["tokens_per_s"] == pytest.approx(7 * record["samples_per_s"])
    assert record["model_flops_per_s"] == pytest.approx(100 * record["samples_per_s"])
    assert "mfu" not in record  # of a CPU nobody knows
    assert 50 < record["memory_mib"] < 50_000


def test_evaluation_is_not_counted_in_throughput(monkeypatch):
    from halfmesh.hooks import throughput

    clock = iter(range(1000))
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: float(next(clock)))
    hook, trainer = ThroughputHook(), halfmesh.Trainer(make())  # 0
    hook.before_fit(trainer)  # 1
    hook.after_batch(trainer, halfmesh.Outcome(None, None, None, 6))
    hook.before_eval(trainer)  # 2
    hook.after_eval(trainer, {})  # 3: one second was spent elsewhere
    assert hook.measure(trainer) == {"samples_per_s": 6 / 2}  # 4 - 1 - 1


def test_the_share_of_what_a_device_can_do(monkeypatch):
    device = torch.device("cuda", 0)
    for name, half, tf32, fp32 in [
        ("NVIDIA H200", 989e12, 494e12, 67e12),
        ("NVIDIA L40S", 362e12, 183e12, 91.6e12),
        ("NVIDIA H100 PCIe", 756e12, 378e12, 51e12),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert least_seconds(device, {"torch.bfloat16": 3 * half}) == pytest.approx(3.0)
        assert least_seconds(device, {"torch.float32": fp32, "torch.float16": half}) == pytest.approx(2.0)
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
        assert least_seconds(device, {"torch.float32": tf32}) == pytest.approx(1.0)
        monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Abacus")
    assert least_seconds(device, {"torch.float32": 1.0}) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert least_seconds(device, {"torch.float64": 1.0}) is None
    assert least_seconds(torch.device("cpu"), {"torch.float32": 1.0}) is None
    assert list(PEAK_FLOPS).index("L40S") < list(PEAK_FLOPS).index("L4")
    for wrong in (0, True, "aut"):
        with pytest.raises(halfmesh.InputError, match=f"flops_per_sample={wrong!r}: expected a number greater than 0"):
            ThroughputHook(flops_per_sample=wrong)


def test_progress_in_plain_lines(caplog):
    halfmesh.Trainer(make(), log_every=2).fit(epochs=1, hooks=["progress"])
    lines = [line for line in caplog.messages if line.startswith("epoch")]
    assert lines[0].startswith("epoch 0  step 2  loss ")
    assert lines[-1].startswith("epoch 0  step 3  eval_loss ")


def test_progress_writes_a_loss_scale_in_full(caplog):
    """65536 is 65536 in the plan and in engine.loss_scale."""
    halfmesh.Trainer(make(fp16={"mode": "naive", "initial_scale": 65536}), log_every=2).fit(
        epochs=1, hooks=["progress"]
    )
    lines = [line for line in caplog.messages if line.startswith("epoch 0  step 2  loss ")]
    assert len(lines) == 1
    assert "  loss_scale 65536  " in lines[0]


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    halfmesh.Trainer(make(), log_every=1).fit(epochs=2, hooks=[ProgressHook()])
    shown = capsys.readouterr().err
    assert "epoch 0" in shown
    assert "3/3" in shown
    assert "eval_loss" in shown


def test_progress_of_an_epoch_that_goes_on(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    engine, again = make(), make()
    halfmesh.Trainer(engine).fit(max_steps=2)
    engine.save(tmp_path)
    again.load(tmp_path)
    halfmesh.Trainer(again).fit(epochs=1, hooks=[ProgressHook()])
    assert "3/3" in capsys.readouterr().err


def test_mistakes_of_hooks():
    with pytest.raises(halfmesh.InputError, match="mode='less': expected 'min'"):
        EarlyStopHook(mode="less")
    with pytest.raises(halfmesh.InputError, match="every=0: expected a whole number, 1 or more"):
        CheckpointHook("x", every=0)
    with pytest.raises(halfmesh.InputError, match="on='test': expected 'eval' or 'train'"):
        MetricHook({}, on="test")
    with pytest.raises(halfmesh.InputError, match=r"takes metrics by name, dict\(accuracy=Linear\(...\)\)"):
        MetricHook(nn.Linear(1, 1))
    with pytest.raises(halfmesh.InputError, match="metric 'acc': function is no Metric of torchmetrics"):
        MetricHook({"acc": make})
