"""The Python that docs/ shows runs in one process, and prints what the pages show."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import halfmesh
from halfmesh import compat
from halfmesh.cli import app
from halfmesh.engine.ranges import _methods
from halfmesh.parallel.trial import find_unit
from halfmesh.report.run import read_run
from tests.support.pages import (
    check,
    find_blocks,
    find_rows,
    import_snippet,
    read_page,
    shown_commands,
    snippet,
    stand_ins,
)

pytestmark = pytest.mark.slow


def engine_of(names, config=None, **options):
    """Of what the snippets expect a user to have."""
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    return halfmesh.initialize(*given, {} if config is None else config, **options)


def train(engine):
    """An epoch; the last step's result."""
    for x, y in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        result = engine.step()
    return result


def shows(page, name, key, value):
    """A config that a page shows, and what is to be read from it."""
    return snippet(page, name), key, value


CONFIGS = [
    shows("memory.md", "config.py", "activation_checkpoint.label", "full"),
    shows("memory.md", "offload.py", "activation_offload", True),
    shows("benchmarks.md", "ranges.py", "profile_ranges", True),
    shows("compile.md", "config.py", "compile.enabled", True),
    shows("compile.md", "detail.py", "compile.scope", "blocks"),
    shows("precision.md", "fp8.py", "fp8.options.filter", ("*head", "blocks.0.*")),
    shows("precision.md", "denoiser.py", "bf16.options.keep_fp32", ("timestep", "batch.sigmas", "*fourier.weight")),
    shows("precision.md", "bf16.py", "bf16.mode", "torch"),
    shows("sharding.md", "config.py", "parallel.data.strategy", "zero1"),
    shows("sharding.md", "late_config.py", "parallel.data.overlap_param_gather", True),
    shows("sharding.md", "fsdp_config.py", "parallel.data.strategy", "fsdp"),
    shows("pipeline.md", "config.py", "parallel.pipeline.microbatches", 4),
    shows("pipeline.md", "split_config.py", "parallel.pipeline.partition", ("layers.2",)),
    shows("expert-parallel.md", "config.py", "parallel.expert.size", 4),
    shows("context-parallel.md", "config.py", "parallel.context.size", 2),
    shows("tensor-parallel.md", "config.py", "parallel.tensor.size", 2),
    shows("tensor-parallel.md", "vocab_parallel.py", "parallel.tensor.plan.lm_head", "vocab_parallel"),
]


def test_configs_can_run(tmp_path):
    for text, key, value in CONFIGS:
        (tmp_path / "config.py").write_text(text)
        config = halfmesh.load_config(tmp_path / "config.py")
        found = config
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert (found, compat.check(config, 8, "cuda")) == (value, []), text


def test_python_and_yaml_are_one_config(run, capsys):
    names = run("config.md", "look.py", files=("config.py",))
    Path("same.yaml").write_text(find_blocks(read_page("config.md"), "yaml")[0])
    assert names["config"] == halfmesh.load_config("same.yaml")
    assert compat.check(names["config"], 4) == []
    assert "1000 zero1 0.004" in capsys.readouterr().out
    assert (names["longer"].gradient_accumulation, names["config"].gradient_accumulation) == (8, 4)


def test_a_launch_under_slurm(run, monkeypatch):
    for name, value in {"SLURM_PROCID": 0, "SLURM_NPROCS": 1, "SLURM_LOCALID": 0, "HEAD": "node0"}.items():
        monkeypatch.setenv(name, str(value))
    with run("nodes.md", "slurm.py", files=("config.py",))["launch"] as launch:
        assert (launch.rank, launch.world_size, launch.config.GLOBAL_BATCH) == (0, 1, 8)


# --- what runs as it stands -----------------------------------------------------------------------------------------


def alone(page, name, holds=lambda names: True, printed=None):
    """A snippet that needs what users have, and nothing else; `printed`: which block of the page is its output."""
    return pytest.param(page, name, holds, printed, id=f"{page} {name}")


@pytest.mark.parametrize(
    ("page", "name", "holds", "printed"),
    [
        alone("loop.md", "train.py", lambda names: names["engine"].global_step == 45 and names["loss"] < 0.5),
        alone("loop.md", "schedule.py", lambda names: names["engine"].lr_scheduler.total_steps == 45),
        alone("precision.md", "alone.py", lambda names: names["optimizer"].loss_scale <= 1024 and names["loss"] < 0.7),
    ],
)
def test_it_runs_as_it_stands(page, name, holds, printed, run, capsys):
    assert holds(run(page, name))
    assert printed is None or capsys.readouterr().out == find_blocks(read_page(page), "")[printed]


