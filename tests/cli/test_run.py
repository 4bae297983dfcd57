"""halfmesh run: torchrun, after a check."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app

SCRIPT = """
import os, sys
with open(f"rank{os.environ['RANK']}", "w") as file:
    file.write(f"{os.environ['WORLD_SIZE']} {' '.join(sys.argv[1:])}")
sys.exit(3 if "--fail" in sys.argv else 0)
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "config.py").write_text("parallel = dict(tensor=2)\n")
    (tmp_path / "wrong.py").write_text("gradient_acumulation = 2\n")
    return tmp_path


def run(*arguments):
    command = [sys.executable, "-m", "halfmesh", "run", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.distributed
def test_it_starts_so_many_processes(here):
    done = run("--nproc", "2", "train.py", "--config", "config.py", "--nproc", "7")
    assert done.returncode == 0, done.stderr
    assert [(here / f"rank{rank}").read_text() for rank in (0, 1)] == ["2 --config config.py --nproc 7"] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nproc", "3", "train.py", "--config", "config.py"], "config.py: cannot run on 3 ranks"),
        (["--nproc", "2", "train.py", "--config=wrong.py"], "gradient_acumulation: unknown key; did you mean"),
        (["--nproc", "2", "missing.py"], "missing.py: there is no such file"),
        (["--nproc", "2", "--nnodes", "2", "train.py"], "--nnodes needs --rdzv-endpoint host:port"),
    ],
)
def test_nothing_is_started(here, arguments, words, monkeypatch):
    monkeypatch.setattr(os, "execv", lambda *_: pytest.fail("it was started"))
    result = CliRunner().invoke(app, ["run", *arguments])
    assert result.exit_code in (1, 2)
    assert words in " ".join(result.output.split())


def test_several_machines(here, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, command: started.extend(command))
    arguments = ["--nproc", "2", "--nnodes", "2", "--rdzv-endpoint", "a:29500", "--max-restarts", "3", "train.py"]
    result = CliRunner().invoke(app, ["run", *arguments, "--config", "config.py"])
    assert result.exit_code == 0, result.output
    wanted = ["--rdzv-backend=c10d", "--rdzv-endpoint=a:29500", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3"]
    assert started[3:] == [*wanted, "--", "train.py", "--config", "config.py"]
