"""In a mesh of 4 one rank fails, is killed, hangs or leaves: the others end in time and name it with its place."""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.test_launch_failures import failed_at, started
from tests.support.ranks import free_port

pytestmark = pytest.mark.distributed

LIMIT_S = 5.0  # the config's timeout
LATEST_S = LIMIT_S + 25.0  # 10 s on an idle machine; torch alone would wait for ever, or not name the rank
# What a launcher does, with one import of torch for all ranks. A rank is a fork: its errors take the usual way out.
FORKS = """
import json, os, signal, sys, time
import torch, torch.distributed, halfmesh.launching, halfmesh.config.load
folder, port, last = sys.argv[1], int(sys.argv[2]), sys.argv[3]
ranks = {}
for rank in range(4):
    process = os.fork()
    if process == 0:
        output = os.open(f"{folder}/{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        break
    ranks[process] = rank
else:
    codes, ended = {}, {}
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        if list(ranks.values()) == [int(last)]:
            os.kill(*ranks, signal.SIGTERM)  # as launchers do when others ended with errors
    json.dump([codes, ended], sys.stdout)
    os._exit(0)
run = halfmesh.launching.launch(CONFIG, rank, 4, "127.0.0.1", port, device="cpu")
"""
UNDER_TORCHRUN = "import halfmesh.launching as hl\nrun = hl.launch_from_torch(CONFIG, device='cpu')\n"
CONFIG = f"CONFIG = dict(timeout={LIMIT_S}, parallel=dict(tensor=2))\n"
LOOP = f"""
import datetime, os, signal, time, torch, torch.distributed as dist
limit = datetime.timedelta(seconds={LIMIT_S})
tp = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 1], [2, 3])][run.rank // 2]
dp = [dist.new_group(ranks, timeout=limit) for ranks in ([0, 2], [1, 3])][run.rank % 2]
for step in range(10**6):
    if step == 20 and run.rank == BAD:
        os.write(1, b"fails at %f\\n" % time.monotonic())
        HOW
    for group in (tp, dp):
        dist.all_reduce(torch.ones(8), group=group)
"""
ERROR = "the first error was:\n[rank %d (dp %d, tp %d)] Traceback (most recent call last)"
BY_ITSELF = "ended without an error of its own (killed, out of memory?)\n"
EARLY = "ended without an error while others waited for it (left its loop early?)\n"
HANGS = "waited 5 s (config key timeout) for another rank; not waiting, so likely hanging (or slower than that): "


@dataclass(frozen=True)
class Case:
    """How which rank ends, and what the others say."""

    how: str
    bad: int
    code: int
    said: str

    def loop(self) -> str:
        return LOOP.replace("BAD", str(self.bad)).replace("HOW", self.how)


RAISES = Case("raise ValueError('boom')", 3, 1, ERROR % (3, 1, 1))
KILLED = Case("os.kill(os.getpid(), signal.SIGKILL)", 2, -signal.SIGKILL, f"rank 2 (dp 1, tp 0) {BY_ITSELF}")
SLEEPS = Case("time.sleep(1000)", 3, -signal.SIGTERM, f"{HANGS}rank 3 (dp 1, tp 1)\n")
LEAVES = Case("break", 1, 0, f"rank 1 (dp 0, tp 1) {EARLY}")
# Rank 0 hosts the store.
HOST_RAISES = Case(RAISES.how, 0, 1, ERROR % (0, 0, 0))
HOST_KILLED = Case(KILLED.how, 0, -signal.SIGKILL, f"rank 0 (dp 0, tp 0) {BY_ITSELF}")
HOST_SLEEPS = Case(SLEEPS.how, 0, -signal.SIGTERM, f"{HANGS}rank 0 (dp 0, tp 0)\n")
HOST_LEAVES = Case(LEAVES.how, 0, 0, f"rank 0 (dp 0, tp 0) {EARLY}")
CASES = [RAISES, KILLED, SLEEPS, LEAVES, HOST_RAISES, HOST_KILLED, HOST_SLEEPS, HOST_LEAVES]


def name(case: Case) -> str:
    return f"{case.bad}-{case.how.partition('(')[0].split()[0]}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_with_a_store_of_our_own(tmp_path: Path, case: Case) -> None:
    script = tmp_path / "train.py"
    script.write_text(CONFIG + FORKS + case.loop())
    last = str(case.bad if "sleep" in case.how else -1)
    with started(sys.executable, str(script), str(tmp_path), str(free_port()), last) as process:
        codes, ended = json.loads(process.communicate(timeout=100)[0])
    outputs = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    others = [rank for rank in range(4) if rank != case.bad]
    assert codes[str(case.bad)] == case.code
    # SIGALRM: the shutdown of the interpreter took too long, as it may where many share a core.
    assert {codes[str(rank)] for rank in others} <= {1, -signal.SIGALRM}, outputs
    start = failed_at(outputs[case.bad])
    assert max(ended[str(rank)] for rank in others) < start + LATEST_S
    for rank in others:
        place = f"[rank {rank} (dp {rank // 2}, tp {rank % 2})] "
        assert case.said in outputs[rank].partition(place)[2], outputs[rank]
    if "raise" in case.how:
        assert outputs[case.bad].rstrip().endswith(f"raised on rank {case.bad} (dp {case.bad // 2}, tp {case.bad % 2})")
        assert all(outputs[rank].rstrip().endswith("ValueError: boom") for rank in others)


@pytest.mark.parametrize("case", [RAISES, KILLED, SLEEPS, LEAVES], ids=name)
def test_under_torchrun(tmp_path: Path, case: Case) -> None:
    script = tmp_path / "train.py"
    script.write_text(CONFIG + UNDER_TORCHRUN + case.loop())
    # It looks less often than by itself, so that on busy machines, too, a rank has found out by then who was killed.
    agent = ("torch.distributed.run", "--standalone", "--nproc-per-node", "4", "--monitor-interval", "2")
    with started(sys.executable, "-m", *agent, str(script)) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + LATEST_S
    assert process.returncode == 1
    summary = output.index("train.py FAILED")
    assert case.said in output[:summary]
    root = output.index("Root Cause", summary)
    if case is RAISES:
        assert "ValueError: boom\n  raised on rank 3 (dp 1, tp 1)\n" in output[root:]
    elif case is KILLED:
        assert "rank      : 2 (local_rank: 2)\n" in output[root:]
    else:
        assert case.said in output[root:]
        assert "Where the ranks are:\n" in output[root:]
        assert "waiting - " in output[root:]
    if case is SLEEPS:
        assert "in <module>: time.sleep(1000)   <- not waiting\n" in output[root:]
