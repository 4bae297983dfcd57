"""halfmesh check and halfmesh plan: what they print and write, with and without a model, and their exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfmesh import load_config
from tests.cli import run, words
from tests.support.llama import SMALL


@pytest.fixture
def check(tmp_path):
    def invoke(text, *args, name="config.py"):
        (tmp_path / name).write_text(text)
        return run("check", tmp_path / name, "--world-size", *args)

    return invoke


def plan(memory, *args):
    return run("plan", "--model", SMALL, "--world-size", 1, "--gpu-memory", memory, *args)


NAIVE = "fp16 = dict(mode='naive')\nclip_grad_norm = 1.0\ngradient_accumulation = 4\n"
SAID = "mode naive, float16 mesh pp 1 x dp 4 x tp 1, data strategy replicate gradient_accumulation 4, clip_grad"
ZERO1_ADVICE = "advice: parallel.data.strategy: 'zero1' has nothing to shard over one"


@pytest.mark.parametrize(
    ("config", "ranks", "said"),
    [
        (NAIVE, 4, [SAID]),
        ("fp16 = dict(mode='apex', opt_level='O0')\n", 1, ["mode apex O0, float32"]),
        ("parallel = dict(data='zero1')\n", 1, ["x tp 1, data strategy replicate", ZERO1_ADVICE]),
        ("parallel = dict(data='fsdp')\n", 1, ["x tp 1, data strategy fsdp"]),
        ("parallel = dict(expert=2)\n", 4, ["mesh pp 1 x dp 4 (edp 2 x ep 2) x tp 1"]),
    ],
)
def test_a_config_that_can_run(check, config, ranks, said):
    result = check(config, ranks)
    assert (result.exit_code, f"config.py: can run on {ranks} rank" in result.stdout) == (0, True)
    assert [each for each in said if each not in words(result.stdout)] == []


def test_json(check):
    result = check("print('noise')\n", 2, "--device", "cpu", "--json")
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"], answer["problems"], answer["findings"]) == (0, True, [], [])
    assert answer["plan"]["mesh"] == {"pp": 1, "dp": 2, "tp": 1}
    assert "noise" in result.stderr
    answer = json.loads(check("resume: auto\n", 1, "--json", name="config.yaml").stdout)
    assert (answer["ok"], answer["plan"]) == (False, None)
    assert [(row["kind"], row["where"]) for row in answer["findings"]] == [("rejected", "resume")]


def test_all_problems_at_once(check):
    for config, expected in (
        ("fp16 = dict(mode='apex', opt_levle='O2')\nlr = 3", ["config problems", "  - lr", "  - fp16.opt_levle"]),
        ("fp16 = dict(mode='apex')\nresume = 'auto'", ["rejected", "  - device", "  - resume"]),
    ):
        first, *lines = check(config, 8, "--device", "mps", "--model", SMALL).stdout.splitlines()
        assert first.endswith("config.py: cannot run on 8 ranks")
        assert [line.split(":")[0] for line in lines] == expected


def test_what_a_model_needs(check):
    result = check("bf16 = dict(mode='naive')\nparallel = dict(tensor=2)\n", 8, "--model", SMALL)
    lines = result.stdout.splitlines()
    assert lines[4] == "  one update with AdamW, batches of 8 rows per data rank, without allocating memory"
    assert [line[2:].split("  ")[0] for line in lines[5:]][:13] == [
        "bytes, each part at its largest", "parameters", "masters", "optimizer", "gradients", "communication",
        "activations", "temporary", "between two updates", "peak", "sent over dp", "sent over tp",
        "note: NCCL's buffers take another 300.0 MiB to 2.1 GiB, for 3 communicators (world, tp, dp)",
    ]  # fmt: skip


def test_the_picture_and_the_json_of_a_dry_run(check, tmp_path):
    args = (2, "--model", SMALL, "--gpu-memory", "1KB", "--json", "--picture", tmp_path / "mesh.svg")
    result = check("", *args)
    answer = json.loads(result.stdout)
    assert (result.exit_code, answer["ok"]) == (1, False)
    assert [answer["dry_run"][key] for key in ("fits", "limit", "batch_rows")] == [False, 1000, 8]
    assert "rank 1" in (tmp_path / "mesh.svg").read_text()


def test_a_planned_config_that_fits_is_written_and_drawn(tmp_path):
    config, out, picture = (tmp_path / name for name in ("config.py", "fits.py", "mesh.svg"))
    config.write_text('bf16 = dict(mode="torch")\nactivation_checkpoint = "selective"\nLIMIT = float("inf")\n')
    clip = "clip_grad_norm={max_norm: 1.0, norm_type: inf}"
    args = ("10MiB", config, "--set", "activation_checkpoint=false", "--set", clip, "--out", out, "--picture", picture)
    result = plan(*args)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "1 rank, batches of 8 rows per data rank, 8 rows in an update"
    assert lines[1].startswith("a rank may use 9.0 MiB of 10.0 MiB: 10% is reserved for CUDA")
    assert lines[3].startswith("     fits: rank 0 needs ")
    assert lines[-1] == f"written: {out}"
    assert out.read_text() == "\n".join([*lines[lines.index("") + 1 : -1], ""])
    assert load_config(out) == load_config(config, ["activation_checkpoint=false", clip])
    assert "rank 0" in picture.read_text()
    assert plan(*args).exit_code == 2, "the files exist"


def test_no_plan_fits(tmp_path):
    result = plan("1000KiB", "--set", "bf16.mode=torch", "--json", "--out", tmp_path / "fits.py")
    answer = json.loads(result.stdout)
    assert [answer[key] for key in ("ok", "chosen", "limit")] == [False, None, 1000 * 1024]
    (candidate,) = answer["options"]
    assert (result.exit_code, candidate["changes"]) == (1, [])
    assert candidate["needs"] > answer["limit"]
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_the_processes_without_tracebacks(tmp_path):
    (tmp_path / "slow_model.py").write_text("import time\n\ndef build():\n    time.sleep(60)\n")
    command = "-m halfmesh plan --model slow_model:build --world-size 2 --gpu-memory 1GB --device cpu"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"}
    options = {"cwd": tmp_path, "env": environment, "stderr": subprocess.PIPE, "text": True}
    started = subprocess.Popen([sys.executable, *command.split()], **options, start_new_session=True)
    assert started.stderr is not None
    assert started.stderr.readline().startswith("simulating 1: ")
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=30)[1]
    assert (started.returncode, "Traceback" in said) == (130, False)
