"""The end of a program: gloo's threads finish before Python shuts down, which aborts a process with one at work."""

from __future__ import annotations

import subprocess
import sys

import pytest

from halfmesh.distributed.local_ranks import free_port

TRAINS_AND_CLOSES = """
import contextlib, gc, os, sys, time
from pathlib import Path
import torch
import halfmesh

rank, port = map(int, sys.argv[1:])
launched = halfmesh.launch({}, rank=rank, world_size=2, host="127.0.0.1", port=port, local_rank=rank, device="cpu")
def train():
    model = torch.nn.Linear(4, 2)  # torch's optimizers import much of torch, now that there is a group
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = halfmesh.initialize(model, optimizer, torch.nn.MSELoss(), config=launched)
    engine.backward(engine.criterion(engine(torch.rand(2, 4) + rank), torch.ones(2, 2)))
    engine.step()
    engine.close()
    launched.close()

train()
gc.collect()
for _ in range(100):  # the kernel lists a thread a moment longer than it runs
    left = []
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            left.append(path.read_text())
    left = [name for name in left if name.startswith("pt_gloo")]
    if not left:
        break
    time.sleep(0.1)
os.write(1, f"left: {left}\\n".encode())
"""


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads the threads in /proc")
def test_an_engine_that_is_closed_and_gone_leaves_no_thread_of_gloo(tmp_path):
    command, port = [sys.executable, "-c", TRAINS_AND_CLOSES], str(free_port())
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "text": True}
    for rank in [subprocess.Popen([*command, str(rank), port], **options) for rank in range(2)]:
        output, _ = rank.communicate(timeout=120)
        assert (rank.returncode, output) == (0, "left: []\n")
