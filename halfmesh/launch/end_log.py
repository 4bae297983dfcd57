"""How each rank of a run ended, left by the ranks for each other in the store that they met in.

The store holds one log of lines "<rank> <end> ...". Of a rank's lines the last one counts, so that what an earlier run
has left in the same store (torchrun's outlives a group) means nothing: every rank begins with "running".

A store that rank 0 hosts ends with it, and only then do ranks that block in a collective with rank 0 notice that
something is wrong. So a thread of each rank waits for the reason, which the first one that knows it has to publish. The
same thread answers when another rank, which has waited in vain, asks where this one is.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

LOG = "halfmesh/ends"
ERROR_OF = "halfmesh/error_of_rank_"
REASON_FOR = "halfmesh/reason_for_rank_"
CALL_TO = "halfmesh/call_to_rank_"
ANSWER_OF = "halfmesh/answer_of_rank_"
RUNS = "halfmesh/ranks_that_began"
HOST = "halfmesh/host"
ASKED = "where?"
HOST_S = 10.0  # how long after the others the host may be ready
STOPPED = "Tt"  # by a signal, by a debugger
T = TypeVar("T")


class End(StrEnum):
    """How a rank ended, or that it has not."""

    RUNNING = "running"
    FINISHED = "finished"  # closed its group, or left the program, without an error
    FAILED = "failed"  # by an error of its own
    INTERRUPTED = "interrupted"
    LOST = "lost"  # its connection to another rank
    TIMED_OUT = "timed_out"  # waiting for another rank
    KILLED = "killed"  # found by others on its machine: its process is gone and has left nothing


@dataclass(frozen=True)
class Ends:
    """What the log says: how each rank ended, in the order in which they did, and the first error of a rank's own."""

    of_rank: dict[int, End]
    first_error: str = ""


