"""Ranks that are at different steps agree on the last one of them."""

from __future__ import annotations

import threading


class LastStep:
    """Counts what this rank has begun, until it comes to the last one.

    Another thread asks all ranks for their counts: `hold`, which keeps this one from growing, and then `release` with
    the largest of them. So every rank goes on up to the same one, and no further.
    """

    def __init__(self) -> None:
        self._turn = threading.Condition()  # of what follows
        self._held = False
        self._count = 0
        self._last: int | None = None

    def advance(self, by: int = 1) -> bool:
        """Count `by` more, when the count is not held. False, and nothing is counted, if that leads past the last."""
        with self._turn:
            self._turn.wait_for(lambda: not self._held)
            if self._last is not None and self._count + by > self._last:
                return False
            self._count += by
            return True

    def hold(self) -> int:
        """The count, which stays until `release`."""
        with self._turn:
            self._held = True
            return self._count

    def release(self, last: int | None) -> None:
        """Let the count grow up to `last`; None: without an end."""
        with self._turn:
            self._last, self._held = last, False
            self._turn.notify_all()
