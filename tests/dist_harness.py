"""Run a test function on several processes with gloo, cheaply, with a time limit and an honest report of failure.

    def average(rank, world_size, start):
        value = torch.tensor([start + rank])
        dist.all_reduce(value)
        return value / world_size

    def test_average():
        assert run_ranks(average, 2, 1.0) == [torch.tensor([1.5])] * 2

The function lives at module level (it is pickled by reference). Processes come from a fork server that has torch
imported, so that a launch costs about 0.1 s instead of 3 s; they are never reused, so nothing leaks between tests.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import random
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

# Imported once, by the fork server (about 3 s), instead of by every rank; none of them starts a thread.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
PRELOAD += ["torch.distributed.pipelining", "numpy", "pydantic", "yaml", "pytest"]
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What a rank sees when a *peer* is gone: never the reason of a failure, only its echo.
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "socket closed",
    "connection was likely closed",
    "failed to recv, got 0 bytes",
    "remote process exited",
)
GRACE_S = 2.0  # after the first error: time for the others to report theirs, which may be the reason of it


class RankFailure(AssertionError):  # noqa: N818 - it is a failed test, with the rank that failed first
    """One rank failed; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


NOT_CONNECTED = "Gloo connectFullMesh failed"
"""torch's words where a group could not be made."""


@dataclass
class _Report:
    """How one rank ended."""

    rank: int
    result: bytes | None = None  # pickled; None when it failed
    error: str = ""  # "ValueError: text"
    trace: str = ""
    at: float = 0.0  # CLOCK_MONOTONIC, which all processes of a machine share

    @property
    def is_echo(self) -> bool:
        return any(words in self.error.lower() for words in ECHOES)


def run_ranks(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60, init: bool = True, **kwargs: Any
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` processes; return the results in order of rank.

    With `init` a gloo process group exists during the call; without, `fn` makes its own (`free_port` helps), and no
    launch variable is set. Arguments and results go through plain pickle: tensors are copied, not shared.

    Raises:
        RankFailure: a rank raised, died or did not end within `timeout` seconds. Of several errors the first one that
            is not the echo of another rank's end is reported. All processes are killed.
    """
    call = pickle.dumps((fn, args, kwargs))
    reports = _launch(call, world_size, timeout, init)
    if init and any(NOT_CONNECTED in report.error for report in reports):
        reports = _launch(call, world_size, timeout, init)  # once more: gloo's sockets sometimes miss each other
    failures = [report for report in reports if report.result is None]
    if failures:
        _raise_first(failures, world_size)
    return [pickle.loads(report.result or b"") for report in sorted(reports, key=lambda report: report.rank)]


def _launch(call: bytes, world_size: int, timeout: float, init: bool) -> list[_Report]:
    """How each rank ended; none is left."""
    with tempfile.TemporaryDirectory(prefix="ranks_") as folder:
        ranks = _start(call, world_size, Path(folder), timeout, init)
        try:
            return _collect(ranks, Path(folder), time.monotonic() + timeout)
        finally:
            for process, receiver in ranks:
                process.kill()
                process.join()
                receiver.close()


def free_port() -> int:
    """A TCP port that nobody uses now.

    Below those that the kernel gives to clients: a client that waits for a server there can connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _start(call: bytes, world_size: int, folder: Path, timeout: float, init: bool) -> list[tuple[Any, Any]]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)  # has an effect only before the server starts
    with _one_thread():
        forkserver.ensure_running()
    ranks = []
    for rank in range(world_size):
        receiver, sender = context.Pipe(duplex=False)
        worker_args = (call, rank, world_size, str(folder), timeout, init, sender)
        process = context.Process(target=_worker, args=worker_args, daemon=True, name=f"rank {rank}")
        process.start()
        sender.close()  # so that the death of the process closes the pipe
        ranks.append((process, receiver))
    return ranks


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The server, and with it every rank, starts with one OpenMP thread: ranks share few cores."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _collect(ranks: list[tuple[Any, Any]], folder: Path, deadline: float) -> list[_Report]:
    """Wait for every rank; after the first failure only `GRACE_S` longer, after `deadline` not at all."""
    reports: list[_Report] = []
    waiting = {receiver: rank for rank, (_, receiver) in enumerate(ranks)}
    failed = False
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for receiver in ready:
            rank = waiting.pop(receiver)
            report = _receive(receiver, rank, ranks[rank][0])
            reports.append(report)
            if report.result is None and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if waiting and not failed:
        reports += _describe_hung(ranks, sorted(waiting.values()), folder)
    return reports


def _receive(receiver: Any, rank: int, process: Any) -> _Report:
    try:
        report = pickle.loads(receiver.recv_bytes())
        assert isinstance(report, _Report)
        return report
    except EOFError:
        process.join(5)
        end = f"died without an exception, exit code {process.exitcode}"
        return _Report(rank, error=end, trace=end, at=time.monotonic())


def _describe_hung(ranks: list[tuple[Any, Any]], hung: list[int], folder: Path) -> list[_Report]:
    """Ask each hung rank for its stacks (faulthandler answers even from within a blocked collective)."""
    for rank in hung:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[rank][0].pid, signal.SIGUSR1)
    time.sleep(0.5)
    reports = []
    for rank in hung:
        stacks = _stacks_file(folder, rank)
        where = stacks.read_text() if stacks.exists() else ""
        trace = f"had not ended at the time limit; ranks {hung} are still running. Its stacks:\n{where}"
        reports.append(_Report(rank, error="time limit", trace=trace, at=time.monotonic()))
    return reports


def _raise_first(failures: list[_Report], world_size: int) -> None:
    first = min(failures, key=lambda report: (report.is_echo, report.at, report.rank))
    others = [f"rank {report.rank}: {report.error}" for report in failures if report is not first]
    after = "\nafterwards: " + "; ".join(others) if others else ""
    raise RankFailure(first.rank, f"rank {first.rank} of {world_size} failed:\n{first.trace}{after}")


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks_{rank}.txt"


def _worker(call: bytes, rank: int, world_size: int, folder: str, timeout: float, init: bool, sender: Any) -> None:
    """The life of one rank."""
    try:
        report = _Report(rank, result=_call(call, rank, world_size, Path(folder), timeout, init))
    except BaseException as error:
        words = f"{type(error).__name__}: {error}"
        report = _Report(rank, error=words, trace=traceback.format_exc(), at=time.monotonic())
    sender.send_bytes(pickle.dumps(report))
    sender.close()
    os._exit(0)  # destructors of a broken process group may block


def _call(call: bytes, rank: int, world_size: int, folder: Path, timeout: float, init: bool) -> bytes:
    import torch
    import torch.distributed as dist

    # Kept open for the life of the process: faulthandler writes to its descriptor.
    stacks = open(_stacks_file(folder, rank), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    faulthandler.dump_traceback_later(timeout + 30, exit=True, file=stacks)  # should the parent be gone by then
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    fn, args, kwargs = pickle.loads(call)
    if init:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'rendezvous'}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
    result = pickle.dumps(fn(rank, world_size, *args, **kwargs))
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
