"""How the tests of this package start ranks."""

from __future__ import annotations

import multiprocessing
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def join(rank: int, function: Callable[[int, str], None], ranks: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    function(rank, folder)
    dist.destroy_process_group()


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., None]:
    """`start(function, ranks)` calls `function(rank, folder)` on so many ranks, forked from a process that has imported
    torch."""
    multiprocessing.set_forkserver_preload(
        ["torch.distributed.tensor.parallel", "halfmesh.engine.initialize", "pytest"]
    )

    def start(function: Callable[[int, str], None], ranks: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        given = (function, ranks, port, str(tmp_path))
        mp.start_processes(join, given, nprocs=ranks, start_method="forkserver")

    return start
