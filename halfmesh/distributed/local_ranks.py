"""Runs functions in processes on this machine, as the ranks of a launch, and cleans up after them.

Ranks are forked from a server that has imported torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, current_process, forkserver, get_context, parent_process
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
import torch.distributed as dist

from ..errors import HalfmeshError, InputError, counted
from .env import list_ranks, ranks_by_value
from .failures import may_be_of_peer

T = TypeVar("T")
# Modules that each rank of an engine imports; none of them starts a thread.
ENGINE = (
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("halfmesh.config.load", "halfmesh.engine.initialize", "halfmesh.engine.pipeline_executor"),
    *("halfmesh.parallel.tensor.apply", "halfmesh.parallel.sharding.fsdp", "halfmesh.checkpoint.state"),
)
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
NOT_CONNECTED = "Gloo connectFullMesh failed"  # torch's words where sockets missed each other on a busy machine
ATTEMPTS = 3  # to connect the ranks
_MODULES = "HALFMESH_PRELOAD"  # variable of the server: seconds that its imports may take, and the names of modules
_IMPORT_S = 120.0  # how long the imports of the server may take, at least
_GRACE_S = 3.0  # after an error that may only say that another rank is gone: time for that one's own error to arrive


@dataclass(eq=False)
class RankError(Exception):
    """A rank failed, died, or had not ended at the time limit: the first, or the first that hangs.

    Attributes:
        reason: the reason in one line: "ValueError: text".
        text: the traceback. If ranks hang, the stacks of all. If the rank died, the end of its output.
        rejection: the message, if halfmesh raised the error on purpose. Else "".
        may_be_echo: True if the error may only say that another rank is gone.
        measures: the error's attribute of this name, if it has one.
    """

    rank: int
    reason: str
    text: str
    hung: bool = False
    rejection: str = ""
    may_be_echo: bool = False
    measures: Any = None
    at: float = field(default_factory=time.monotonic)  # all processes of a machine share this clock

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


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
            raise InputError(
                f"this cannot be sent to other processes ({error}); name functions at the top level of a module"
            ) from error
        self._timeout, self._group = timeout, group
        self._send()

    def wait(self) -> list[Any]:
        """The results in the order of ranks, when all have one.

        Raises:
            RankError: of several errors the first that cannot be the echo of another rank's end; or the time is up.
        """
        try:
            for attempt in range(1, ATTEMPTS + 1):
                ends = self._collect()
                errors = [end for end in ends.values() if isinstance(end, RankError)]
                if attempt == ATTEMPTS or not any(NOT_CONNECTED in error.reason for error in errors):
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
        started = [process for process, _ in self._members if process.pid is not None]
        for process in started:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        for process in started:
            process.join()
        for _, pipe in self._members:
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
                self._members.append((get_context("forkserver").Process(target=_live, args=args, daemon=True), pipe))
                self._members[-1][0].start()
                theirs.close()  # so that the death of the process closes the pipe
        except (EOFError, ConnectionError) as error:
            self.end()
            reason = f"importing {', '.join(self._preload) or 'torch'} ended the process, or took more than {limit:g} s"
            raise RankError(0, reason, reason) from error

    def _send(self) -> None:
        if not self._members:
            self._start()
        self._calls += 1
        self._deadline = time.monotonic() + self._timeout
        group = (f"file://{self._folder}/store_{self._calls}", self._timeout) if self._group else None
        port, size = str(free_port()), str(self.world_size)
        inherited = {name: value for name, value in os.environ.items() if name not in LAUNCH_VARIABLES}
        for rank, (_, pipe) in enumerate(self._members):
            values = (str(rank), str(rank), size, size, "127.0.0.1", port) if self.world_size > 1 else ()
            around = {**inherited, **dict(zip(LAUNCH_VARIABLES, values, strict=False))}, os.getcwd(), sys.path
            with contextlib.suppress(ConnectionError):  # it died: `wait` says why
                pipe.send_bytes(pickle.dumps((self._call, group, around)))

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
            return RankError(rank, reason, reason)
        return RankError(rank, reason, "\n".join([reason, *log.read_text(errors="replace").splitlines()[-20:]]))

    def _describe_hung(self, hung: list[int]) -> RankError:
        """With the stacks of each, which faulthandler writes also from within a blocked collective."""
        for rank in hung:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._members[rank][0].pid, signal.SIGUSR1)
        time.sleep(0.5)
        found = {rank: path.read_text() for rank in hung if (path := Path(self._folder, f"stacks_{rank}")).exists()}
        # Of the main thread, which comes last.
        stacks = {rank: text.rpartition("(most recent call first):\n")[2].rstrip() for rank, text in found.items()}
        where = "".join(f"\n{list_ranks(ranks)} at:\n{stack}" for stack, ranks in ranks_by_value(stacks).items())
        reason = f"had not ended after {self._timeout:g} s"
        return RankError(hung[0], reason, reason + where, hung=True)


def start_server(preload: Sequence[str], limit: float = _IMPORT_S) -> None:
    """Start the server that forks ranks, unless it runs. Its imports may take `limit` seconds."""
    get_context("forkserver").set_forkserver_preload([__name__])
    before = dict(os.environ)
    # Ranks share cores; and CUDA, once asked for devices, stands no fork.
    os.environ.update(OMP_NUM_THREADS="1", PYTORCH_NVML_BASED_CUDA_CHECK="1")
    os.environ[_MODULES] = " ".join([f"{limit:g}", *preload])
    try:
        forkserver.ensure_running()
    finally:
        for name in ("OMP_NUM_THREADS", "PYTORCH_NVML_BASED_CUDA_CHECK", _MODULES):
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})


def free_port() -> int:
    """A TCP port that nobody uses now.

    Below those that the kernel gives to clients: a client that waits for a server there can connect to itself.
    """
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


# -- in each rank ---------------------------------------------------------------------------------------------------


def _live(rank: int, world_size: int, folder: str, pipe: Any, device: str) -> None:
    """Answer calls. A rank that has ended a call waits for the others: leaving would break their connections."""
    os.setsid()  # Ctrl-C reaches the parent only, which ends this process and those that it has started
    current_process().daemon = False  # it may start processes
    log, stacks = (open(f"{folder}/{what}_{rank}", "a") for what in ("log", "stacks"))  # noqa: SIM115 - until the end
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # nobody asks any more
        while True:
            message = pipe.recv_bytes()
            try:
                answer: Any = _answer(message, rank, world_size, device)
            except BaseException as error:
                sys.stdout.flush()
                pipe.send_bytes(pickle.dumps(_describe(rank, error)))
                threading.Event().wait()  # for its end
            sys.stdout.flush()
            pipe.send_bytes(pickle.dumps(answer))
            pipe.recv_bytes()  # all have ended
            if dist.is_initialized():
                dist.destroy_process_group()
            gc.collect()
    _end(folder)


def _answer(message: bytes, rank: int, world_size: int, device: str) -> bytes:
    call, group, (variables, directory, path) = pickle.loads(message)
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(directory)
    sys.path[:] = path
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank) if device == "cuda" else None
    if gpu is not None:
        torch.cuda.set_device(gpu)
    if group is not None:  # its time limit is later than the parent's, which has the stacks
        store, seconds = group
        backend, limit = "gloo" if gpu is None else "nccl", timedelta(seconds=seconds + 60)
        dist.init_process_group(backend, store, limit, world_size, rank, device_id=gpu)
    function, args = pickle.loads(call)
    return pickle.dumps(function(*args))


def _describe(rank: int, error: BaseException) -> RankError:
    """For the parent."""
    rejection = str(error) if isinstance(error, HalfmeshError) else ""
    reason, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return RankError(rank, reason, trace, False, rejection, may_be_of_peer(error), getattr(error, "measures", None))


def _end_with_parent(folder: str) -> None:
    parent: Any = parent_process()
    connection.wait([parent.sentinel])
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


# -- in the server, which imports this file first ------------------------------------------------------------------


if _MODULES in os.environ:
    _limit, *_names = os.environ[_MODULES].split()
    os.dup2(2, 1)  # what modules print is not part of an answer
    faulthandler.dump_traceback_later(float(_limit), exit=True)
    for _name in _names:
        with contextlib.suppress(BaseException):  # it fails again in the ranks, which can say so
            importlib.import_module(_name.partition(":")[0])
    faulthandler.cancel_dump_traceback_later()
    gc.collect()
    gc.freeze()  # ranks do not search what is here for garbage, which also would copy its memory
