"""Runs functions in processes on this machine, as the ranks of a launch, and cleans up after them."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any, Self, TypeVar

import torch

from ..errors import InputError, counted
from .env import list_ranks, ranks_by_value
from .rank_process import MODULES, RankError, live

T = TypeVar("T")
ENGINE = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("halfmesh.config.load", "halfmesh.engine.initialize", "halfmesh.engine.pipeline_executor"),
    *("halfmesh.parallel.tensor.apply", "halfmesh.parallel.sharding.fsdp", "halfmesh.checkpoint.state"),
)
"""Modules that each rank of an engine imports; none of them starts a thread."""
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_CONNECTED = "Gloo connectFullMesh failed"  # torch's words where sockets missed each other on a busy machine
ATTEMPTS = 3  # to connect the ranks
_IMPORT_S = 120.0  # how long the imports of the server may take, at least
_GRACE_S = 3.0  # after an error that may only say that another rank is gone: time for that one's own error to arrive


class LocalRanks:
    """Ranks that wait for calls, as long as a `with` block lasts. Several of these can be at work at the same time.

    The first call starts the processes: forked from a server that has imported torch, with one thread each. What they
    print is kept for errors. An error ends all of them, and the next call starts others.

    Args:
        device: "cpu" (gloo), or "cuda" (nccl, a GPU for each rank).
        preload: modules for the server, if this starts it; what is in them now stays there until this process ends.
    """

    def __init__(self, world_size: int, device: str = "cpu", preload: Sequence[str] = ()) -> None:
        self.world_size, self._device, self._preload = world_size, device, preload
        self._members: list[tuple[Any, Any]] = []  # processes, and pipes to them
        self._folder, self._calls = "", 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def call(self, function: Callable[..., T], args: Sequence[Any] = (), **options: Any) -> list[T]:
        """`begin` and `wait`."""
        self.begin(function, args, **options)
        return self.wait()

    def begin(
        self, function: Callable[..., Any], args: Sequence[Any] = (), *, timeout: float = 600.0, group: bool = True
    ) -> None:
        """Call a function on each rank, with the variables, folder and `sys.path` that this process has now, and with
        torchrun's variables unless a rank is alone.

        Args:
            function: a function at the top level of a module, called with `args`. Its result is pickled.
            args: the arguments.
            timeout: the time limit in seconds, from now.
            group: create a process group for the call.

        Raises:
            InputError: the function cannot be sent to other processes, or there are too few GPUs.
            RankError: no process can be started.
        """
        if self._device == "cuda" and self.world_size > (found := torch.cuda.device_count()):
            raise InputError(
                f"{self.world_size} ranks need a GPU each, but found {counted(found, 'GPU')}; use device='cpu'"
            )
        try:
            self._call = pickle.dumps((function, tuple(args)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            allowed = "name functions at the top level of a module, such as package.module:build"
            raise InputError(f"this cannot be sent to other processes ({error}); {allowed}") from error
        self._timeout, self._group, self._attempts = timeout, group, ATTEMPTS
        self._send()

    def wait(self) -> list[Any]:
        """The results in the order of ranks, when all have one.

        Raises:
            RankError: of several errors the first that cannot be the echo of another rank's end; or the time is up.
        """
        try:
            while True:
                ends = self._collect()
                errors = [end for end in ends.values() if isinstance(end, RankError)]
                self._attempts -= 1
                if not self._attempts or not any(NOT_CONNECTED in error.reason for error in errors):
                    break
                self.end()
                self._send()
            if errors:
                raise min(errors, key=lambda error: (error.may_be_echo, error.at, error.rank))
            if len(ends) < self.world_size:
                raise self._describe_hung([rank for rank in range(self.world_size) if rank not in ends])
            for _, pipe in self._members:
                pipe.send_bytes(b"")  # none needs the others any more
            return [pickle.loads(ends[rank]) for rank in range(self.world_size)]
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Kill the processes and those that they started, and remove their files."""
        for process, _ in self._members:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
        for process, pipe in self._members:
            if process.pid is not None:
                process.join()
            pipe.close()
        self._members = []
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="halfmesh_ranks_")
        try:
            start_server(self._preload, limit := max(_IMPORT_S, self._timeout))
            for rank in range(self.world_size):
                pipe, theirs = get_context("forkserver").Pipe()
                args = (rank, self.world_size, self._folder, theirs, self._device)
                # A daemon: the end of this process ends it, where `end` could not.
                self._members.append((get_context("forkserver").Process(target=live, args=args, daemon=True), pipe))
                self._members[-1][0].start()
                theirs.close()  # so that the death of the process closes the pipe
        except (EOFError, ConnectionError) as error:
            reason = f"importing {', '.join(self._preload) or 'torch'} ended the process, or took more than {limit:g} s"
            raise RankError(0, reason, reason) from error

    def _send(self) -> None:
        with contextlib.ExitStack() as after_errors:
            after_errors.callback(self.end)
            if not self._members:
                self._start()
            self._calls += 1
            self._deadline = time.monotonic() + self._timeout
            group = (f"file://{self._folder}/store_{self._calls}", self._timeout) if self._group else None
            port = free_port()
            inherited = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
            for rank, (_, pipe) in enumerate(self._members):
                values = (rank, rank, self.world_size, self.world_size, "127.0.0.1", port)
                launch = dict(zip(LAUNCH_VARIABLES, map(str, values), strict=True)) if self.world_size > 1 else {}
                around = {**inherited, **launch}, os.getcwd(), sys.path
                with contextlib.suppress(ConnectionError):  # it died: `wait` says why
                    pipe.send_bytes(pickle.dumps((self._call, group, around)))
            after_errors.pop_all()

    def _collect(self) -> dict[int, Any]:
        """The results of ranks: of all, those until the first error, or those until the deadline."""
        ends: dict[int, Any] = {}
        errors: list[RankError] = []
        deadline = self._deadline
        while len(ends) < self.world_size and all(error.may_be_echo for error in errors):
            # Also the sentinel: a pipe may be held open by processes that its rank has started.
            waiting = [(rank, *member) for rank, member in enumerate(self._members) if rank not in ends]
            handles = {handle: rank for rank, process, pipe in waiting for handle in (pipe, process.sentinel)}
            ready = connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            ends |= {rank: self._receive(rank, *self._members[rank]) for rank in {handles[handle] for handle in ready}}
            errors = [end for end in ends.values() if isinstance(end, RankError)]
            deadline = min(deadline, time.monotonic() + _GRACE_S) if errors else deadline
        return ends

    def _receive(self, rank: int, process: Any, pipe: Any) -> Any:
        with contextlib.suppress(EOFError, ConnectionError):
            if pipe.poll():
                return pickle.loads(pipe.recv_bytes())
        process.join(5)
        code, log = process.exitcode or 0, Path(self._folder, f"log_{rank}")
        reason = f"killed by {signal.Signals(-code).name} (out of memory?)" if code < 0 else f"ended with status {code}"
        if not log.exists():
            reason += ' while it started; is this called under `if __name__ == "__main__":`?'
        wrote = log.read_text(errors="replace").splitlines()[-20:] if log.exists() else []
        return RankError(rank, reason, "\n".join([reason, *wrote]))

    def _describe_hung(self, hung: list[int]) -> RankError:
        """With the stacks of each, which faulthandler writes also from within a blocked collective."""
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._members[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        stacks = {}
        for rank in hung:
            path = Path(self._folder, f"stacks_{rank}")
            _, _, stack = (path.read_text() if path.exists() else "").rpartition("(most recent call first):\n")
            stacks[rank] = stack.rstrip()  # of the main thread, which comes last
        where = "".join(f"\n{list_ranks(ranks)} at:\n{stack}" for stack, ranks in ranks_by_value(stacks).items())
        reason = f"had not ended after {self._timeout:g} s"
        return RankError(hung[0], reason, reason + where, hung=True)


def start_server(preload: Sequence[str], limit: float = _IMPORT_S) -> None:
    """Start the server that forks ranks, unless it runs. Its imports may take `limit` seconds."""
    get_context("forkserver").set_forkserver_preload([live.__module__])
    # Ranks share cores; and CUDA, once asked for devices, stands no fork.
    mine = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", MODULES: " ".join([f"{limit:g}", *preload])}
    before = {name: os.environ[name] for name in mine if name in os.environ}
    os.environ.update(mine)
    try:
        forkserver.ensure_running()
    finally:
        for name in mine:
            os.environ.pop(name, None)
        os.environ.update(before)


def free_port() -> int:
    """A TCP port that nobody uses now.

    Below those that the kernel gives to clients: a client that waits for a server there can connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
