"""Agreement between ranks: whether work succeeded on all of them (also in a thread during training, through the store),
and the boundary at which all stop, without a collective in each step."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..distributed.env import list_ranks, ranks_by_value
from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ..parallel.comm import gather_objects, get_within, is_simulated, own_store
from ..parallel.mesh import ParallelContext

_LONG_S = 7 * 86400.0  # then the thread asks again
T = TypeVar("T")

# -- work that all ranks do together -----------------------------------------------------------------------------------


Failure = tuple[str, bool]
"""The text of an error, and True if it is an InputError."""


def attempt(work: Callable[[], T]) -> tuple[tuple[Failure | None, T | None], Exception | None]:
    """The failure of `work`, for the other ranks, and its result; and the error itself."""
    try:
        return (None, work()), None
    except Exception as error:
        words = str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
        return ((words, isinstance(error, InputError)), None), error


def gather_results(context: ParallelContext, what: str, work: Callable[[], T]) -> list[T]:
    """Do `work` on every rank. Returns the result of each rank, on all of them.

    Args:
        what: the beginning of the error message: "saving to here failed".

    Raises:
        CheckpointError: it failed on some ranks; raised on all, with the reason of each. InputError: all failures are.
    """
    outcome, error = attempt(work)
    everyone: list[tuple[Failure | None, Any]] = gather_objects(outcome)
    reject_failures(context, what, _failures_of(everyone), error)
    return [result for _, result in everyone]


def _failures_of(everyone: list[tuple[Failure | None, Any]]) -> dict[int, Failure]:
    return {rank: failure for rank, (failure, _) in enumerate(everyone) if failure}


def run_on_all_ranks(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """As `gather_results`, but returns this rank's result, which is not sent."""
    done: list[T] = []
    gather_results(context, what, lambda: done.append(work()))
    return done[0]


