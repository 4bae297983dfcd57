"""Runs an example's script as a user would, in processes that the test file has already."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from halfmesh.distributed.local_ranks import free_port

from .ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
STORES: list[TCPStore] = []
"""Which this process hosts, as torchrun does."""


def as_main(
    rank: int, world_size: int, script: str, args: tuple[str, ...], port: int, folder: Any = "."
) -> tuple[str, int]:
    """Runs `script` in `folder` as torchrun would (one rank: as python would). Returns what it printed, with the words
    that it exits with, and its exit status."""
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
    with contextlib.redirect_stdout(printed), contextlib.chdir(folder):
        try:
            runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
            printed.write(end.code if isinstance(end.code, str) else "")
    return printed.getvalue(), status


def launch(script: str, ranks: int, *args: object, status: int = 0, folder: Any = ".") -> list[str]:
    """What each rank printed, of `script` in examples/."""
    given = tuple(map(str, args)), free_port(), folder
    reports = run_ranks(as_main, ranks, script, *given, init=False, timeout=100)
    assert [ended for _, ended in reports] == [status] * ranks
    return [printed for printed, _ in reports]


def numbers(pattern: str, text: str) -> list[float]:
    found = [float(number) for number in re.findall(pattern, text)]
    assert found, f"{pattern!r} is not in:\n{text}"
    return found