# --- the loop, precision, checkpoints -------------------------------------------------------------------------------


def test_loops_on_an_engine_that_is_there(run):
    names = stand_ins()
    engine = engine_of(names, eval_dataloader=names["eval_dataloader"])
    train(engine)
    evaluated = run("loop.md", "evaluation.py", given={"engine": engine})
    assert evaluated["counts"][1] == 60
    assert 0.5 < evaluated["accuracy"] <= 1

    names = stand_ins()
    engine = engine_of(names | {"dataloader": None}, {"gradient_accumulation": 4})
    run("loop.md", "own_loader.py", given={"engine": engine, "my_batches": list(names["dataloader"])})
    assert engine.global_step == 4

    engine = engine_of(stand_ins(), {"fp16": {"mode": "naive"}, "track_grad_norm": True})
    run("loop.md", "clip_each.py", given={"engine": engine})
    assert engine.skipped_steps < engine.global_step == 15
    assert engine.grad_norm <= 0.3 * len(list(engine.model.parameters())) ** 0.5 + 1e-3

    names = stand_ins()
    names["engine"] = engine_of(names, {"bf16": {"mode": "naive"}})
    run("precision.md", "average.py", given={"torch": torch, **names})
    assert Path("average.safetensors").exists()


def test_a_gan(run):
    given = {name: value for name, value in stand_ins().items() if name == "dataloader"}
    given |= {"net_g": nn.Linear(4, 6), "net_d": nn.Linear(6, 1), "criterion": nn.BCEWithLogitsLoss()}
    given |= {f"adam_{name}": torch.optim.Adam(given[f"net_{name}"].parameters(), lr=0.01) for name in "gd"}
    before = [given[name].weight.clone() for name in ("net_g", "net_d")]
    names = run("several-models.md", "gan.py", given={"torch": torch, "halfmesh": halfmesh, **given})
    assert [names[name].global_step for name in ("generator", "discriminator")] == [15, 15]
    assert not any(map(torch.equal, before, (given[name].weight for name in ("net_g", "net_d"))))


def test_criteria(run):
    criterion = run("loop.md", "weighted.py")["criterion"]
    output, target = torch.randn(6, 3), torch.tensor([0, -100, 2, -100, 1, 1])
    total, weight = criterion(output, target)
    torch.testing.assert_close(total / weight, torch.nn.functional.cross_entropy(output, target))


def test_optimizers(run):
    names = run("several-models.md", "muon.py")
    engine, before = names["engine"], [param.clone() for param in names["model"].parameters()]
    train(engine)
    assert not any(map(torch.equal, before, names["model"].parameters()))
    assert [scheduler.last_epoch for scheduler in engine.lr_scheduler] == [15, 15]

    kind = run("several-models.md", "unit.py")["NormalizedSGD"]
    assert find_unit(kind([torch.nn.Parameter(torch.ones(4, 4))], lr=0.1)) == "matrix"


def test_an_island_of_fp32(run):
    model = run("precision.md", "island.py", given={})["Attention"](4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, sgd, None, None, {"bf16": {"mode": "torch"}})
    assert engine(torch.randn(2, 3, 4)).dtype == torch.float32


def test_checkpoints_by_hand(run):
    first, again = engine_of(stand_ins()), engine_of(stand_ins())
    train(first)
    first.save("checkpoints")
    train(first)
    run("checkpoints.md", "by_hand.py", given={"engine": again, "train_one_epoch": train})
    assert {path.name for path in Path("checkpoints").glob("step-*")} == {"step-00000015", "step-00000030"}
    expected = first.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in again.model.state_dict().items())


def test_weights_of_a_checkpoint_in_plain_pytorch(run):
    pytest.importorskip("safetensors")
    trained = engine_of(stand_ins(), {"fp16": {"mode": "naive"}})
    train(trained)
    trained.save("checkpoints")
    expected = trained.full_state_dict()
    run("checkpoints.md", "weights.py")
    loaded = run("checkpoints.md", "plain.py")["model"].state_dict()
    torch.testing.assert_close(dict(loaded), expected, rtol=0, atol=0)
    assert not torch.equal(loaded["0.weight"], stand_ins()["model"].state_dict()["0.weight"])


def test_a_tracker_in_ones_own_loop(run):
    names, logged = stand_ins(), []
    engine = engine_of(names)
    tracker = SimpleNamespace(log=lambda values, step: logged.append((step, values)))
    for x, y in engine.dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        run("logging.md", "own_loop.py", given={"engine": engine, "loss": loss, "wandb": tracker})
    ((step, values),) = logged
    assert (step, values["lr"]) == (10, 0.02)
    assert 0 < values["loss"] < 1


