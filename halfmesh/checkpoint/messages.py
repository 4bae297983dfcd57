"""What ranks tell rank 0 of a save, and its answer: through the store, so that a thread may do it during training."""

from __future__ import annotations

import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any

from ..distributed.env import list_ranks
from ..errors import CheckpointError
from ..parallel.comm import get_within, is_simulated, own_store
from ..parallel.mesh import ParallelContext


class StoreMessages:
    """Messages to rank 0 that need no group, whose connections would grow with the number of ranks. All ranks make it,
    and call it equally often.

    Args:
        timeout_s: the seconds that rank 0 waits for the other ranks, all together.
    """

    def __init__(self, context: ParallelContext, timeout_s: float) -> None:
        self._rank, self._size, self._number = context.rank, context.size, 0
        self._timeout_s = timeout_s
        self._store: Any = None
        if context.size > 1 and not is_simulated():
            (self._store,) = own_store(context)

    def answer(self, what: str, value: Any, reply: Callable[[list[Any]], Any]) -> Any:
        """What `reply` returns on rank 0, on all ranks.

        Args:
            what: the beginning of the error message.
            value: this rank's.
            reply: called on rank 0 with the value of each rank.

        Raises:
            CheckpointError: some rank does not answer in time; raised on all ranks.
        """
        if self._store is None:
            return reply([value] * self._size)
        self._number += 1
        if self._rank != 0:
            self._store.set(f"{self._number} of {self._rank}", zlib.compress(pickle.dumps(value), 1))
            limit_s = 2 * self._timeout_s  # rank 0 also waits for the others
            told = get_within(self._store, f"reply {self._number}", limit_s)
            problem, found = (_late([0], limit_s), None) if told is None else pickle.loads(told)
        else:
            values, late = self._collect(value)
            problem, found = (_late(late, self._timeout_s), None) if late else ("", reply(values))
            self._store.set(f"reply {self._number}", pickle.dumps((problem, found)))
            if not late:  # then all ranks have read the last one
                self._store.delete_key(f"reply {self._number - 1}")
        if problem:
            raise CheckpointError(f"{what}: {problem}")
        return found

    def _collect(self, value: Any) -> tuple[list[Any], list[int]]:
        """The values of all ranks, of which this one's is `value`; and the ranks that have sent none in time."""
        values, late, end = [value], list[int](), time.monotonic() + self._timeout_s
        for rank in range(1, self._size):
            key, left_s = f"{self._number} of {rank}", end - time.monotonic()
            # After the end no `get` of what is not there: torch prints each one that fails.
            sent = get_within(self._store, key, left_s) if left_s > 0 or self._store.check([key]) else None
            if sent is None:
                late.append(rank)
            else:
                values.append(pickle.loads(zlib.decompress(sent)))
                self._store.delete_key(key)
        return values, late


def _late(ranks: list[int], limit_s: float) -> str:
    return f"no answer from {list_ranks(ranks)} within {limit_s:g} s (config key timeout)"
