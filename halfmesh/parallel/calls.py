"""Checks before a collective call of the engine that all ranks make the same call.

Otherwise the messages of `if rank == 0: engine.save(...)` would mix with those of training on the other ranks, and gloo
ends the process if sizes differ. The check goes through the store of the process group, which no collective uses.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ..errors import InputError
from ..utils.log import get_logger

_log = get_logger(__name__)

LOOK_S = 0.5
"""Seconds between two checks for ranks that have ended."""
PATIENCE_S = 10.0
"""Seconds after which a warning names the ranks that are missing."""


class Calls:
    """Counts the collective calls of one engine, and compares them over its ranks.

    Args:
        name: the engine's, the same on all ranks.
        timeout_s: the seconds that a rank waits for the other ranks.
        ended: the ranks that have ended, with the word for how: see `FailureWatch.ended`.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float, ended: Callable[[], dict[int, str]]) -> None:
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()  # a separate connection: the other one may be blocked in a wait
        self._store = dist.PrefixStore(f"halfmesh/calls/{name}", store)
        self._rank, self._size = rank, size
        self._timeout_s = timeout_s
        self._ended = ended
        self._number = 0

    def agree_on(self, call: str) -> None:
        """Return when all ranks make this `call`.

        Raises:
            InputError: some make another call, have ended, or make none within the timeout.
            ConnectionResetError: some have failed.
        """
        self._number += 1
        everyone = f"everyone_{self._number}"
        self._store.set(f"call_{self._rank}", f"{self._number} {call}")
        if self._store.add(f"came_{self._number}", 1) == self._size:  # the last one reads the calls of all
            said = [self._store.get(f"call_{rank}").decode().partition(" ")[2] for rank in range(self._size)]
            self._store.set(everyone, json.dumps(said))
        self._await(everyone, call)
        calls: dict[str, list[int]] = {}
        for rank, theirs in enumerate(json.loads(self._store.get(everyone))):
            calls.setdefault(theirs, []).append(rank)
        if len(calls) > 1:
            (first, ranks), *rest = calls.items()
            others = ", and ".join(f"{other} on {_names(theirs)}" for other, theirs in rest)
            raise InputError(
                f"{first} was called on {_names(ranks)}, and {others}; call each on every rank, in the same order"
            )

    def _await(self, key: str, call: str) -> None:
        begun, told, pause = time.monotonic(), False, 0.001
        look = begun + LOOK_S
        while not self._store.check([key]):
            now = time.monotonic()
            if now > look:
                look = now + LOOK_S
                self._refuse_ended(call)
            if now > begun + self._timeout_s:
                raise self._alone(call, f"has not within {self._timeout_s:g} s (config key timeout)")
            if not told and now > begun + PATIENCE_S:
                told = True
                _log.warning(
                    "%s waits for %s to call it, too, since %g s; if it is called on some ranks only, call it on all",
                    call,
                    _names(self._missing()),
                    PATIENCE_S,
                    ranks=None,
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.02)

    def _refuse_ended(self, call: str) -> None:
        ended = self._ended()
        failed = [rank for rank, word in ended.items() if word == "failed"]
        if failed:  # the report of failures has the reason
            raise ConnectionResetError(f"{call}: connection reset by peer: {_names(failed)} failed meanwhile")
        if any(rank in ended for rank in self._missing()):
            raise self._alone(call, "has ended, or waited elsewhere, without it")

    def _missing(self) -> list[int]:
        return [rank for rank in range(self._size) if not self._has_come(rank)]

    def _has_come(self, rank: int) -> bool:
        key = f"call_{rank}"
        return self._store.check([key]) and self._store.get(key).decode().startswith(f"{self._number} ")

    def _alone(self, call: str, why: str) -> InputError:
        missing = self._missing()
        here = [rank for rank in range(self._size) if rank not in missing]
        return InputError(
            f"{call} was called on {_names(here)} only; call it on every rank, without an `if` around it: which rank "
            f"writes is chosen inside ({_names(missing)} {why})"
        )


def _names(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
