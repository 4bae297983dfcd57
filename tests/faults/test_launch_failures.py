"""A rank that fails, and Ctrl-C: everything ends within seconds and the first error is shown last."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch.distributed as dist

from halfmesh import signals
from halfmesh.end_log import EndLog
from halfmesh.failures import FailureGuard
from halfmesh.layout import Layout
from tests.support.ranks import LAUNCH_VARIABLES, free_port

pytestmark = pytest.mark.distributed

UNDER_TORCHRUN = "import halfmesh.launching as hl\nrun = hl.launch_from_torch({'timeout': 60.0}, device='cpu')\n"
PLAIN = """
import sys, halfmesh.launching as hl
run = hl.launch({"timeout": 60.0}, int(sys.argv[1]), 2, "127.0.0.1", int(sys.argv[2]), device="cpu")
"""
BOOM = """
import time, torch, torch.distributed as dist
if run.rank == %d:
    time.sleep(0.3)
    print(f"fails at {time.monotonic()}", flush=True)
    raise ValueError(f"boom on rank {run.rank}")
dist.all_reduce(torch.ones(1))
"""
# Each waits for the other within gloo, where Python does not run.
DEADLOCK = """
import os, torch, torch.distributed as dist
os.write(1, b"ready\\n")
dist.recv(torch.ones(1), 1 - run.rank)
"""


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A process in a session of its own, all of which is killed in the end."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        command,
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


def torchrun(script: Path) -> tuple[str, ...]:
    return (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))


def failed_at(output: str) -> float:
    return float(output.partition("fails at ")[2].split()[0])


def write(folder: Path, text: str) -> Path:
    script = folder / "train.py"
    script.write_text(text)
    return script


def make_guard() -> FailureGuard:
    return FailureGuard(EndLog(dist.HashStore(), 0, 4), Layout(2), timeout_s=5.0)


def test_torchrun_ends_at_once_and_shows_the_first_error_last(tmp_path: Path) -> None:
    script = write(tmp_path, UNDER_TORCHRUN + BOOM % 1)
    with started(*torchrun(script)) as process:
        output, _ = process.communicate(timeout=100)
        assert time.monotonic() < failed_at(output) + 25  # of the 60 that the ranks may wait for each other
    assert process.returncode != 0
    last = output[output.rindex("Traceback (most recent call last)") :]
    assert 'raise ValueError(f"boom on rank {run.rank}")' in last
    assert "failures.py" not in last
    errors = [line.strip() for line in last.splitlines() if "Error" in line and "raise" not in line]
    assert errors == ["ValueError: boom on rank 1"]


def test_ctrl_c_ends_ranks_that_block_in_a_collective(tmp_path: Path) -> None:
    script = write(tmp_path, UNDER_TORCHRUN + DEADLOCK)
    with started(*torchrun(script)) as process:
        assert process.stdout is not None
        ready = 0
        while ready < 2:
            line = process.stdout.readline()
            assert line, "ended before both ranks were ready"
            ready += line.count("ready")
        time.sleep(0.3)
        start = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=40)
        assert time.monotonic() - start < 15  # torchrun alone: 31 s
    assert process.returncode != 0
    assert "interrupted while it waited for another rank" in output


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_without_torchrun_too(tmp_path: Path, bad_rank: int) -> None:
    script, port = write(tmp_path, PLAIN + BOOM % bad_rank), str(free_port())
    with (
        started(sys.executable, str(script), "0", port) as first,
        started(sys.executable, str(script), "1", port) as second,
    ):
        outputs = [process.communicate(timeout=100)[0] for process in (first, second)]
        assert time.monotonic() < failed_at(outputs[bad_rank]) + 25
        assert [first.returncode, second.returncode] == [1, 1]
    echo = outputs[1 - bad_rank]
    assert "onnection" in echo
    assert f"[rank {1 - bad_rank}] ends because the connection to another rank was lost; the first error was" in echo
    assert echo.rstrip().endswith(f"ValueError: boom on rank {bad_rank}")
    assert outputs[bad_rank].rstrip().endswith(f"ValueError: boom on rank {bad_rank}")


def test_the_guard_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    before = (sys.excepthook, signal.getsignal(signal.SIGINT))
    guard = make_guard()
    assert sys.excepthook is not before[0]
    assert signal.getsignal(signal.SIGINT) is not before[1]
    guard.remove()
    assert (sys.excepthook, signal.getsignal(signal.SIGINT)) == before
    wakeup = signal.set_wakeup_fd(-1)
    assert wakeup == -1


def test_a_hook_of_the_users_on_top_stays_and_still_reaches_the_one_below(monkeypatch: pytest.MonkeyPatch) -> None:
    alarm = signal.getsignal(signal.SIGALRM)
    seen: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(error))
    guard = make_guard()
    below = sys.excepthook

    def users_hook(*error: object) -> None:
        below(*error)  # type: ignore[arg-type]

    sys.excepthook = users_hook
    guard.remove()
    assert sys.excepthook is users_hook
    error = ValueError("x")
    users_hook(ValueError, error, None)
    assert seen == [error]
    assert signal.getsignal(signal.SIGALRM) is alarm  # a removed guard does not end the process


def test_ctrl_c_in_python_code_is_a_keyboard_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)
    monkeypatch.setattr(signals, "INTERRUPT_LIMIT_S", 0.3)
    guard = make_guard()
    try:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        time.sleep(0.6)  # the watching thread sees that it was delivered, and does not end the process
    finally:
        guard.remove()


BAD_CONFIG = """
import torch, halfmesh
model = torch.nn.Linear(2, 2)
halfmesh.initialize(model, torch.optim.SGD, config=dict(fp16=dict(mode="navie")))
"""


def test_a_refusal_before_there_is_a_group_is_shown_last_too(tmp_path: Path) -> None:
    with started(*torchrun(write(tmp_path, BAD_CONFIG))) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "did you mean 'naive'" in output.rpartition("Root Cause")[2]


IN_A_WITH = """
import torch, halfmesh
run = halfmesh.launch_from_torch({"timeout": 60.0}, device="cpu")
model = torch.nn.Linear(2, 2)
with halfmesh.initialize(model, torch.optim.SGD(model.parameters(), 0.1), config=run) as engine:
    if run.rank == 1:
        raise ValueError("the true reason")
    engine.backward(engine(torch.ones(1, 2)).sum())
"""


def test_an_error_within_with_engine_is_shown_last_too(tmp_path: Path) -> None:
    with started(*torchrun(write(tmp_path, IN_A_WITH))) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "ValueError: the true reason" in output.rpartition("Root Cause")[2]
