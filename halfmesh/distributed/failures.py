"""When a rank fails, all ranks end within seconds, and each says which rank was the first, and why.

The first rank that fails writes its error into the store that the ranks met in. The others learn of it in one of two
ways. A collective raises: with gloo "Connection closed by peer" at once, or "Timed out waiting" after the time limit.
Or nothing is raised, where a rank waits for its device (NCCL) or runs code of its own: then a thread ends the process.
No collective is used for any of this.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist

from .env import RankNames

# What torch says when a *peer* is gone (gloo, its TCP store, NCCL).
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "remote process exit",
)
# What it says when a peer has not come: gloo, also of collectives after the one that timed out, its TCP store, and NCCL
# under TORCH_NCCL_BLOCKING_WAIT.
TIMEOUTS = (
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "application timeout caused pair closure",
    "wait timeout after",
    "collective operation timeout",
)
POLL_S = 1.0  # how often the thread of each rank looks at the store
ANSWER_S = 3.0  # how long a rank that has lost another one waits to learn who failed first
GRACE_S = 5.0  # how long a rank may take to exit on its own after another one has failed
LINGER_S = 2.0  # how long the rank that hosts the store stays for the others to read it
EXIT_LIMIT_S = 8  # how long the end of a failed process may take: destructors of a broken process group may block
DUMP_AT = 0.9  # part of the time limit without an update after which a rank writes its stacks: before torch ends it


class RankStatus(StrEnum):
    """A rank's message to the others. Without a failure, none says anything before it ends."""

    RUNNING = "running"  # the answer of its thread to the failure of another rank
    FINISHED = "finished"  # without an error
    FAILED = "failed"  # by an error, which may be that another rank is gone
    TIMED_OUT = "timed_out"  # waiting for another rank


class StatusStore:
    """The messages between ranks, and the reason of the first failure.

    Args:
        store: where they met; this takes a connection of its own, because the other one may be waiting for something.

    Attributes:
        told: the last status of each rank that has told one; when the store is gone, what was known before.
        forwards: how often each of these had called `engine(...)` then.
        reason: of the first failure; empty if it is not known.
        is_gone: whether the store is.
    """

    def __init__(self, store: dist.Store, rank: int, world_size: int) -> None:
        # torchrun's store may have what an earlier start of the same ranks has told.
        run = (store.add("halfmesh/starts", 1) - 1) // world_size
        self._store = cast(Any, dist.PrefixStore(f"halfmesh/{run}", store.clone()))  # the stubs know no `append`
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        for key in ("log", "reason"):
            self._store.append(key, "")
        self._rank = rank
        self.told: dict[int, RankStatus] = {}
        self.forwards: dict[int, int] = {}
        self.reason = ""
        self.is_gone = False

    def exchange(self, status: RankStatus | None = None, reason: str = "", forwards: int = 0) -> dict[int, RankStatus]:
        """Read what the others tell, and tell them this rank's `status` with its `forwards` and, if no rank gave one,
        the `reason`."""
        if self.is_gone:  # torch would print a stack of its C++ code each time
            return self.told
        try:
            if reason:
                self._store.compare_set("reason", "", reason)
            if status is not None:
                self._store.append("log", f"{self._rank} {status} {forwards}\n")
            log, first = self._store.multi_get(["log", "reason"])
        except Exception:
            self.is_gone = True
            return self.told
        self.reason = first.decode()
        for line in log.decode().splitlines():
            rank, told, number = line.split()
            self.told[int(rank)], self.forwards[int(rank)] = RankStatus(told), int(number)
        return self.told


