"""Starts training programs of several ranks, in which one rank goes wrong."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from halfmesh.distributed.local_ranks import LAUNCH_VARIABLES, free_port

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
LIMIT_S = 3.0
"""The config's timeout."""
TRAIN = """
import os, signal, sys, time
import torch
import halfmesh
from torch import nn

def main():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with halfmesh.initialize(model, optimizer, nn.functional.cross_entropy, None, launched) as engine:
        rank = engine.context.rank
        x, y = torch.ones(4, 4), torch.zeros(4, dtype=torch.long)
        for step in range(10**6):
            if step == 5 and rank == BAD:
                os.write(1, b"fails at %f\\n" % time.monotonic())
                HOW
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            THEN

main()
"""
ALONE = """
launched = halfmesh.launch(CONFIG, rank, RANKS, "127.0.0.1", port, device="cpu", verbose=False)
"""
# The ranks wait for each other before they launch: the config's timeout also limits how long they may take to meet.
UNDER_TORCHRUN = """
import os, time, torch, halfmesh
halfmesh.initialize, torch.optim.SGD
from pathlib import Path
folder = Path(__file__).parent
(folder / ("here-" + os.environ["RANK"])).touch()
while len(list(folder.glob("here-*"))) < RANKS:
    time.sleep(0.01)
launched = halfmesh.launch_from_torch(CONFIG, device="cpu", verbose=False)
"""
# What a launcher does, for several programs, three at a time, with one import of torch. A rank is a fork: its errors
# take the usual way out. What hangs is killed when the others have ended.
FORKS = """
import json, os, signal, sys, time
import torch, torch.distributed, halfmesh, halfmesh.engine.launch, halfmesh.config.load, halfmesh.engine.initialize
import halfmesh.parallel.sharding.fsdp
torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

def run(script, count, bad, port):
    folder, ranks, codes, ended = os.path.dirname(script), {}, {}, {}
    for rank in range(count):
        process = os.fork()
        if process == 0:
            output = os.open(f"{folder}/said-{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(output, 1), os.dup2(output, 2)
            given = {"__name__": "__main__", "halfmesh": halfmesh, "rank": rank, "port": port}
            return exec(compile(open(script).read(), script, "exec"), given)
        ranks[process] = rank
    while ranks:
        process, status = os.wait()
        rank = ranks.pop(process)
        codes[rank], ended[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        if list(ranks.values()) == [bad]:
            time.sleep(1)
            os.kill(*ranks, signal.SIGKILL)
    with open(f"{folder}/ends", "w") as file:
        json.dump([codes, ended], file)
    os._exit(0)

cases, running = json.loads(sys.argv[1]), 0
while cases or running:
    if cases and running < 3:
        case, running = cases.pop(0), running + 1
        if os.fork() == 0:
            run(*case)
            break
    else:
        os.wait()
        running -= 1
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, all of which is killed in the end."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    process = subprocess.Popen(command, stdout=pipe, stderr=both, text=True, env=environment, start_new_session=True)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@dataclass(frozen=True)
class Case:
    """A program in which the rank `bad` executes `how` in its sixth step, and every rank `then` after each step, and
    `first` before it launches."""

    how: str = ""
    bad: int = 1
    ranks: int = 2
    parallel: tuple[tuple[str, object], ...] = ()
    then: str = "pass"
    first: str = ""
    train: str = TRAIN
    timeout: float = LIMIT_S

    def write(self, folder: Path, launch: str) -> str:
        """The path of the script."""
        config = {"timeout": self.timeout, "parallel": dict(self.parallel)}
        text = f"CONFIG = {config!r}\n{self.first}{launch}{self.train}".replace("HOW", self.how)
        text = text.replace("THEN", self.then).replace("BAD", str(self.bad)).replace("RANKS", str(self.ranks))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "train.py").write_text(text)
        return str(folder / "train.py")


def run_cases(cases: Mapping[str, Case], folder: Path) -> dict[str, tuple[list[str], list[int], float]]:
    """As under srun or mpirun: each rank by itself, and rank 0 hosts the store. Of each case what the ranks have
    written, their exit codes, and the seconds from the fault to the end of the last other rank."""
    given = [(case.write(folder / name, ALONE), case.ranks, case.bad, free_port()) for name, case in cases.items()]
    with started(sys.executable, "-c", FORKS, json.dumps(given)) as process:
        process.communicate(timeout=200)
    return {name: _read(case, folder / name) for name, case in cases.items()}


def _read(case: Case, folder: Path) -> tuple[list[str], list[int], float]:
    codes, ended = json.loads((folder / "ends").read_text())
    said = [(folder / f"said-{rank}").read_text() for rank in range(case.ranks)]
    last = max(ended[str(rank)] for rank in range(case.ranks) if rank != case.bad)
    return said, [codes[str(rank)] for rank in range(case.ranks)], last - failed_at(said[case.bad])


def failed_at(output: str) -> float:
    found = output.partition("fails at ")[2].split()
    return float(found[0]) if found else math.inf
