"""Simulates ranks in processes forked before torch ran in this process, or one after the other in this process."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import torch

T = TypeVar("T")


class Workers:
    """Processes that work in parallel.

    Args:
        count: the most processes; 1 works in this process.
        is_fresh: nothing of torch has run in this process, so that processes forked from it can work. Others import
            torch first, which takes a few seconds.
    """

    def __init__(self, count: int, is_fresh: bool) -> None:
        method = "fork" if is_fresh and sys.platform == "linux" else "spawn"
        # Imported objects are not searched for garbage again: a tenth of a dry run.
        self._pool = ProcessPoolExecutor(count, get_context(method), gc.freeze) if count > 1 else None

    def run(self, function: Callable[..., T], calls: Iterable[Sequence[Any]]) -> list[T]:
        """The result of `function` for each of the arguments, in their order."""
        if self._pool is None:
            return [function(*call) for call in calls]
        running = [self._pool.submit(_alone, function, *call) for call in calls]
        return [job.result() for job in running]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def count_cores() -> int:
    """The number of cores, at least 1."""
    return os.cpu_count() or 1


def _alone(function: Callable[..., T], *call: Any) -> T:
    torch.set_num_threads(1)  # a fork has no threads of its parent process
    return function(*call)
