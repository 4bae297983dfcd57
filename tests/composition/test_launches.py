"""A job that fails or hangs is told of by itself; the others of its launch are done all the same."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch.distributed as dist
from dist_harness import RankFailure

from .launches import run_jobs

pytestmark = pytest.mark.distributed


def tell(rank: int, world_size: int, number: int) -> tuple[int, int, int]:
    return number, rank, world_size


def raises(rank: int, world_size: int) -> None:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    dist.barrier()


def dies(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)
    dist.barrier()


def hangs(rank: int, world_size: int) -> None:
    if rank == 0:
        time.sleep(600)


def test_one_jobs_failure_is_its_own():
    jobs = [partial(tell, number=0), raises, dies, partial(tell, number=3), partial(tell, number=4)]
    results = run_jobs(jobs, 2)
    assert [results[0], *results[3:]] == [[(number, 0, 2), (number, 1, 2)] for number in (0, 3, 4)]
    for result, rank, words in ((results[1], 1, "rank 1 has had enough"), (results[2], 0, "exit code 3")):
        assert isinstance(result, RankFailure)
        assert result.rank == rank
        assert words in str(result)


def test_a_job_that_hangs_ends_at_the_limit():
    results = run_jobs([hangs, partial(tell, number=1)], 2, start_s=8, job_s=0)
    assert "had not ended at the time limit" in str(results[0])
    assert results[1] == [(1, 0, 2), (1, 1, 2)]
