"""Ctrl-C during a command."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

MODEL = "import time\n\ndef build():\n    time.sleep(60)\n"


def test_the_processes_of_plan_end_without_tracebacks(tmp_path: Path):
    (tmp_path / "slow_model.py").write_text(MODEL)
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
    assert started.stderr.readline().startswith("simulating 1")
    os.killpg(started.pid, signal.SIGINT)
    said = started.communicate(timeout=30)[1]
    assert started.returncode == 130
    assert "Traceback" not in said
