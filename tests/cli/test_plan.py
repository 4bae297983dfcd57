"""halfmesh plan: what it prints and writes, and its exit status."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from halfmesh import load_config
from tests.cli import run as halfmesh
from tests.cli import words
from tests.support.llama import SMALL


def run(memory, *args, ranks=1, model=SMALL):
    return halfmesh("plan", "--model", model, "--world-size", ranks, "--gpu-memory", memory, *args)


def test_a_config_that_fits_is_written_and_drawn(tmp_path):
    config, out, picture = (tmp_path / name for name in ("config.py", "fits.py", "mesh.svg"))
    config.write_text('bf16 = dict(mode="torch")\nactivation_checkpoint = "selective"\nLIMIT = float("inf")\n')
    clip = "clip_grad_norm={max_norm: 1.0, norm_type: inf}"
    args = ("10MiB", config, "--set", "activation_checkpoint=false", "--set", clip, "--out", out, "--picture", picture)
    result = run(*args)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == "1 rank, batches of 8 rows per data rank, 8 rows in an update"
    assert lines[1].startswith("a rank may use 9.0 MiB of 10.0 MiB: 10% is reserved for CUDA")
    assert lines[3].startswith("     fits: rank 0 needs ")
    assert lines[-1] == f"written: {out}"
    assert out.read_text() == "\n".join([*lines[lines.index("") + 1 : -1], ""])
    assert load_config(out) == load_config(config, ["activation_checkpoint=false", clip])
    assert "rank 0" in picture.read_text()
    assert run(*args).exit_code == 2, "the files exist"


def test_nothing_fits(tmp_path):
    result = run("1000KiB", "--set", "bf16.mode=torch", "--json", "--out", tmp_path / "fits.py")
    answer = json.loads(result.stdout)
    assert [answer[key] for key in ("ok", "chosen", "limit")] == [False, None, 1000 * 1024]
    (candidate,) = answer["options"]
    assert (result.exit_code, candidate["changes"]) == (1, [])
    assert candidate["needs"] > answer["limit"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "model", "status", "said"),
    [
        (["80"], SMALL, 2, "'80' is 80 bytes; did you mean 80GB?"),
        (["1GB", "--out", "/none/config.py"], SMALL, 2, "there is no directory /none"),
        (["1GB", "--out", "/none/fits.txt"], SMALL, 2, "--out /none/fits.txt: give a name that ends in .py"),
        (["1GB", "--set", "clip_grad_nrm=1"], SMALL, 1, "empty config: cannot run on 1 rank config problems: - clip_"),
        (["1GB", "--set", "parallel.tensor=2"], SMALL, 1, "= 2 ranks, but there is 1; start them with"),
        (["1GB"], "frozen_llama:build", 1, "frozen_llama:build cannot be simulated with the config as it is"),
        (["1GB"], "tests.support.llama:smal", 1, "tests.support.llama.smal does not exist; did you mean 'small'?"),
    ],
)
def test_what_is_rejected(args, model, status, said, tmp_path, monkeypatch):
    text = "def build():\n    m, i, c = llama.small()\n    return m.requires_grad_(False), i, c\n"
    (tmp_path / "frozen_llama.py").write_text(f"from tests.support import llama\n{text}")
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(*args, model=model)
    assert (result.exit_code, said in words(result.output)) == (status, True), result.output


def test_ctrl_c_ends_the_processes_without_tracebacks(tmp_path):
    (tmp_path / "slow_model.py").write_text("import time\n\ndef build():\n    time.sleep(60)\n")
    command = ["plan", "--model", "slow_model:build", "--world-size", "2", "--gpu-memory", "1GB", "--device", "cpu"]
    started = subprocess.Popen(
        [sys.executable, "-m", "halfmesh", *command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}"},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stderr is not None
    assert started.stderr.readline().startswith("simulating 1: ")
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=30)[1]
    assert (started.returncode, "Traceback" in said) == (130, False)
