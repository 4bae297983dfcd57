"""Processes of this machine that run one function as the ranks of a launch. Nothing of them is left behind."""

from __future__ import annotations

import contextlib
import faulthandler
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, forkserver, get_context
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch
import torch.distributed as dist

from ..distributed.failures import is_echo, is_timeout
from ..errors import HalfmeshError, InputError
from . import preload as server

T = TypeVar("T")
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_IMPORT_S = 120.0  # how long the imports of the server may take, at least
_GRACE_S = 3.0  # after an error that only says that another rank is gone: time for that one's own error to arrive
_NOT_CONNECTED, _ATTEMPTS = "Gloo connectFullMesh failed", 3  # sockets missed each other on a busy machine


@dataclass(eq=False)
class RankError(Exception):
    """A rank failed, died, or had not ended at the time limit: the first, or the first that hangs.

    Attributes:
        reason: in one line: "ValueError: text".
        text: the traceback; of ranks that hang the stacks of all; of one that died the end of what it wrote.
        refusal: the message, if halfmesh raised the error on purpose; else "".
        is_echo: it only says that another rank is gone.
    """

    rank: int
    reason: str
    text: str
    hung: bool = False
    refusal: str = ""
    is_echo: bool = False
    measures: Any = None
    at: float = field(default_factory=time.monotonic)  # all processes of a machine share this clock

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.text}"


