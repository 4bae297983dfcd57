"""What ranks tell rank 0 of a save, and its answer: through the store, so that a thread may do it during training."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ..parallel.comm import is_simulated, own_store
from ..parallel.mesh import ParallelContext


class StoreMessages:
    """Messages to rank 0 that need no group, whose connections would grow with the number of ranks. All ranks make it,
    and call it equally often.

    Args:
        timeout_s: the seconds that rank 0 waits for another rank.
    """

    def __init__(self, context: ParallelContext, timeout_s: float) -> None:
        self._rank, self._size, self._number = context.rank, context.size, 0
        self._store: Any = None
        if context.size > 1 and not is_simulated():
            (self._store,) = own_store(context)
            # Another rank also waits for rank 0's answer.
            self._store.set_timeout(timedelta(seconds=timeout_s * (1 if context.rank == 0 else 2)))

    def answer(self, value: Any, reply: Callable[[list[Any]], Any]) -> Any:
        """What `reply` returns on rank 0, on all ranks.

        Args:
            value: this rank's.
            reply: called on rank 0 with the value of each rank.
        """
        if self._store is None:
            return reply([value] * self._size)
        self._number += 1
        if self._rank != 0:
            self._store.set(f"{self._number} of {self._rank}", zlib.compress(pickle.dumps(value), 1))
            return pickle.loads(self._store.get(f"reply {self._number}"))
        values = [value]
        for rank in range(1, self._size):
            values.append(pickle.loads(zlib.decompress(self._store.get(key := f"{self._number} of {rank}"))))
            self._store.delete_key(key)
        found = reply(values)
        self._store.set(f"reply {self._number}", pickle.dumps(found))
        self._store.delete_key(f"reply {self._number - 1}")  # all ranks have read it
        return found