def test_other_settings_than_those_of_the_checkpoint(run):
    def start(rate, decay):
        names = stand_ins()
        names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=rate, weight_decay=decay)
        scheduler = halfmesh.LinearWarmupLR(names["optimizer"], warmup_steps=1, total_steps=200)
        return engine_of(names, lr_scheduler=scheduler)

    first, again = start(0.02, 0.01), start(0.005, 0.1)
    train(first)
    first.save("checkpoints")
    run("checkpoints.md", "other_settings.py", given={"engine": again})
    assert again.optimizer.param_groups[0]["weight_decay"] == 0.1
    again.dataloader.set_epoch(1)
    assert 0.004 < train(again).lr < 0.005


def test_a_program_that_is_told_to_end_goes_on(run):
    names = stand_ins()
    criterion, counted = names["criterion"], []

    def criterion_of_step_12(*args):
        counted.append(1)
        if len(counted) == 12:
            os.kill(os.getpid(), signal.SIGTERM)
        return criterion(*args)

    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    try:
        with pytest.raises(halfmesh.Preempted):
            run("checkpoints.md", "train.py", given=names | {"criterion": criterion_of_step_12})
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert {path.name for path in Path("checkpoints").glob("step-*")} == {"step-00000010", "step-00000012"}
    assert run("checkpoints.md", "train.py")["engine"].global_step == 45


# --- trainer, hooks, report, health ---------------------------------------------------------------------------------


def test_the_trainer(run):
    pytest.importorskip("torchmetrics")
    pytest.importorskip("safetensors")
    given = stand_ins()
    names = run("trainer.md", "train.py", given=given | {"config": {}, "test_dataloader": given["eval_dataloader"]})
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert {"eval_loss", "eval_accuracy"} <= set(lines[-1])
    assert Path("run/best.safetensors").exists()
    assert len(names["outputs"]) == 60


def test_logging(run, caplog):
    pytest.importorskip("tensorboard")
    names = stand_ins()
    engine = engine_of(names, eval_dataloader=names["eval_dataloader"])
    run("logging.md", "train.py", given={"halfmesh": halfmesh, "engine": engine})
    shown = find_blocks(read_page("logging.md"), "")[0].splitlines()
    logged = [message for message in caplog.messages if message.startswith("epoch")][: len(shown)]
    any_size = [re.sub(r"# \w*(FLOP/s|iB)", r"# \1", words(line.replace(",", ""))) for line in shown + logged]
    assert any_size[: len(shown)] == any_size[len(shown) :]
    assert list(Path("logs").glob("events*"))

    calls = []
    tracker = SimpleNamespace(log=lambda record, step: calls.append((step, record["loss"])))
    hook = run("logging.md", "my_tracker.py", given={"tracker": tracker})["MyTracker"]()
    halfmesh.Trainer(engine_of(stand_ins())).fit(epochs=1, hooks=[hook])
    assert [step for step, _ in calls] == [10, 15]


def test_a_compute_of_ones_own(run):
    names, records = run("trainer.md", "compute.py"), []
    keep = halfmesh.Hook()
    keep.write = lambda trainer, record: records.append(record)
    halfmesh.Trainer(engine_of(names), compute=names["f"]).fit(epochs=1, hooks=[keep])
    assert records[-1]["loss"] > 0


def test_a_hook_that_measures(run):
    names, records = run("trainer.md", "weight_hook.py"), []
    keep = halfmesh.Hook()
    keep.write = lambda trainer, record: records.append(record)
    halfmesh.Trainer(engine_of(names)).fit(epochs=1, hooks=[names["LargestWeightHook"](), keep])
    largest = max(param.abs().max().item() for param in names["model"].parameters())
    assert records[-1]["largest_weight"] == pytest.approx(largest)


def test_profiles(run):
    given = stand_ins()
    engine = engine_of(given, {"profile_ranges": True})
    run("trainer.md", "profile.py", given={"trainer": halfmesh.Trainer(engine)})
    assert [path.name for path in Path("run/profile").iterdir()] == ["updates-10-15.rank0.json.gz"]
    x, y = next(iter(engine.dataloader))
    with torch.profiler.profile() as trace:
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    assert {"halfmesh.forward", "halfmesh.update"} <= {event.key for event in trace.key_averages()}
    rows = [row[0].strip("`") for row in find_rows(read_page("benchmarks.md"), "range")]
    found = {f"halfmesh.{name}" for _, _, name in _methods(engine)} | {"halfmesh.send_bucket", "halfmesh.reduce"}
    assert set(rows) == found


