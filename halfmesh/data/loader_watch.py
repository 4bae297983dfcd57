"""Notices a loop that waits for its data."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ..log import get_logger

_log = get_logger(__name__)

WINDOW_S = 10.0
"""The time that is looked at, in seconds: long enough that the start of workers does not decide."""
WINDOW_BATCHES = 20
SHARE = 0.3
"""Of this time, what may pass in waiting. A loader that keeps up is waited for hardly at all."""


class LoaderWatch:
    """Measures how long a loop waits for its loader, and warns once where that is more than `SHARE` of its time.

    On a GPU only what passes while the GPU has nothing left to do counts: a host that is ahead of it may wait.
    """

    def __init__(self, loader: Any, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._loader = loader
        self._device = device
        self._clock = clock
        self._warned = False
        self._begin_window()

    def _begin_window(self) -> None:
        self._passed, self._waited, self._count = 0.0, 0.0, 0

    def watch(self, batches: Iterator[Any]) -> Iterator[Any]:
        """The same batches. What passes between two calls, such as an evaluation, does not count."""
        last, nothing = self._clock(), object()
        while True:
            asked = self._clock()
            last_work = self._mark()
            batch = next(batches, nothing)
            if batch is nothing:
                return
            now = self._clock()
            if last_work is None or last_work.query():
                self._waited += now - asked
            self._passed, last = self._passed + now - last, now
            self._count += 1
            if self._passed >= WINDOW_S and self._count >= WINDOW_BATCHES:
                if not self._warned and self._waited > SHARE * self._passed:
                    self._warn()
                self._begin_window()
            yield batch

    def _mark(self) -> torch.cuda.Event | None:
        """What has passed when the GPU has done all that it was given so far."""
        if self._device.type != "cuda" or self._warned:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _warn(self) -> None:
        self._warned = True
        loader = getattr(self._loader, "loader", self._loader)  # of an IterableDataset that is read in strides
        workers = getattr(loader, "num_workers", None)
        has = "" if workers is None else f" (num_workers={workers}; this machine has {os.cpu_count()} cores)"
        _log.warning(
            "the loop waited for engine.dataloader %.0f %% of its time (%.1f of %.1f s, %d batches): loading data is "
            "the bottleneck, not training; give the DataLoader more workers%s, or prepare the samples beforehand",
            100 * self._waited / self._passed,
            self._waited,
            self._passed,
            self._count,
            has,
        )
