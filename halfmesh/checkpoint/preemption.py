"""A run that is told to end: all ranks learn of it, and agree on the step after which they save.

The word comes to one rank, or to several, at different steps. A thread of each rank looks at a key of the store that
the ranks met in, which is the only way to ask others that wait for nothing. Then, in keys of their own:
1. Each rank says that its thread listens. Until all have, nobody waits: a rank that is gone holds up nothing here.
2. Each holds its count of steps, and tells it, with what came to it.
3. Rank 0 answers: the largest count, after which every rank saves; or that it is given up, because one has closed its
   engine or has not told its count in time.
"""

from __future__ import annotations

import atexit
import itertools
import json
import threading
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ..log import get_logger
from ..parallel.context import ParallelContext
from .last_step import LastStep

_log = get_logger(__name__)

POLL_S = 0.25
"""Between two looks at the store; more with thousands of ranks, which share it."""
SOON_S = 0.02
"""The same once there is something to agree on."""
LIMIT_S = 15.0
"""How long a rank that listens may take to tell its count, which needs no more than Python's lock."""
PARTING_S = 1.0


class Preemption:
    """Whether the run is to end, for all ranks after the same step.

    Args:
        came: what came to this rank; it grows, at any time.
    """

    def __init__(self, context: ParallelContext, came: list[str]) -> None:
        self._came = came
        self._agreement = Agreement.begin(context, came) if context.size > 1 else None

    @property
    def reason(self) -> str:
        """What came, and where."""
        return self._agreement.reason if self._agreement is not None else say_where([self._came])

    def is_due(self, steps: int) -> bool:
        """So many steps are complete since the last call; whether to save and end now."""
        if self._agreement is None:
            return bool(self._came)
        return not self._agreement.steps.advance(steps)

    def stop(self) -> None:
        """Nobody asks any more."""
        if self._agreement is not None:
            self._agreement.stop()


class Agreement:
    """One rank's thread.

    Args:
        store: one of their own, the same for all ranks.
        came: what came to this rank.

    Attributes:
        steps: those that this rank has completed.
        reason: when ranks have agreed: what came, and where.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, came: list[str]) -> None:
        self.steps = LastStep()
        self.reason = ""
        self._store = store
        self._rank, self._size = rank, size
        self._came = came
        self._answered = 0  # of what came
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="halfmesh preemption")
        # A thread that came back from C++ during the shutdown of the interpreter would abort the process.
        atexit.register(self.stop)
        self._thread.start()

    @staticmethod
    def begin(context: ParallelContext, came: list[str]) -> Agreement:
        """That of all ranks of `context`, which call this together."""
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()  # a connection of its own: the other one may be waiting for something
        store.set_timeout(timedelta(seconds=LIMIT_S))
        name = context.from_first(uuid.uuid4().hex)  # torchrun's store outlives a group
        return Agreement(dist.PrefixStore(f"halfmesh/preemption/{name}", store), context.rank, context.size, came)

    def stop(self) -> None:
        """End the thread. May be called twice."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(PARTING_S)

    def _run(self) -> None:
        try:
            for attempt in itertools.count():
                if not self._await_all(f"{attempt}/"):
                    return
                if self._agree(f"{attempt}/"):
                    return
        except Exception as error:  # the store has ended with the rank that hosts it, and with it the run
            if self._came and not self._stopped.is_set():
                _log.warning("the other ranks cannot be told that the run is to end: %s", error, ranks=None)
        finally:
            self._stopped.set()

    def _await_all(self, attempt: str) -> bool:
        """Return when some rank has asked, and all listen; False: stopped."""
        asked, listening = f"{attempt}asked", self._keys(f"{attempt}listens")
        said = False
        while not self._stopped.wait(SOON_S if said else max(POLL_S, self._size / 4000)):
            if not said and (len(self._came) > self._answered or self._store.check([asked])):
                self._store.set(asked, "")
                self._store.set(listening[self._rank], "")
                said = True
            if said and self._store.check(listening):
                return True
        if said:
            self._store.set(self._keys(f"{attempt}count")[self._rank], "null")
        return False

    def _agree(self, attempt: str) -> bool:
        """Whether there is a last step now. Not: it is not reached on some rank, or not known."""
        counts, answer, came = self._keys(f"{attempt}count"), f"{attempt}answer", list(self._came)
        last = None
        mine = self.steps.hold()
        try:
            self._store.set(counts[self._rank], json.dumps([mine, came]))
            if self._rank == 0:
                self._store.set(answer, json.dumps(self._answer(counts)))
            if self._await([answer], 2 * LIMIT_S):
                last, self.reason = json.loads(self._store.get(answer))
        finally:
            self.steps.release(last)
        self._answered = len(came)
        if last is None and self._rank == 0 and not self._stopped.is_set():
            _log.warning(
                "the run was told to end, and some rank has ended or has not answered within %g s: training goes on, "
                "and the next signal is tried again",
                LIMIT_S,
            )
        return last is not None

    def _answer(self, counts: Sequence[str]) -> tuple[int | None, str]:
        """Rank 0: the last step, and what came where."""
        if not self._await(counts, LIMIT_S):
            return None, ""
        told = [json.loads(self._store.get(key)) for key in counts]
        if None in told:
            return None, ""
        return max(count for count, _ in told), say_where([came for _, came in told])

    def _await(self, keys: Sequence[str], limit_s: float) -> bool:
        """Whether all `keys` have come, within the time."""
        until = time.monotonic() + limit_s
        while not self._store.check(list(keys)):
            if time.monotonic() > until or self._stopped.wait(SOON_S):
                return False
        return True

    def _keys(self, name: str) -> list[str]:
        return [f"{name}/{rank}" for rank in range(self._size)]


def say_where(came: Sequence[Sequence[str]]) -> str:
    """What came, and to which ranks; `came` is what came to each."""
    where: dict[str, list[int]] = {}
    for rank, names in enumerate(came):
        for name in dict.fromkeys(names):
            where.setdefault(name, []).append(rank)
    if len(came) == 1:
        return ", ".join(where)
    return "; ".join(f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in where.items())
