"""Runs an example's script as a user would."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"


def run(script, *args, ranks=None, cwd):
    """`script` of examples/ in a process of its own, or in `ranks` of them under torchrun."""
    start = [sys.executable]
    if ranks is not None:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("DATA", None)
    command = [*start, str(ROOT / "examples" / script), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
