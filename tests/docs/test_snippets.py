"""The Python that docs/ shows runs in one process, and prints what the pages show."""

import json
import re
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

import halfmesh
from halfmesh import compat
from halfmesh.cli import app
from halfmesh.parallel.trial import find_unit
from halfmesh.report.run import read_run
from tests.support.models import train
from tests.support.pages import check, find_blocks, import_snippet, read_page, shown_commands, snippet, stand_ins

pytestmark = pytest.mark.slow


def engine_of(names, config=None, **options):
    """Of what the snippets expect a user to have."""
    given = [names[name] for name in ("model", "optimizer", "criterion", "dataloader")]
    return halfmesh.initialize(*given, {} if config is None else config, **options)


CONFIGS = [  # that a page shows, and what is to be read from them
    ("memory.md", "config.py", "activation_checkpoint.label", "full"),
    ("memory.md", "offload.py", "activation_offload", True),
    ("benchmarks.md", "ranges.py", "profile_ranges", True),
    ("compile.md", "config.py", "compile.enabled", True),
    ("compile.md", "detail.py", "compile.scope", "blocks"),
    ("precision.md", "fp8.py", "fp8.options.filter", ("*head", "blocks.0.*")),
    ("precision.md", "denoiser.py", "bf16.options.keep_fp32", ("timestep", "batch.sigmas", "*fourier.weight")),
    ("precision.md", "bf16.py", "bf16.mode", "torch"),
    ("sharding.md", "config.py", "parallel.data.strategy", "zero1"),
    ("sharding.md", "late_config.py", "parallel.data.overlap_param_gather", True),
    ("sharding.md", "fsdp_config.py", "parallel.data.strategy", "fsdp"),
    ("pipeline.md", "config.py", "parallel.pipeline.microbatches", 4),
    ("pipeline.md", "split_config.py", "parallel.pipeline.partition", ("layers.2",)),
    ("expert-parallel.md", "config.py", "parallel.expert.size", 4),
    ("context-parallel.md", "config.py", "parallel.context.size", 2),
    ("tensor-parallel.md", "config.py", "parallel.tensor.size", 2),
    ("tensor-parallel.md", "vocab_parallel.py", "parallel.tensor.plan.lm_head", "vocab_parallel"),
]


def test_configs_can_run(tmp_path):
    for page, name, key, value in CONFIGS:
        (tmp_path / "config.py").write_text(snippet(page, name))
        config = found = halfmesh.load_config(tmp_path / "config.py")
        for part in key.split("."):
            found = found[part] if isinstance(found, dict) else getattr(found, part)
        assert (found, compat.check(config, 8, "cuda")) == (value, []), (page, name)


def test_python_and_yaml_are_one_config(run, capsys):
    names = run("config.md", "look.py", files=("config.py",))
    Path("same.yaml").write_text(find_blocks(read_page("config.md"), "yaml")[0])
    assert names["config"] == halfmesh.load_config("same.yaml")
    assert "1000 zero1 0.004" in capsys.readouterr().out
    assert names["longer"].gradient_accumulation == 8


def test_a_launch_under_slurm(run, monkeypatch):
    for name, value in {"SLURM_PROCID": 0, "SLURM_NPROCS": 1, "SLURM_LOCALID": 0, "HEAD": "node0"}.items():
        monkeypatch.setenv(name, str(value))
    with run("nodes.md", "slurm.py", files=("config.py",))["launch"] as launch:
        assert (launch.rank, launch.world_size, launch.config.GLOBAL_BATCH) == (0, 1, 8)


def with_engine(config=None):
    names = stand_ins()
    engine = engine_of(names, config, eval_dataloader=names["eval_dataloader"])
    return {"torch": torch, **names, "halfmesh": halfmesh, "engine": engine}


def for_own_loader():
    names = stand_ins()
    engine = engine_of(names | {"dataloader": None}, {"gradient_accumulation": 4})
    return {"engine": engine, "my_batches": list(names["dataloader"])}


