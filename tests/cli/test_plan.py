"""halfmesh plan: what it prints and writes, and its exit status."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from halfmesh import load_config
from halfmesh.cli import app
from tests.support.llama import SMALL

ARGS = ("--world-size", "1", "--gpu-memory")


def run(*args, model=SMALL):
    return CliRunner().invoke(app, ["plan", "--model", model, *map(str, args)])


def test_a_config_that_fits_is_written_and_drawn(tmp_path):
    config, out, picture = (tmp_path / name for name in ("config.py", "fits.py", "mesh.svg"))
    config.write_text('bf16 = dict(mode="torch")\nactivation_checkpoint = "selective"\nLIMIT = float("inf")\n')
    clip = "clip_grad_norm={max_norm: 1.0, norm_type: inf}"
    args = (config, "--set", "activation_checkpoint=false", "--set", clip, *ARGS, "10MiB")
    result = run(*args, "--out", out, "--picture", picture)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        "1 rank, batches of 8 rows per data rank, 8 rows in an update",
        "a rank may use 9.0 MiB of 10.0 MiB: 10% is reserved for CUDA, NCCL and the allocator",
        "1. the config as it is",
    ]
    assert lines[3].startswith("     fits: rank 0 needs ")
    assert result.stderr == "simulating 1: the config as it is\n"
    assert lines[-1] == f"written: {out}"
    assert out.read_text() == "\n".join([*lines[lines.index("") + 1 : -1], ""])
    assert load_config(out) == load_config(config, ["activation_checkpoint=false", clip])
    assert "norm_type='inf'" in out.read_text()
    assert "LIMIT = float('inf')" in out.read_text()
    assert "rank 0" in picture.read_text()
    rejected = run(*args, "--out", out)
    assert rejected.exit_code == 2
    assert "the file exists; --force replaces it" in rejected.output


FITS_BY_A_CHANGE = ("--world-size", "8", "--gpu-memory", "6MB")


def test_progress_in_plain_lines():
    result = run(*FITS_BY_A_CHANGE)
    first, second, *_ = result.stderr.splitlines()
    assert first == "simulating 1: the config as it is"
    assert re.fullmatch(r"simulating 2 of up to \d+: bf16.mode=torch", second)
    assert "a rank may use 5.1 MiB of 5.7 MiB (6 MB): " in result.stdout
    assert "on 8 ranks of 5.7 MiB (6 MB), AdamW." in result.stdout
    assert "\x1b" not in result.output
    answer = run(*FITS_BY_A_CHANGE, "--json")
    assert json.loads(answer.stdout)["batch_rows"] == 8, "and nothing else on stdout"
    assert answer.stderr == result.stderr


@pytest.mark.parametrize("colors", [True, False])
def test_progress_on_a_terminal(colors, tmp_path):
    """One line that is removed at the end; the chosen config is in color."""
    script, frames = shutil.which("script"), tmp_path / "shown"
    if script is None or sys.platform != "linux":
        pytest.skip("needs the command script")
    command = shlex.join([sys.executable, "-m", "halfmesh", "plan", "--model", SMALL, *FITS_BY_A_CHANGE])
    env = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR")}
    env |= {"TERM": "xterm-256color", "COLUMNS": "100"} | ({} if colors else {"NO_COLOR": "1"})
    subprocess.run([script, "-qec", command, frames], env=env, stdin=subprocess.DEVNULL, check=True, timeout=120)
    shown = frames.read_text()
    assert re.search(r"simulating [2-6] of up to \d+, 0:\d\d ", shown)
    *_, last = shown.rpartition("simulating")
    assert "\x1b[2K" in last.partition("8 ranks, batches of")[0], "the line is removed"
    assert "# Made by halfmesh plan" in last
    assert ("\x1b[1;32mbf16 = dict(mode='torch')" in last) is colors


def test_nothing_fits(tmp_path):
    out = tmp_path / "fits.py"
    result = run("--set", "bf16.mode=torch", *ARGS, "1000KiB", "--json", "--out", out)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["chosen"], answer["limit"]) == (False, None, 1000 * 1024)
    (candidate,) = answer["options"]
    assert (candidate["changes"], candidate["update_simulated"]) == ([], False)
    assert candidate["needs"] > answer["limit"]
    assert not out.exists()


def test_a_model_that_cannot_be_trained(tmp_path, monkeypatch):
    text = "def build():\n    m, i, c = llama.small()\n    return m.requires_grad_(False), i, c\n"
    (tmp_path / "frozen_llama.py").write_text(f"from tests.support import llama\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(*ARGS, "1GB", model="frozen_llama:build")
    assert result.exit_code == 1
    assert result.stdout.startswith("frozen_llama:build cannot be simulated with the config as it is")
    result = run(*ARGS, "1GB", model="tests.support.llama:smal")
    assert result.exit_code == 1
    assert "did you mean 'small'?" in result.stdout


@pytest.mark.parametrize(
    ("args", "model", "words"),
    [
        (("--world-size", "0", "--gpu-memory", "1GB"), SMALL, "Invalid value for '--world-size'"),
        ((*ARGS, "80"), SMALL, "'80' is 80 bytes; did you mean 80GB?"),
        (
            (*ARGS, "1GB", "--out", "/proc/config.py"),
            SMALL,
            "--out /proc/config.py: it cannot be written (No such file",
        ),
        ((*ARGS, "1GB", "--picture", "/proc/a.svg"), SMALL, "--picture /proc/a.svg: it cannot be written (No such fil"),
        ((*ARGS, "1GB", "--out", "/none/config.py"), SMALL, "there is no directory /none"),
        ((*ARGS, "1GB", "--out", "/none/fits.txt"), SMALL, "--out /none/fits.txt: give a name that ends in .py"),
        (
            (*ARGS, "1GB", "--picture", "/none/mesh.png"),
            SMALL,
            "--picture /none/mesh.png: give a name that ends in .svg",
        ),
        (("none.py", *ARGS, "1GB"), SMALL, "there is no such file"),
    ],
)
def test_what_is_rejected(args, model, words):
    result = run(*args, model=model)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("\u2502", "").split())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("clip_grad_nrm=1", "clip_grad_nrm: unknown key; did you mean"),
        ("parallel.tensor=2", "= 2 ranks, but there is 1; start them with `torchrun"),
    ],
)
def test_a_config_that_cannot_run(change, words):
    result = run(*ARGS, "1GB", "--set", change)
    assert result.exit_code == 1
    first, title, problem = result.stdout.splitlines()
    assert (first, title) == ("the empty config: cannot run on 1 rank", "config problems:")
    assert words in problem
    answer = json.loads(run(*ARGS, "1GB", "--set", change, "--json").stdout)
    assert (answer["ok"], words in answer["problems"][0]) == (False, True)
