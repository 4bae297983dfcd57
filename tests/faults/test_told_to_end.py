"""Programs that are told to end: the status that they end with, under torchrun and without, and how they go on."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from tests.support import checkpoint_program
from tests.support.ranks import LAUNCH_VARIABLES, run_ranks

PROGRAM = checkpoint_program.__file__
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@contextmanager
def started(*command, **options):
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    process = subprocess.Popen(
        [sys.executable, *command, PROGRAM, json.dumps(options)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def await_step(folder, rank, step, process, from_step=0):
    """Until a rank has written that it has made a step, after it began from `from_step`."""
    path, deadline = Path(folder) / f"rank-{rank}", time.monotonic() + 90
    while time.monotonic() < deadline and process.poll() is None:
        lines = path.read_text().splitlines() if path.exists() else []
        if any(line.split()[0] == str(step) for line in lines):
            return
        time.sleep(0.01)
    raise AssertionError(f"rank {rank} did not come to step {step}: {process.communicate(timeout=10)[0][-3000:]}")


def ended(process):
    """What it has said by its end."""
    try:
        return process.communicate(timeout=200)[0]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"it did not end; it said: {(error.stdout or b'').decode()[-5000:]}") from None


def began_from(folder, rank=0):
    """The steps from which a rank has begun, one for each start."""
    lines = (Path(folder) / f"rank-{rank}").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("from")]


def make_folders(path):
    for name in ("log", "ck"):
        (path / name).mkdir()
    return {"log": str(path / "log"), "folder": str(path / "ck"), "out": str(path / "weights.pt")}


def test_one_process_ends_with_status_75_and_goes_on(tmp_path):
    """With workers, and the signal to all of its processes, as torchrun and SLURM send it."""
    options = make_folders(tmp_path) | {"workers": 1}
    with started(**options, pause=0.05) as process:
        await_step(options["log"], 0, 7, process)
        os.killpg(process.pid, signal.SIGTERM)
        output = ended(process)
    assert process.returncode == 75, output
    assert "told to end (SIGTERM): saved to " in output
    assert "Traceback" not in output
    assert "told to end" in output.splitlines()[-1]
    whole = checkpoint_program.main(str(tmp_path / "whole.pt"))
    rest = checkpoint_program.main(**options)
    assert 7 <= len(whole) - len(rest) <= 12
    assert rest == whole[-len(rest) :]
    assert equal(options["out"], tmp_path / "whole.pt")


def equal(first, second, tolerance=0.0):
    first, second = torch.load(first), torch.load(second)
    return all((value - second[name]).abs().max() <= tolerance for name, value in first.items())


def uninterrupted(rank, world_size, out):
    return checkpoint_program.main(out)


@pytest.mark.distributed
def test_torchrun_starts_again_and_it_goes_on(tmp_path):
    """The signal comes to one rank with its workers."""
    options = make_folders(tmp_path) | {"workers": 1}
    with started(*TORCHRUN, "--max-restarts", "1", **options, pause=0.05) as process:
        await_step(options["log"], 1, 7, process)
        send_to_rank(1, process.pid)
        output = ended(process)
    assert process.returncode == 0, output
    starts = began_from(options["log"])
    assert len(starts) == 2
    assert starts[0] == 0
    assert 7 <= starts[1] < 36
    assert starts == began_from(options["log"], 1)
    assert "[rank 0] told to end (SIGTERM on rank 1): saved to" in output
    assert output.count("exitcode: 75") >= 1
    assert not re.search(r"terminate called|left its loop|lost|DataLoader worker", output)
    run_ranks(uninterrupted, 2, str(tmp_path / "whole.pt"))
    assert equal(options["out"], tmp_path / "whole.pt")


def send_to_rank(rank, agent):
    """SIGTERM to the process group of a rank that `agent` has started, where it has one of its own."""
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((path / "stat").read_text().rpartition(") ")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
            if parent == agent and f"RANK={rank}".encode() in environment:
                process = int(path.name)
                mine = os.getpgid(process) == process
                (os.killpg if mine else os.kill)(process, signal.SIGTERM)
                return
    raise AssertionError(f"rank {rank} is not there")


@pytest.mark.distributed
def test_told_through_torchrun_and_gone_on_with_one_process(tmp_path):
    options = make_folders(tmp_path) | {"dropout": 0.0, "shuffle": False}
    with started(*TORCHRUN, **options, pause=0.05) as process:
        await_step(options["log"], 0, 7, process)
        process.terminate()
        output = ended(process)
    assert process.returncode != 0
    assert "[rank 0] told to end (SIGTERM on rank 0, 1): saved to" in output
    assert len(os.listdir(options["folder"])) == 2
    assert not list(Path(options["folder"]).glob(".*"))
    rest = checkpoint_program.main(**options)
    assert 0 < len(rest) < 30
    checkpoint_program.main(str(tmp_path / "whole.pt"), dropout=0.0, shuffle=False)
    assert equal(options["out"], tmp_path / "whole.pt", 1e-5)
