"""At which step boundary all ranks stop: agreed on through the store, without a collective in each step."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import torch.distributed as dist

from ..distributed.env import list_ranks
from ..errors import CheckpointError
from ..parallel.comm import get_within
from ..utils.log import get_logger

_log = get_logger(__name__)
_LONG_S = 7 * 86400.0  # then the thread asks again
_ANSWER_S = 3.0  # how long the store may take to answer at the end


class StopAgreement:
    """Makes all ranks stop at the same boundary after any of them has asked for it. Steps before that cost nothing.

    A thread of each rank blocks on a key of the store, until a rank asks. Each rank then posts the number of boundaries
    that it has passed, and waits at its next one for the numbers of all: they stop at the one after the greatest.
    Threads post for ranks that are blocked in a collective, for which others may have to come to their next boundary.

    Args:
        store: for the main thread.
        blocked: the same store over another connection, which the thread blocks.
        timeout_s: the seconds that a rank waits for the others.
    """

    def __init__(self, store: Any, blocked: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._blocked, self._rank, self._size, self._timeout_s = store, blocked, rank, size, timeout_s
        self._lock, self._decided = threading.Lock(), threading.Event()
        self._passed = self._stop_at = 0
        self._has_posted = self._has_warned = False
        self._lost: Exception | None = None  # why the thread has ended without a decision
        self._thread = threading.Thread(target=self._answer, daemon=True, name="halfmesh stop agreement")
        self._thread.start()

    def pass_boundary(self, asks: bool) -> bool:
        """Called at each boundary, equally often on all ranks. Returns True if all ranks stop at this one.

        Args:
            asks: this rank wants to stop: at the next boundary, or the one after it.

        Raises:
            TimeoutError: some rank does not answer.
            CheckpointError: this rank asks, or the others wait for it, and it has lost the store.
        """
        with self._lock:
            waits = self._has_posted
            if not waits:
                self._passed += 1
        if asks and not waits:
            self.ask()
        if self._lost is not None and not self._has_warned and not waits:
            self._has_warned = True  # by the main thread: a launch that has failed ends before, and says so itself
            text = "the store that ranks agree through does not answer: %s; signals, engine.preempt() save no more"
            _log.warning(text, self._lost, ranks=None)
        if not waits:
            return False
        if not self._decided.wait(self._timeout_s):
            posted = {int(line.split()[0]) for line in self._store.get("posts").decode().splitlines()}
            missing = set(range(self._size)).difference(posted)
            late = f"within {self._timeout_s:g} s (config key timeout)"
            raise TimeoutError(f"{list_ranks(missing)} did not say {late} at which step to stop; have they ended?")
        self._refuse_lost()
        self._passed += 1
        return self._passed == self._stop_at

    def ask(self) -> None:
        """Want to stop at the next boundary, or the one after it. Raises CheckpointError if the store is lost."""
        self._refuse_lost()
        with self._lock:
            if self._has_posted:
                return
            try:
                self._store.set("asked", "1")
                self._post(self._store)
            except dist.DistError as error:
                self._lost = error
        self._refuse_lost()

    def _refuse_lost(self) -> None:
        if self._lost is not None:
            why = f"the store that ranks agree through does not answer: {self._lost}"
            raise CheckpointError(f"the run was told to stop, but cannot save: {why}") from self._lost

    def close(self) -> None:
        """End the threads of all ranks. May be called twice, and by one rank alone: then nobody stops any more."""
        # In a thread: torch's call does not return if the host of the store has lost power or network.
        telling = threading.Thread(target=self._tell_end, daemon=True, name="halfmesh stop agreement's end")
        try:
            telling.start()
        except RuntimeError:  # the interpreter shuts down: since 3.12 it starts no thread then
            self._tell_end()
        else:
            telling.join(_ANSWER_S)
        self._thread.join(1.0)  # one that comes back from C++ while the interpreter shuts down aborts the process

    def _tell_end(self) -> None:
        with contextlib.suppress(dist.DistError):  # the store is gone, and with it what the thread waits for
            self._store.compare_set("stop_at", "", "0")
            self._store.set("asked", "1")

    def _post(self, store: Any) -> None:
        self._has_posted = True
        store.append("posts", f"{self._rank} {self._passed}\n")
        if store.add("count", 1) == self._size:
            furthest = max(int(line.split()[1]) for line in store.get("posts").decode().splitlines())
            store.compare_set("stop_at", "", str(furthest + 1))

    def _answer(self) -> None:
        try:
            self._wait_for("asked")
            with self._lock:
                if not self._has_posted:
                    self._post(self._blocked)
            self._stop_at = int(self._wait_for("stop_at"))
        except RuntimeError as error:  # as torch's are; `pass_boundary` says it, if there is one more
            self._lost = error
        self._decided.set()

    def _wait_for(self, key: str) -> bytes:
        while (value := get_within(self._blocked, key, _LONG_S)) is None:
            pass
        return value
