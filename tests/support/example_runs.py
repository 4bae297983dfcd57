"""Runs an example's script as a user would."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

from torch.distributed import TCPStore

from halfmesh.distributed.local_ranks import free_port

from .ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
STORES: list[TCPStore] = []
"""Which this process hosts, as torchrun does."""


def run(script, *args, ranks=None, cwd):
    """`script` of examples/ in a process of its own, or in `ranks` of them under torchrun."""
    start = [sys.executable]
    if ranks is not None:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("DATA", None)
    command = [*start, str(ROOT / "examples" / script), *map(str, args)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)


def as_main(rank: int, world_size: int, script: str, args: tuple[str, ...], port: int) -> tuple[str, int]:
    """Runs `script` as torchrun would (one rank: as python would). Returns what it printed, and its exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if world_size > 1:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world_size)}
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # there is a store already, which outlives process groups
        if rank == 0:
            STORES.append(TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False))
    sys.argv = [script, *args]
    printed = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(printed):
        try:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        except SystemExit as end:
            status = int(end.code or 0)
    return printed.getvalue(), status


def launch(script: str, ranks: int, *args: object, status: int = 0) -> list[str]:
    """What each rank printed."""
    reports = run_ranks(as_main, ranks, script, tuple(map(str, args)), free_port(), init=False, timeout=100)
    assert [ended for _, ended in reports] == [status] * ranks
    return [printed for printed, _ in reports]


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in:\n{text}"
    return found
