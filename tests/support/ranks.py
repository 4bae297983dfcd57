"""Run a test function on several processes, cheaply, with a time limit and an honest report of failure.

    def average(rank, world_size, start):
        value = here(torch.tensor([start + rank]))
        dist.all_reduce(value)
        return value / world_size

    def test_average():
        assert run_ranks(average, 2, 1.0) == [torch.tensor([1.5])] * 2

The function lives at module level (it is pickled by reference). Processes come from a fork server that has torch and
halfmesh imported. A team of processes is started once per test file and world size, and answers all calls of that file;
each call has a process group, a seed and an environment of its own. A team in which a rank failed is killed.

`pytest --ranks-on nccl` (or RANKS_ON in the environment) gives the ranks GPUs: see `PLACES`. So ranks make what they
make `here`, or on `rank_device()`. Marks: `sends` for tests whose ranks send to each other, as pipelines do;
`on_cpu("why")` for those that say nothing about a GPU. What cannot run where it is asked to is skipped, and says so.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

# Imported once, by the fork server, instead of by every rank; none of them starts a thread.
PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
PRELOAD += ["torch.distributed.pipelining", "torch.distributed.checkpoint", "numpy", "pydantic", "yaml", "pytest"]
PRELOAD += [
    "halfmesh.engine.initialize",
    "halfmesh.config.load",
    "halfmesh.parallel.tensor.apply",
    "halfmesh.parallel.sharding.fsdp",
]
PRELOAD += [
    "halfmesh.parallel.sharding.zero1",
    "halfmesh.engine.pipeline_executor",
    "halfmesh.checkpoint.dcp",
]
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
NOT_CONNECTED = "Gloo connectFullMesh failed"  # torch's words where sockets missed each other on a busy machine
ATTEMPTS = 3  # to make a group
PLACES = {
    "gloo-cpu": "gloo, all ranks on the CPU",
    "gloo-cuda": "gloo, all ranks on cuda:0",
    "nccl-one": "NCCL, one rank",
    "nccl": "NCCL, a GPU for each rank",
}
"""Where ranks run, and what they talk over."""
LAUNCHES = os.environ.get("COUNT_LAUNCHES")
"""A file to which each launch of a team adds a line: its world size, and the test for which it was started."""
_rank: int | None = None
"""Of this process, if it is a rank."""


def ranks_on() -> str:
    """The one of `PLACES` that was chosen."""
    place = os.environ.get("RANKS_ON", "gloo-cpu")
    if place not in PLACES:
        raise ValueError(f"RANKS_ON={place!r} is none of {', '.join(PLACES)}")
    return place


def rank_device() -> Any:
    """The device of this rank; the CPU in a process that is none."""
    import torch

    place = ranks_on()
    if _rank is None or place == "gloo-cpu":
        return torch.device("cpu")
    return torch.device("cuda", _rank if place == "nccl" else 0)


def here(value: Any) -> Any:
    """A module or tensors, also within lists, tuples and dicts, on this rank's device."""
    import torch
    from torch.utils._pytree import tree_map

    device = rank_device()
    return tree_map(lambda one: one.to(device) if isinstance(one, (torch.Tensor, torch.nn.Module)) else one, value)


def find_obstacle(world_size: int, sends: bool = False) -> str:
    """Why so many ranks cannot run where they are asked to; "" if they can. `sends`: they send to each other."""
    import torch

    place = ranks_on()
    if place == "gloo-cpu":
        return ""
    found = torch.cuda.device_count()
    if not found:
        return f"{place}: no CUDA device"
    if place == "gloo-cuda":
        return "gloo-cuda: gloo sends no CUDA tensors from one rank to another" if sends else ""
    allowed = 1 if place == "nccl-one" else found
    return f"{place}: {world_size} ranks, and {allowed} may run here" if world_size > allowed else ""


class RankFailure(AssertionError):  # noqa: N818 - it is a failed test, with the rank that failed first
    """One rank failed; the message has its traceback."""

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


@dataclass
class _Report:
    """How a call ended on one rank."""

    rank: int
    result: bytes | None = None  # pickled; None when it failed
    error: str = ""  # "ValueError: text"
    trace: str = ""
    at: float = 0.0  # CLOCK_MONOTONIC, which all processes of a machine share

    @property
    def is_echo(self) -> bool:
        return any(words in self.error.lower() for words in ECHOES)


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    init: bool = True,
    fresh: bool = False,
    **kwargs: Any,
) -> list[Any]:
    """Call `fn(rank, world_size, *args, **kwargs)` in `world_size` processes; return the results in order of rank.

    With `init` a gloo process group exists during the call; without, `fn` makes its own (`free_port` helps), and no
    launch variable is set. Arguments and results go through plain pickle: tensors are copied, not shared.
    `fresh` is for calls that need processes without a past, or spoil them: theirs are started and ended for this call.

    Raises:
        RankFailure: a rank raised, died or did not end within `timeout` seconds. Of several errors the first one that
            is not the echo of another rank's end is reported. All processes of the team are killed.
        Skipped: `find_obstacle` has found one.
    """
    if obstacle := find_obstacle(world_size):
        import pytest

        pytest.skip(obstacle)
    call = pickle.dumps((fn, args, kwargs, timeout, init))
    for _ in range(ATTEMPTS):
        reports = _reports(call, world_size, timeout, fresh)
        if not init or not any(NOT_CONNECTED in report.error for report in reports):
            break
    failures = [report for report in reports if report.result is None]
    if failures:
        _raise_first(failures, world_size)
    return [pickle.loads(report.result or b"") for report in sorted(reports, key=lambda report: report.rank)]