def for_gan():
    nets = {"net_g": nn.Linear(4, 6), "net_d": nn.Linear(6, 1)}
    adams = {f"adam_{name}": torch.optim.Adam(nets[f"net_{name}"].parameters(), lr=0.01) for name in "gd"}
    given = {"torch": torch, "halfmesh": halfmesh, "criterion": nn.BCEWithLogitsLoss()}
    return given | nets | adams | {"dataloader": stand_ins()["dataloader"]}


def weighs(names):
    output, target = torch.randn(6, 3), torch.tensor([0, -100, 2, -100, 1, 1])
    total, weight = names["criterion"](output, target)
    return torch.allclose(total / weight, cross_entropy(output, target))


def trains_with_muon(names):
    before = [param.clone() for param in names["model"].parameters()]
    return train(names["engine"]) and not any(map(torch.equal, before, names["model"].parameters()))


def island_is_fp32(names):
    model = names["Attention"](4)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, sgd, None, None, {"bf16": {"mode": "torch"}})
    return engine(torch.randn(2, 3, 4)).dtype == torch.float32


def normalizes(names):
    return find_unit(names["NormalizedSGD"]([nn.Parameter(torch.ones(4, 4))], lr=0.1)) == "matrix"


def records_of(engine, hooks=(), **options):
    records, keep = [], halfmesh.Hook()
    keep.write = lambda trainer, record: records.append(record)
    halfmesh.Trainer(engine, **options).fit(epochs=1, hooks=[*hooks, keep])
    return records[-1]


def measures(names):
    record = records_of(engine_of(names), hooks=[names["LargestWeightHook"]()])
    largest = max(param.abs().max().item() for param in names["model"].parameters())
    return record["largest_weight"] == pytest.approx(largest)


def with_a_checkpoint():
    names = with_engine()
    train(names["engine"])
    names["engine"].save("checkpoints")
    return names


def for_trainer():
    trainer = halfmesh.Trainer(engine_of(stand_ins(), {"profile_ranges": True}))
    return stand_ins() | {"config": {}, "test_dataloader": stand_ins()["eval_dataloader"], "trainer": trainer}


def trainer_evaluates(names):
    assert {"eval_loss", "eval_accuracy"} <= set(json.loads(Path("run/metrics.jsonl").read_text().splitlines()[-1]))
    return Path("run/best.safetensors").exists() and len(names["outputs"]) == 60


def with_norms():
    return with_engine({"fp16": {"mode": "naive"}, "track_grad_norm": True})


CASES = [  # what is given to a snippet (by default what a user has), and what holds then
    ("loop.md", "train.py", lambda names: names["engine"].global_step == 45 and names["loss"] < 0.5),
    ("loop.md", "schedule.py", lambda names: names["engine"].lr_scheduler.total_steps == 45),
    ("loop.md", "weighted.py", weighs),
    ("loop.md", "evaluation.py", lambda names: names["counts"][1] == 60, with_engine),
    ("loop.md", "own_loader.py", lambda names: names["engine"].global_step == 4, for_own_loader),
    ("loop.md", "clip_each.py", lambda names: names["engine"].grad_norm <= 0.601, with_norms),
    ("checkpoints.md", "train.py", lambda names: names["engine"].global_step == 45),
    ("checkpoints.md", "other_settings.py", lambda names: names["engine"].global_step, with_a_checkpoint),
    ("precision.md", "alone.py", lambda names: names["optimizer"].loss_scale <= 1024 and names["loss"] < 0.7),
    ("precision.md", "average.py", lambda _: Path("average.safetensors").exists(), with_norms),
    ("precision.md", "island.py", island_is_fp32),
    ("several-models.md", "gan.py", lambda names: names["discriminator"].global_step == 15, for_gan),
    ("several-models.md", "muon.py", trains_with_muon),
    ("several-models.md", "unit.py", normalizes),
    ("trainer.md", "compute.py", lambda names: records_of(engine_of(names), compute=names["f"])["loss"]),
    ("trainer.md", "weight_hook.py", measures),
    ("trainer.md", "train.py", trainer_evaluates, for_trainer),
    ("trainer.md", "profile.py", lambda _: Path("run/profile/updates-10-15.rank0.json.gz").exists(), for_trainer),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]}")