class FailureWatch:
    """Exception hook and watching thread of one rank of several; `remove()` ends both.

    Args:
        names: of the ranks, for messages.
        host: the rank whose process hosts the store; None if the launcher does.
        timeout_s: the time limit of collectives.
    """

    def __init__(self, statuses: StatusStore, rank: int, names: RankNames, host: int | None, timeout_s: float) -> None:
        self._statuses = statuses
        self._rank, self._host = rank, host
        self._names = names
        self._timeout_s = timeout_s
        self._parts: weakref.WeakSet[Any] = weakref.WeakSet()  # of engines
        self._calls: list[Mapping[str, int]] = []  # of these, and of those that are gone
        self._ending = threading.Event()  # this rank is exiting on its own
        self._hook = self._on_error
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook
        # Processes of multiprocessing call this, and nothing that is registered with atexit.
        multiprocessing.util.Finalize(None, self._on_exit, exitpriority=0)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="halfmesh failure watch")
        self._thread.start()

    def watch(self, parts: Any) -> None:
        """Write this rank's stacks when the engine with these `parts` makes no update for `DUMP_AT` of the time limit,
        while it trains; count its forwards."""
        self._parts.add(parts)
        self._calls.append(parts.calls)

    def remove(self) -> None:
        """This rank needs the others no longer. A hook that was installed on top of this one stays."""
        self._report_end(RankStatus.FINISHED)
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook

    def ended(self) -> dict[int, bool]:
        """The other ranks that are known to have ended, or to have waited in vain; False: by a failure."""
        others = {rank: status for rank, status in self._statuses.exchange().items() if rank != self._rank}
        return {rank: s is not RankStatus.FAILED for rank, s in others.items() if s is not RankStatus.RUNNING}

    # --- the end of this rank -----------------------------------------------------------------------------------------

    def _report_end(self, status: RankStatus, reason: str = "") -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._statuses.exchange(status, reason, self._forwards())
        self._thread.join(POLL_S)  # one that comes back from C++ while the interpreter shuts down aborts the process

    def _on_exit(self) -> None:
        self._report_end(RankStatus.FINISHED)
        until = time.monotonic() + LINGER_S
        while self._host == self._rank and time.monotonic() < until:
            ended = [status for status in self._statuses.exchange().values() if status is not RankStatus.RUNNING]
            if len(ended) == self._names.world_size:
                break
            time.sleep(0.05)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._ending.is_set():
            self._previous_hook(kind, error, trace)
            return
        name = self._names.name(self._rank)
        if hasattr(signal, "alarm") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's: at shutdown no Python code runs
            signal.alarm(EXIT_LIMIT_S)
        is_late = is_timeout(error)
        if is_late or is_echo(error):
            self._previous_hook(kind, error, trace)
            until = time.monotonic() + ANSWER_S
            self._report_end(RankStatus.TIMED_OUT if is_late else RankStatus.FAILED)
            waited = f"waited {self._timeout_s:g} s (config key timeout) for another rank"
            text = f"[{name}] {waited if is_late else 'lost the connection to another rank'}; {self._find_reason()}"
            error.add_note(text)
            sys.stderr.write(f"{text}\n")  # in one go: other ranks write, too
            sys.stderr.flush()
            if _under_torchrun():  # of errors in the same second its summary shows any; it ends this rank before long
                time.sleep(max(0.0, until - time.monotonic()))
        else:
            lines = "".join(traceback.format_exception(error)).rstrip()
            self._report_end(RankStatus.FAILED, f"the first error was:\n[{name}] {lines}")
            if self._names.has_places:
                error.add_note(f"raised on {name}")
            self._previous_hook(kind, error, trace)
        _record_for_torchrun(error)

    def _forwards(self) -> int:
        return sum(calls["engine"] for calls in self._calls)

    def _find_reason(self) -> str:
        """Who failed first. A rank that has an error of its own says so at once; others take a while to answer."""
        until = time.monotonic() + ANSWER_S
        pause = max(0.05, self._names.world_size / 500)  # one store answers all ranks
        while not self._statuses.reason and not self._statuses.is_gone and time.monotonic() < until:
            time.sleep(pause)
            self._statuses.exchange()
        if not self._statuses.reason:
            self._statuses.exchange(reason=self._guess())
        return self._statuses.reason or self._guess()

    def _guess(self) -> str:
        """The reason by what the ranks have told."""
        told, names = self._statuses.told, self._names
        if self._statuses.is_gone:
            lost = "the launcher" if self._host is None else names.name(self._host)
            return f"{lost}, which hosts the store, is gone without an error (killed, out of memory?)"
        ranks = {status: [rank for rank, theirs in told.items() if theirs is status] for status in RankStatus}
        if silent := set(range(names.world_size)) - set(told):
            return f"no answer from {names.names(silent)} (killed, out of memory, or stopped?)"
        if finished := ranks[RankStatus.FINISHED]:
            return (
                f"{names.names(finished)} ended without an error while others waited for it (left its loop early, or "
                f"called engine.close alone?){self._unlike()}"
            )
        if not ranks[RankStatus.TIMED_OUT]:
            return "no rank has an error of its own (a broken network?)"
        if running := ranks[RankStatus.RUNNING]:
            return f"did not reach the collective in time (hung or too slow): {names.names(running)}{self._unlike()}"
        all_waited = "all ranks waited, so for different collectives: each has to run the same ones, in the same order"
        return f"{all_waited}{self._unlike()}"

    def _unlike(self) -> str:
        """How often the ranks have called `engine(...)`, if not equally often."""
        ranks: dict[int, list[int]] = {}
        for rank, forwards in sorted(self._statuses.forwards.items()):
            ranks.setdefault(forwards, []).append(rank)
        if len(ranks) < 2:
            return ""
        counts = " and ".join(f"{count} times on {self._names.names(some)}" for count, some in sorted(ranks.items()))
        return (
            f"; engine(...) was called {counts}: under data='fsdp', tensor or pipeline parallelism each call needs all "
            "ranks, and so does each update everywhere. If they have unequally many batches, stop all at the smallest "
            "number (drop_last=True), and call it without an `if` around it"
        )

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        steps: list[int] = []
        since = time.monotonic()
        while not self._ending.wait(POLL_S):
            if self._has_failed():
                self._end_after_grace()
                return
            if self._statuses.is_gone:
                return  # with a launcher or a host that had ended well
            now = time.monotonic()
            training = [parts.global_step for parts in list(self._parts) if parts.model.training]
            if training != steps or not training:
                steps, since = training, now
            elif now > since + DUMP_AT * self._timeout_s:
                self._dump(f"no update for {DUMP_AT * self._timeout_s:g} s, {DUMP_AT:g} x the config key timeout")
                since = float("inf")

    def _has_failed(self) -> bool:
        """True if another rank has."""
        told = self._statuses.exchange()
        if self._statuses.is_gone and self._host is not None and told.get(self._host) is not RankStatus.FINISHED:
            return True
        well = RankStatus.FINISHED, RankStatus.RUNNING
        return any(status not in well for rank, status in told.items() if rank != self._rank)

    def _end_after_grace(self) -> None:
        """End this process unless it exits on its own in time."""
        if not self._ending.is_set():
            self._statuses.exchange(RankStatus.RUNNING, forwards=self._forwards())
        until = time.monotonic() + GRACE_S
        while time.monotonic() < until:
            self._statuses.exchange()  # as long as the store is there
            if self._ending.wait(POLL_S):
                return
        reason = self._statuses.reason or self._guess()
        self._dump(f"ended, because another rank failed and this one was still running after {GRACE_S:g} s; {reason}")
        os._exit(1)

    def _dump(self, why: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(f"[{self._names.name(self._rank)}] {why}\nThis rank is at:\n")
        sys.stderr.flush()
        faulthandler.dump_traceback(file=2)


def is_echo(error: BaseException) -> bool:
    """Return True if `error` only says that another rank is gone."""
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error).lower() for words in ECHOES)


def is_timeout(error: BaseException) -> bool:
    """Return True if `error` only says that another rank did not come."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIMEOUTS)


@contextlib.contextmanager
def recorded_for_torchrun() -> Iterator[None]:
    """Errors in this block are shown in torchrun's closing summary, also before there is a `FailureWatch`."""
    try:
        yield
    except Exception as error:
        if not is_echo(error):
            _record_for_torchrun(error)
        raise


def _under_torchrun() -> bool:
    return "TORCHELASTIC_ERROR_FILE" in os.environ


def _record_for_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun shows in its closing summary, what its `record` decorator does."""
    if not _under_torchrun():
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    trace = error.__traceback__
    try:
        raise error  # the handler formats the exception in flight
    except BaseException:
        error.__traceback__ = trace  # without the frame of this function
        get_error_handler().record_exception(error)