def meet(rank: int, world_size: int, folder: str | Path) -> None:
    """Wait until all ranks are here: before a group whose time limit also limits how long they may take to start."""
    Path(folder, f"here-{rank}").touch()
    while not all(Path(folder, f"here-{other}").exists() for other in range(world_size)):
        time.sleep(0.01)


def free_port() -> int:
    """A TCP port that nobody uses now.

    Below those that the kernel gives to clients: a client that waits for a server there can connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


_teams: dict[int, _Team] = {}


def end_teams() -> None:
    """End the processes of all teams. Called when a test file is done."""
    while _teams:
        _teams.popitem()[1].end()


def _reports(call: bytes, world_size: int, timeout: float, fresh: bool) -> list[_Report]:
    """How the call ended on each rank."""
    team = _Team(world_size) if fresh else _teams.pop(world_size, None) or _Team(world_size)
    reports: list[_Report] = []
    try:
        reports = team.call(call, timeout)
    finally:
        if fresh or len(reports) < world_size or any(report.result is None for report in reports):
            team.end()
        else:
            _teams[world_size] = team
    return reports


class _Team:
    """Processes that wait for calls, one per rank."""

    def __init__(self, world_size: int) -> None:
        if LAUNCHES:
            with open(LAUNCHES, "a") as log:
                print(world_size, os.environ.get("PYTEST_CURRENT_TEST"), file=log)
        self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)  # has an effect only before the server starts
        # Else torch would look for GPUs by way of CUDA, which no process can use after a fork.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        with _one_thread():
            forkserver.ensure_running()
        self.ranks: list[tuple[Any, Any]] = []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            worker_args = (rank, world_size, str(self.folder), theirs)
            process = context.Process(target=_worker, args=worker_args, daemon=True, name=f"rank {rank}")
            process.start()
            theirs.close()  # so that the death of the process closes the pipe
            self.ranks.append((process, mine))

    def call(self, call: bytes, timeout: float) -> list[_Report]:
        for _, pipe in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                pipe.send_bytes(call)
        return _collect(self.ranks, self.folder, time.monotonic() + timeout)

    def end(self) -> None:
        for process, pipe in self.ranks:
            process.kill()
            process.join()
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


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
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    failed = False
    while waiting:
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            report = _receive(pipe, rank, ranks[rank][0])
            reports.append(report)
            if report.result is None and not failed:
                failed = True
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if waiting and not failed:
        reports += _describe_hung(ranks, sorted(waiting.values()), folder)
    return reports


def _receive(pipe: Any, rank: int, process: Any) -> _Report:
    try:
        report = pickle.loads(pipe.recv_bytes())
        assert isinstance(report, _Report)
        return report
    except (EOFError, ConnectionResetError):
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


def _worker(rank: int, world_size: int, folder: str, pipe: Any) -> None:
    """The life of one rank: it answers calls until nobody asks any more."""
    import torch

    global _rank
    _rank = rank
    # Kept open for the life of the process: faulthandler writes to its descriptor.
    stacks = open(_stacks_file(Path(folder), rank), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    torch.set_num_threads(1)
    environment, place, path = dict(os.environ), os.getcwd(), list(sys.path)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what is there now is not looked at again when a call has ended
    number = 0
    while True:
        try:
            call = pipe.recv_bytes()
        except (EOFError, ConnectionResetError):
            os._exit(0)
        number += 1
        try:
            rendezvous = Path(folder) / f"rendezvous_{number}"
            report = _Report(rank, result=_call(call, rank, world_size, rendezvous, stacks))
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
            report = _Report(rank, error=words, trace=traceback.format_exc(), at=time.monotonic())
        pipe.send_bytes(pickle.dumps(report))
        if report.result is None:
            break
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(place)
        sys.path[:] = path
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        gc.collect()
    time.sleep(60)  # to be killed: destructors of a broken process group may block
    os._exit(0)


def _call(call: bytes, rank: int, world_size: int, rendezvous: Path, stacks: Any) -> bytes:
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    random.seed(0)
    fn, args, kwargs, timeout, init = pickle.loads(call)
    faulthandler.dump_traceback_later(timeout + 30, exit=True, file=stacks)  # should the parent be gone by then
    try:
        device = rank_device()
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.backends.cudnn.allow_tf32 = False  # convolutions are compared with fp32 ones
        if init:
            backend, _, _ = ranks_on().partition("-")
            dist.init_process_group(
                backend,
                init_method=f"file://{rendezvous}",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=timeout),
                device_id=device if backend == "nccl" else None,
            )
        return _on_host(fn(rank, world_size, *args, **kwargs))
    finally:
        faulthandler.cancel_dump_traceback_later()
        if dist.is_initialized() and sys.exc_info()[0] is None:
            dist.destroy_process_group()


def _on_host(result: Any) -> bytes:
    """The result of a rank, pickled, with its tensors on the host."""
    import torch

    class Pickler(pickle.Pickler):
        def reducer_override(self, value: Any) -> Any:
            on_device = isinstance(value, torch.Tensor) and value.is_cuda
            return value.detach().cpu().__reduce_ex__(pickle.HIGHEST_PROTOCOL) if on_device else NotImplemented

    buffer = io.BytesIO()
    Pickler(buffer).dump(result)
    return buffer.getvalue()
