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
    port = free_port()
    command = [sys.executable, "-c", TRAINS_AND_CLOSES]
    ranks = [
        subprocess.Popen([*command, str(rank), str(port)], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        output, _ = rank.communicate(timeout=120)
        assert rank.returncode == 0
        assert output == "left: []\n"


OWN_GROUP = """
import os
import torch
import torch.distributed as dist
import halfmesh
from halfmesh.distributed import process_group

process_group._let_threads_finish = lambda: os.write(1, b"waited\\n")
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
halfmesh.initialize(model, optimizer, torch.nn.MSELoss(), config={}, device="cpu").close()
dist.destroy_process_group()
os.write(1, b"destroyed\\n")
"""


def test_a_program_with_a_group_of_its_own_waits_for_gloos_threads_too(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", OWN_GROUP], cwd=tmp_path, stdout=subprocess.PIPE, text=True, timeout=200
    )
    assert (done.returncode, done.stdout) == (0, "destroyed\nwaited\n")
