"""Many jobs in few launches: what one job does wrong is told of it alone."""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dist_harness import RankFailure, run_ranks

Job = Callable[[int, int], Any]
"""Called as job(rank, world_size) on every rank."""


def run_jobs(
    jobs: Sequence[Job], world_size: int, start_s: float = 60, job_s: float = 10
) -> list[list[Any] | RankFailure]:
    """What each job returned on all ranks, or how it failed. The jobs run one after another in the same processes.

    After a job that failed or hung the rest is launched anew.

    Args:
        start_s, job_s: a launch may take `start_s` seconds, and `job_s` for each of its jobs.
    """
    results: list[list[Any] | RankFailure] = []
    while len(results) < len(jobs):
        rest = jobs[len(results) :]
        with tempfile.TemporaryDirectory(prefix="jobs_") as folder:
            failure: RankFailure | None = None
            try:
                run_ranks(_work, world_size, rest, folder, timeout=start_s + job_s * len(rest))
            except RankFailure as error:
                failure = error
            finished = [_read(Path(folder), number, world_size) for number in range(len(rest))]
        for result in finished:
            if result is None:
                break
            results.append(result)
        if failure is not None and len(results) < len(jobs):
            results.append(failure)  # the first job without results of all ranks
    return results


def _work(rank: int, world_size: int, jobs: Sequence[Job], folder: str) -> None:
    for number, job in enumerate(jobs):
        result = job(rank, world_size)
        file = _file(Path(folder), number, rank)
        file.with_suffix(".part").write_bytes(pickle.dumps(result))
        file.with_suffix(".part").rename(file)


def _read(folder: Path, number: int, world_size: int) -> list[Any] | None:
    files = [_file(folder, number, rank) for rank in range(world_size)]
    return [pickle.loads(file.read_bytes()) for file in files] if all(file.exists() for file in files) else None


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}_{rank}.pickle"