class EndLog:
    """One rank's access to the log.

    Args:
        store: the same for all ranks. It may end before this process does; torch then prints a stack of its C++ code,
            once, because nothing more is asked of it.
        rank, world_size: which rank of how many this is.
        host: the rank whose process hosts the store; None if the launcher does.
        answer: says where this rank is, whenever it is asked, in a thread; None: it does not answer.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        host: int | None = None,
        answer: Callable[[], str] | None = None,
    ) -> None:
        self.rank = rank
        self.host = host
        self._store: Any = store  # torch's stubs know no `append`
        self._left = False
        self._store_is_gone = False
        self._running_here: dict[int, int] = {}  # rank: process, on this machine
        self._reason = ""
        self._reason_keys = [f"{REASON_FOR}{other}" for other in range(world_size)]
        self._answer = answer
        self._run = (self._store.add(RUNS, 1) - 1) // world_size  # in a store that an earlier group had, too
        self._calls = [f"{CALL_TO}{other}/{self._run}" for other in range(world_size)]
        self._answers = [f"{ANSWER_OF}{other}/{self._run}" for other in range(world_size)]
        self._thread: threading.Thread | None = None
        self._host_process = 0  # 0: this one, or not known
        self._append(rank, End.RUNNING, _machine(), str(os.getpid()))
        if host == rank:
            self._store.set(HOST, f"{_machine()} {os.getpid()}")
        if answer is not None or (host is not None and host != rank):
            waiting = store.clone()  # a connection of its own: it is in use as long as this rank runs
            waiting.set_timeout(timedelta(days=20))  # torch counts milliseconds in 32 bits
            self._thread = threading.Thread(
                target=self._await_calls, args=(waiting,), daemon=True, name="halfmesh ends"
            )
            self._thread.start()

    def leave(self, end: End, error: str = "") -> None:
        """Tell the others how this rank ended; the first call counts. They can read it when this returns."""
        if self._left:
            return
        self._left = True
        if error:
            self._ask(lambda: self._store.set(f"{ERROR_OF}{self.rank}", error))
        self._ask(partial(self._append, self.rank, end))
        self._ask(lambda: self._store.check([LOG]))  # has an answer, which the others do not wait for

    def finish(self, answer: str = "") -> bool:
        """This rank ends; without an error, unless it has left one. Returns whether it ends now. The last call.

        Args:
            answer: to who asks later where it is, if it ends now.
        """
        ends_now, self._left = not self._left, True
        if ends_now:
            if answer:
                self.leave_answer(answer)
            self._ask(partial(self._append, self.rank, End.FINISHED))
        if self._thread is not None and self._thread.is_alive():
            # A thread that came back from C++ during the shutdown of the interpreter would abort the process.
            self._ask(lambda: self._store.set(self._reason_keys[self.rank], ""))
            self._ask(lambda: self._store.set(self._calls[self.rank], ""))
            self._thread.join(1.0)
        return ends_now

    def read(self) -> Ends | None:
        """What is known by now; None when the store is gone."""
        log = self._ask(lambda: self._store.get(LOG).decode())
        if log is None:
            return None
        of_rank: dict[int, End] = {}
        self._running_here = {}
        for line in log.splitlines():
            number, end, *where = line.split(" ")
            rank = int(number)
            if end == End.KILLED and of_rank.get(rank) is not End.RUNNING:
                continue  # found by several at a time, or too late
            of_rank.pop(rank, None)  # so that it moves to the end of the order
            of_rank[rank] = End(end)
            self._running_here.pop(rank, None)
            if where and where[0] and where[0] == _machine():
                self._running_here[rank] = int(where[1])
        failed = [rank for rank, end in of_rank.items() if end is End.FAILED]
        error = self._ask(lambda: self._store.get(f"{ERROR_OF}{failed[0]}").decode()) if failed else ""
        return Ends(of_rank, error or "")

    def find_killed(self) -> list[int]:
        """The ranks of this machine whose processes are gone, and which were running when the log was last read."""
        return [rank for rank, process in self._running_here.items() if not _is_running(process)]

    def leave_killed(self, ranks: Iterable[int]) -> None:
        """Tell all ranks, also those of other machines, what `find_killed` found."""
        for rank in ranks:
            self._ask(partial(self._append, rank, End.KILLED))

    def publish(self, reason: str) -> None:
        """Let all ranks keep `reason`, for the time after the end of the store."""
        if self.host is not None and not self._reason:
            self._reason = reason
            for keys in (self._reason_keys, self._calls):  # who is called finds the reason
                self._ask(partial(self._store.multi_set, keys, [reason] * len(keys)))

    def published(self) -> str:
        """The reason that was published before the store ended; empty if its host ended without a word."""
        if self._thread is not None:
            self._thread.join(1.0)
        return self._reason

    def await_others(self, limit_s: float) -> bool:
        """Wait until all ranks have ended, `limit_s` at most. Returns whether they have."""
        until = time.monotonic() + limit_s
        while (ends := self.read()) is not None and End.RUNNING in ends.of_rank.values():
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        return True

    def ask_all(self) -> None:
        """Ask the other ranks where they are."""
        others = [key for rank, key in enumerate(self._calls) if rank != self.rank]
        self._ask(lambda: self._store.multi_set(others, [ASKED] * len(others)))

    def leave_answer(self, text: str) -> None:
        """Say where this rank is, without being asked."""
        self._ask(lambda: self._store.set(self._answers[self.rank], text))

    def answers(self) -> dict[int, str]:
        """What the ranks have answered so far."""
        found = {}
        for rank, key in enumerate(self._answers):
            if self._ask(partial(self._store.check, [key])):
                found[rank] = self._ask(partial(self._store.get, key))
        return {rank: text.decode() for rank, text in found.items() if text is not None}

    @property
    def host_is_stopped(self) -> bool:
        """Whether the process that hosts the store is stopped, on this machine: whoever asks it would wait, too."""
        return self._host_process > 0 and _state(self._host_process) in STOPPED

    def _await_calls(self, store: dist.Store) -> None:
        try:
            self._find_host(store)
            if store.get(self._calls[self.rank]).decode() == ASKED and self._answer is not None:
                store.set(self._answers[self.rank], self._answer())
            reason = store.get(self._reason_keys[self.rank]).decode()
            self._reason = self._reason or reason
        except Exception:  # it has ended
            self._store_is_gone = True

    def _find_host(self, store: dist.Store) -> None:
        """Which process hosts the store, if it is on this machine and says so before long."""
        until = time.monotonic() + HOST_S
        while self.host not in (None, self.rank) and time.monotonic() < until and not self._left:
            if store.check([HOST]):
                machine, process = store.get(HOST).decode().split(" ")
                self._host_process = int(process) if machine and machine == _machine() else 0
                return
            time.sleep(0.05)

    def _append(self, rank: int, end: End, *where: str) -> None:
        self._store.append(LOG, " ".join([str(rank), end, *where]) + "\n")

    def _ask(self, action: Callable[[], T]) -> T | None:
        if self._store_is_gone or self.host_is_stopped:
            return None
        try:
            return action()
        except Exception:
            self._store_is_gone = True
            return None


@cache
def _machine() -> str:
    """The same for all processes that see each other in /proc; empty where there is no /proc."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    return ""


def _is_running(process: int) -> bool:
    return _state(process) not in "ZX"  # ended, and not yet seen by its parent


def _state(process: int) -> str:
    """The letter that the kernel has for it; "X" if it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "X"