def test_it_runs(case, run):
    page, name, holds, *given = case
    assert holds(run(page, name, given=given[0]() if given else None))


def test_checkpoints_by_hand_and_their_weights_in_plain_pytorch(run):
    first, again = (engine_of(stand_ins(), {"fp16": {"mode": "naive"}}) for _ in range(2))
    train(first)
    first.save("checkpoints")
    train(first)
    run("checkpoints.md", "by_hand.py", given={"engine": again, "train_one_epoch": train})
    assert {path.name for path in Path("checkpoints").glob("step-*")} == {"step-00000015", "step-00000030"}
    expected = first.full_state_dict()
    torch.testing.assert_close(again.full_state_dict(), expected, rtol=0, atol=0)
    run("checkpoints.md", "weights.py")
    loaded = run("checkpoints.md", "plain.py")["model"].state_dict()
    torch.testing.assert_close(dict(loaded), expected, rtol=0, atol=0)


def test_logging(run):
    run("logging.md", "train.py", given=with_engine())
    assert list(Path("logs").glob("events*"))
    calls = []
    tracker = SimpleNamespace(log=lambda record, step: calls.append((step, record["loss"])))
    hook = run("logging.md", "my_tracker.py", given={"tracker": tracker})["MyTracker"]()
    halfmesh.Trainer(engine_of(stand_ins())).fit(epochs=1, hooks=[hook])
    engine = engine_of(stand_ins())
    for x, y in engine.dataloader:
        loss = engine.criterion(engine(x), y)
        engine.backward(loss)
        run("logging.md", "own_loop.py", given={"engine": engine, "loss": loss, "wandb": tracker})
    assert [step for step, _ in calls] == [10, 15, 10]


def test_the_report(run):
    run("report.md", "train.py", given=stand_ins())
    with engine_of(stand_ins(), {"fp16": {"mode": "naive"}}) as engine:
        run("report.md", "loop.py", given={"engine": engine, "halfmesh": halfmesh})
    assert {"loss", "eval_loss", "samples_per_s", "memory_mib"} <= set(read_run(Path("runs/first")).series)
    for line in find_blocks(read_page("report.md"), "console")[0].splitlines():
        assert CliRunner().invoke(app, shlex.split(line.removeprefix("$ halfmesh "))).exit_code == 0, line
    assert Path("both.html").exists()


def test_the_precision_report(run, capsys):
    def words(text):
        """Without the digits that depend on how a machine rounds, and where lines are broken."""
        return re.sub(r"[-+]?\d+(\.\d+)?(e[-+]\d+)?%?", "#", " ".join(text.split()))

    torch.manual_seed(0)
    layers = [nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)]
    model, config = nn.Sequential(*layers), {"fp16": {"mode": "naive", "loss_scale": 1.0}}
    engine = halfmesh.initialize(model, torch.optim.AdamW, nn.CrossEntropyLoss(), config=config, device="cpu")
    capsys.readouterr()
    for _ in range(3):
        x, y = torch.randn(8192, 8), torch.randint(10, (8192,))
        run("health.md", "report.py", given={"engine": engine, "x": x, "y": y})
    assert words(capsys.readouterr().out).endswith(words(find_blocks(read_page("health.md"), "")[1]))


def test_an_amp_plugin(run, tmp_path):
    careful = import_snippet("extending.md", "careful_amp.py", tmp_path)
    try:
        run("extending.md", files=("config.py",))
        config = halfmesh.load_config("config.py")
        assert careful.CarefulAMP.recipe(config.fp16.options, torch.float16).loss_scale.min_scale == 256.0
        assert not train(engine_of(stand_ins(), config))[-1].skipped
        wrong = "fp16 = dict(mode='careful')\nparallel = dict(pipeline=dict(size=2, microbatches=2))\n"
        Path("wrong.py").write_text(wrong)
        ((command, expected),) = shown_commands("extending.md")
        assert check(command) == expected
        assert "| careful bf16 | yes |" in compat.render_table()
    finally:
        sys.path.remove(str(tmp_path))
        sys.modules.pop("careful_amp")
        halfmesh.AMP_PLUGINS.unregister("careful")