def test_settings_of_torch_for_a_gpu():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    try:
        for setting, _ in find_rows(read_page("benchmarks.md"), "setting")[:2]:
            exec(setting.strip("`"), {"torch": torch})
        assert (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.benchmark) == ("tf32", True)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.benchmark = before[1]
        torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


def test_the_report(run):
    run("report.md", "train.py", given=stand_ins())
    with engine_of(stand_ins(), {"fp16": {"mode": "naive"}}) as engine:
        run("report.md", "loop.py", given={"engine": engine, "halfmesh": halfmesh})
    first, second = (read_run(Path("runs", name)) for name in ("first", "second"))
    assert {"loss", "eval_loss", "samples_per_s", "memory_mib", "loss_scale"} <= set(first.series)
    assert {"loss", "lr", "loss_scale"} <= set(second.series)
    assert first.session["status"] == second.session["status"] == "finished"
    assert "findings" in first.precision["report"]
    for line in find_blocks(read_page("report.md"), "console")[0].splitlines():
        assert CliRunner().invoke(app, shlex.split(line.removeprefix("$ halfmesh "))).exit_code == 0, line
    assert Path("both.html").exists()


class Attention(nn.Module):
    """One head, whose scores nobody divides."""

    def __init__(self, width):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.scores = Scores()

    def forward(self, x):
        return self.scores(self.query(x), self.key(x)).softmax(-1) @ self.value(x)


class Scores(nn.Module):
    def forward(self, query, key):
        return 200 * query @ (200 * key).transpose(-2, -1)


def fp16_engine(model, options, **config):
    adam = torch.optim.AdamW(model.parameters())
    return halfmesh.initialize(model, adam, nn.CrossEntropyLoss(), config={"fp16": options, **config}, device="cpu")


def words(text):
    """Without the digits that depend on how a machine rounds, and where lines are broken."""
    return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?%?", "#", " ".join(text.split()))


def test_the_diagnosis_and_the_precision_report(run, capsys):
    message, report = find_blocks(read_page("health.md"), "")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), Attention(16), nn.Linear(16, 4))
    engine = fp16_engine(model, {"mode": "torch", "init_scale": 1024.0}, max_consecutive_skips=4)
    x, y = 5 * torch.randn(2, 6, 8), torch.randint(4, (12,))

    def train_on():
        for _ in range(4):
            engine.backward(engine.criterion(engine(x).view(12, 4), y))
            engine.step()

    with pytest.raises(halfmesh.NonFiniteError) as caught:
        train_on()
    assert words(str(caught.value)) == words(message)

    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)]
    engine = fp16_engine(nn.Sequential(*layers), {"mode": "naive", "loss_scale": 1.0})
    capsys.readouterr()
    for _ in range(3):
        x, y = torch.randn(8192, 8), torch.randint(10, (8192,))
        run("health.md", "report.py", given={"engine": engine, "x": x, "y": y})
    assert words(capsys.readouterr().out).endswith(words(report))


# --- an AMP plugin --------------------------------------------------------------------------------------------------


def loss_after_training(config):
    names = stand_ins()
    with engine_of(names, config) as engine:
        for _ in range(3):
            train(engine)
    x, y = next(iter(names["dataloader"]))
    return names["criterion"](names["model"](x), y).item()


def test_an_amp_plugin(run, tmp_path):
    careful = import_snippet("extending.md", "careful_amp.py", tmp_path)
    try:
        run("extending.md", files=("config.py",))
        config = halfmesh.load_config("config.py")
        assert careful.CarefulAMP.recipe(config.fp16.options, torch.float16).loss_scale.min_scale == 256.0
        assert loss_after_training(config) == pytest.approx(loss_after_training({}), rel=1e-2)
        with pytest.raises(halfmesh.ConfigError, match=r"bf16\.floor: bf16 has the range of fp32"):
            halfmesh.load_config({"bf16": {"mode": "careful", "floor": 1.0}})
        wrong = "fp16 = dict(mode='careful')\nparallel = dict(pipeline=dict(size=2, microbatches=2))\n"
        Path("wrong.py").write_text(wrong)
        ((command, expected),) = shown_commands("extending.md")
        assert check(command) == expected
        assert "| careful bf16 | yes |" in compat.render_table()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("careful_amp")
        halfmesh.AMP_PLUGINS.unregister("careful")