@dataclass
class Ranks(Generic[T]):
    """Ranks that work while a `with` block lasts. Several can be at work at the same time.

    They are forked from a server that has imported torch and halfmesh; each has one thread, and torchrun's variables
    unless it is alone. What they print is kept for errors.

    Args:
        function: of a module's top level; it gets `args`. Its result is pickled.
        timeout: seconds from the `with`, for everything.
        device: "cpu" (gloo), or "cuda" (nccl, a GPU for each rank).
        preload: modules for the server, if this starts it; what is in them now stays there until this process ends.
        environment: variables for the ranks, besides those of this process.
        groups: make the process group before the call.
    """

    function: Callable[..., T]
    world_size: int
    args: Sequence[Any] = ()
    timeout: float = 600.0
    device: str = "cpu"
    preload: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    groups: bool = True

    def __enter__(self) -> Self:
        """Raises InputError if the function cannot be sent to other processes, or if there are too few GPUs."""
        if self.device == "cuda" and self.world_size > (found := torch.cuda.device_count()):
            raise InputError(f"{self.world_size} ranks need a GPU each, and there are {found}; use device='cpu'")
        try:
            self._call = pickle.dumps((self.function, tuple(self.args)))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            allowed = "name functions of a module's top level, such as package.module:build"
            raise InputError(
                f"this cannot be sent to the processes that should call it ({error}); {allowed}"
            ) from error
        self._attempts = _ATTEMPTS
        self._start()
        return self

    def _start(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="halfmesh_ranks_"))
        self._members: list[tuple[Any, Any]] = []
        limit, port = max(_IMPORT_S, self.timeout), _free_port()
        inherited = {name: value for name, value in os.environ.items() if name not in _LAUNCH}
        try:
            context = get_context("forkserver")
            context.set_forkserver_preload([server.__name__])  # has an effect only before the server starts
            with _server_environment(" ".join([str(limit), *self.preload])):
                forkserver.ensure_running()
            for rank in range(self.world_size):
                place = (rank, rank, self.world_size, self.world_size, "127.0.0.1", port)
                launch = dict(zip(_LAUNCH, map(str, place), strict=True)) if self.world_size > 1 else {}
                group = self.timeout if self.groups and launch else None
                pipe, theirs = context.Pipe()
                environment = {**inherited, **launch, **self.environment}
                args = (rank, self.world_size, self._folder, theirs, self._call, environment, self.device, group)
                self._members.append((context.Process(target=_live, args=args), pipe))
                self._members[-1][0].start()
                theirs.close()  # so that the death of the process closes the pipe
        except BaseException as error:
            self.__exit__()
            if not isinstance(error, (EOFError, ConnectionError)):
                raise
            reason = f"importing {', '.join(self.preload) or 'torch'} ended the process, or took more than {limit:g} s"
            raise RankError(0, reason, reason) from error
        self._deadline = time.monotonic() + self.timeout

    def wait(self) -> list[T]:
        """The results in the order of ranks, when all have one.

        Raises:
            RankError: of several errors the first that is not the echo of another rank's end; or the time is up.
        """
        ends: dict[int, Any] = {}
        errors: list[RankError] = []
        deadline = self._deadline
        while len(ends) < self.world_size and all(error.is_echo for error in errors):
            # Also the sentinel: a pipe may be held open by processes that its rank has started.
            waiting = [(rank, *member) for rank, member in enumerate(self._members) if rank not in ends]
            handles = {handle: rank for rank, process, pipe in waiting for handle in (pipe, process.sentinel)}
            ready = connection.wait(list(handles), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            ends |= {rank: self._receive(rank, *self._members[rank]) for rank in {handles[handle] for handle in ready}}
            errors = [end for end in ends.values() if isinstance(end, RankError)]
            deadline = min(deadline, time.monotonic() + _GRACE_S) if errors else deadline
        if any(_NOT_CONNECTED in error.reason for error in errors) and self._attempts > 1:
            self._attempts -= 1
            self.__exit__()
            self._start()
            return self.wait()
        if errors:
            raise min(errors, key=lambda error: (error.is_echo, error.at, error.rank))
        if len(ends) < self.world_size:
            raise self._describe_hung([rank for rank in range(self.world_size) if rank not in ends])
        return [pickle.loads(ends[rank]) for rank in range(self.world_size)]

    def _receive(self, rank: int, process: Any, pipe: Any) -> Any:
        with contextlib.suppress(EOFError, ConnectionError):
            if pipe.poll():
                return pickle.loads(pipe.recv_bytes())
        process.join(5)
        code, log = process.exitcode or 0, self._folder / f"log_{rank}"
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
        places: dict[str, list[str]] = {}
        for rank in hung:
            path = self._folder / f"stacks_{rank}"
            _, _, stack = (path.read_text() if path.exists() else "").rpartition("(most recent call first):\n")
            places.setdefault(stack.rstrip(), []).append(str(rank))  # of the main thread, which comes last
        where = "".join(f"\nrank {', '.join(ranks)} is at:\n{stack}" for stack, ranks in places.items())
        reason = f"had not ended after {self.timeout:g} s"
        return RankError(hung[0], reason, reason + where, hung=True)

    def __exit__(self, *_: object) -> None:
        """Kill what is still running, with what it has started, and remove what it wrote."""
        for process, pipe in self._members:
            if process.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.join()
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def run(function: Callable[..., T], world_size: int, args: Sequence[Any] = (), **options: Any) -> list[T]:
    """The results of `Ranks` of these arguments, when all have ended."""
    with Ranks(function, world_size, args, **options) as ranks:
        return ranks.wait()


@contextlib.contextmanager
def _server_environment(modules: str) -> Iterator[None]:
    """Of a server that starts in this block. Ranks share cores; and CUDA, once asked for devices, stands no fork."""
    mine = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1", server.MODULES: modules}
    before = {name: os.environ[name] for name in mine if name in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for name in mine:
            os.environ.pop(name, None)
        os.environ.update(before)


def _free_port() -> int:
    """Below those that the kernel gives to clients: a client that waits for its server there can connect to itself."""
    while True:
        port = random.SystemRandom().randrange(20000, 30000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _live(
    rank: int, size: int, folder: Path, pipe: Any, call: bytes, variables: Any, device: str, group: float | None
) -> None:
    """One rank. It waits for its end when it is done: a rank that leaves breaks the connections of the others."""
    os.setsid()  # Ctrl-C reaches the parent only, which ends this process and those that it has started
    log, stacks = (open(folder / f"{what}_{rank}", "a") for what in ("log", "stacks"))  # noqa: SIM115 - until the end
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=_end_with_parent, args=(pipe, folder), daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    try:
        torch.set_num_threads(1)
        place = torch.device("cuda", rank) if device == "cuda" else None
        if place is not None:
            torch.cuda.set_device(place)
        if group is not None:  # its time limit is later than the parent's, which has the stacks
            backend, store = "nccl" if place else "gloo", f"file://{folder}/store"
            dist.init_process_group(backend, store, timedelta(seconds=group + 60), size, rank, device_id=place)
        function, args = pickle.loads(call)
        end: Any = pickle.dumps(function(*args))
    except BaseException as error:
        echo = any(is_echo(one) or is_timeout(one) for one in (error, error.__cause__ or error))
        refusal = str(error) if isinstance(error, HalfmeshError) else ""
        reason = f"{type(error).__name__}: {error}"
        measures, trace = getattr(error, "measures", None), traceback.format_exc()
        end = RankError(rank, reason, trace, False, refusal, echo, measures, time.monotonic())
    sys.stdout.flush()
    pipe.send_bytes(pickle.dumps(end))
    threading.Event().wait()


def _end_with_parent(pipe: Any, folder: Path) -> None:
    """Nothing comes through the pipe: it closes when the parent dies."""
    with contextlib.suppress(OSError):
        pipe.poll(None)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)
