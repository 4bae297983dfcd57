"""The server that forks the processes of `LocalRanks`, and the code that they run. The server imports it first."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import connection, current_process, parent_process
from typing import Any

import torch
import torch.distributed as dist

from ..errors import HalfmeshError
from .failures import may_be_of_peer

MODULES = "HALFMESH_PRELOAD"
"""The variable of the server: seconds that its imports may take, and the names of modules."""


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


def live(rank: int, world_size: int, folder: str, pipe: Any, device: str) -> None:
    """Answer calls. A rank that has ended a call waits for the others: leaving would break their connections."""
    os.setsid()  # Ctrl-C reaches the parent only, which ends this process and those that it has started
    current_process().daemon = False  # it may start processes
    log, stacks = (open(f"{folder}/{what}_{rank}", "a") for what in ("log", "stacks"))  # noqa: SIM115 - until the end
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    faulthandler.register(signal.SIGUSR1, file=stacks)
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    gc.freeze()  # what is there now is not looked at again when a call has ended
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
            for number, handler in handlers.items():
                signal.signal(number, handler)
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
    echo = may_be_of_peer(error)
    rejection = str(error) if isinstance(error, HalfmeshError) else ""
    reason, trace = f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error))
    return RankError(rank, reason, trace, False, rejection, echo, getattr(error, "measures", None), time.monotonic())


def _end_with_parent(folder: str) -> None:
    parent: Any = parent_process()
    connection.wait([parent.sentinel])
    _end(folder)


def _end(folder: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


# -- in the server --------------------------------------------------------------------------------------------------


if MODULES in os.environ:
    _limit, *_names = os.environ[MODULES].split()
    os.dup2(2, 1)  # what modules print is not part of an answer
    faulthandler.dump_traceback_later(float(_limit), exit=True)
    for _name in _names:
        with contextlib.suppress(BaseException):  # it fails again in the ranks, which can say so
            importlib.import_module(_name.partition(":")[0])
    faulthandler.cancel_dump_traceback_later()