def run_on_rank_zero(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """Do `work` on rank 0 alone. Return its result on all ranks. Arguments and errors are those of `gather_results`."""
    results = gather_results(context, what, lambda: work() if context.rank == 0 else None)
    return results[0]  # type: ignore[return-value]


def reject_failures(context: ParallelContext, what: str, failures: dict[int, Failure], cause: Exception | None) -> None:
    """Raise the error of `gather_results` if there are `failures`, by rank; `cause` is this rank's."""
    if not failures:
        return
    kind = InputError if all(is_input for _, is_input in failures.values()) else CheckpointError
    reasons = ranks_by_value({rank: words for rank, (words, _) in failures.items()})
    if len(reasons) == 1 and len(failures) == context.size:
        raise kind(f"{what}: {next(iter(reasons))}") from cause
    lines = (f"{context.rank_names.names(ranks)}: {words}" for words, ranks in reasons.items())
    raise kind(bullet_list(f"{what}:", lines)) from cause


# -- in threads -------------------------------------------------------------------------------------------------------


class StoreMessages:
    """Messages to rank 0 and back that need no group, whose connections would grow with the number of ranks. All ranks
    make it, and call it equally often.

    Args:
        timeout_s: the seconds that rank 0 waits for the other ranks, all together.
    """

    def __init__(self, context: ParallelContext, timeout_s: float) -> None:
        self.context, self._timeout_s, self._number = context, timeout_s, 0
        self._store = own_store(context)[0] if context.size > 1 and not is_simulated() else None

    def gather_results(self, what: str, work: Callable[[], T]) -> list[T]:
        """As the function of this name, but only rank 0 gets the results of others, and a rank fails that is late."""
        context, store, (outcome, error) = self.context, self._store, attempt(work)
        self._number += 1
        reply, limit_s = f"reply {self._number}", self._timeout_s
        everyone: list[tuple[Failure | None, Any]] = [outcome] * context.size
        if store is None:
            failures = _failures_of(everyone)
        elif context.rank == 0:
            end = time.monotonic() + limit_s
            everyone[1:] = [self._receive(rank, end) for rank in range(1, context.size)]
            failures = _failures_of(everyone)
            store.set(reply, pickle.dumps(failures))
        else:
            store.set(f"{self._number} of {context.rank}", zlib.compress(pickle.dumps(outcome), 1))
            told = get_within(store, reply, 2 * limit_s)  # rank 0 also waits for the others
            failures = {0: _late(2 * limit_s)} if told is None else pickle.loads(told)
        reject_failures(context, what, failures, error)
        return [result for _, result in everyone]

    def _receive(self, rank: int, end: float) -> tuple[Failure | None, Any]:
        """The message that `rank` sends until the time `end`."""
        store: Any = self._store
        key, left_s = f"{self._number} of {rank}", end - time.monotonic()
        # After the end no `get` of what is not there: torch prints each one that fails.
        sent = get_within(store, key, left_s) if left_s > 0 or store.check([key]) else None
        if sent is None:
            return _late(self._timeout_s), None
        store.delete_key(key)
        outcome: tuple[Failure | None, Any] = pickle.loads(zlib.decompress(sent))
        return outcome


def _late(limit_s: float) -> Failure:
    return f"no answer within {limit_s:g} s (config key timeout)", False


# -- where all stop ----------------------------------------------------------------------------------------------------


class StopAgreement:
    """Makes all ranks stop at the same boundary after any of them has asked for it. Steps before that cost nothing.

    A thread of each rank blocks on a key of the store, until a rank asks. Each rank then posts the number of boundaries
    that it has passed, and waits at its next one for the numbers of all: they stop at the one after the greatest.
    Threads post for ranks that are blocked in a collective, which may need other ranks to come to their next boundary.

    Args:
        store: the store that the main thread uses.
        blocked: the same store over another connection, which the thread blocks.
        timeout_s: the seconds that a rank waits for the others.
    """

    def __init__(self, store: Any, blocked: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store, self._blocked, self._rank, self._size, self._timeout_s = store, blocked, rank, size, timeout_s
        self._lock, self._decided = threading.Lock(), threading.Event()
        self._passed = self._stop_at = 0
        self._has_posted = False
        self._lost: Exception | None = None  # why the thread has ended without a decision
        self._thread = threading.Thread(target=self._answer, daemon=True, name="halfmesh stop agreement")
        self._thread.start()

    def pass_boundary(self, asks: bool) -> bool:
        """Called at each boundary, equally often on all ranks. Returns True if all ranks stop at this one.

        Args:
            asks: this rank wants to stop: at the next boundary, or the one after it.

        Raises:
            TimeoutError: some rank does not answer.
            CheckpointError: this rank has lost the store.
        """
        with self._lock:
            waits = self._has_posted
            self._passed += not waits
        if not waits:
            if asks:
                self.ask()
            return False
        if not self._decided.wait(self._timeout_s):
            posted = {int(line.split()[0]) for line in self._store.get("posts").decode().splitlines()}
            missing = set(range(self._size)).difference(posted)
            late = f"within {self._timeout_s:g} s (config key timeout)"
            raise TimeoutError(f"{list_ranks(missing)} did not answer {late} at which step to stop; have they ended?")
        self._reject_lost()
        self._passed += 1
        return self._passed == self._stop_at

    def ask(self) -> None:
        """Want to stop at the next boundary, or the one after it. Raises CheckpointError if the store is lost."""
        with self._lock:
            if not self._has_posted:
                try:
                    self._store.set("asked", "1")
                    self._post(self._store)
                except dist.DistError as error:
                    self._lost = error
        self._reject_lost()

    def _reject_lost(self) -> None:
        if self._lost is not None:
            why = f"the store that ranks agree through does not answer: {self._lost}"
            raise CheckpointError(f"the run was told to stop, but cannot save: {why}") from self._lost

    def close(self) -> None:
        """End the threads of all ranks. May be called twice, and by one rank alone: then nobody stops any more."""
        # `set` alone waits for no answer, which a host of the store without power or network does not give.
        with contextlib.suppress(dist.DistError):  # the store is gone, and with it what the thread waits for
            if not self._decided.is_set():
                self._store.set("stop_at", "0")
                self._store.set("asked", "1")
        self._thread.join(1.0)  # one that comes back from C++ while the interpreter shuts down aborts the process

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
        except RuntimeError as error:  # as torch's are
            self._lost = error
        self._decided.set()

    def _wait_for(self, key: str) -> bytes:
        while (value := get_within(self._blocked, key, _LONG_S)) is None:
            pass
        return value
