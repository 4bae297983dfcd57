"""The harness reports the right rank, in time, and leaves no process behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.ranks import RankFailure, free_port, run_ranks

pytestmark = pytest.mark.distributed


class Answer:
    """An object of this test module: children must be able to import it."""

    def __init__(self, value: int) -> None:
        self.value = value


def summed(rank: int, world_size: int, start: torch.Tensor, factor: int = 1) -> torch.Tensor:
    value = (start + rank) * factor
    dist.all_reduce(value)
    return value


def facts(rank: int, world_size: int) -> dict[str, Any]:
    return {
        "rank": (rank, dist.get_rank()),
        "threads": torch.get_num_threads(),
        "omp": os.environ.get("OMP_NUM_THREADS"),
        "env": [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name in os.environ],
        "answer": Answer(rank),
    }


def own_group(rank: int, world_size: int, port: int) -> tuple[bool, float]:
    before = dist.is_initialized()
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
        value = torch.ones(1)
        dist.all_reduce(value)
        return before, value.item()
    return before, 1.0


def fail_on(rank: int, world_size: int, bad_rank: int, delay: float) -> None:
    if rank == bad_rank:
        time.sleep(delay)
        raise ValueError(f"boom on rank {rank}")
    dist.all_reduce(torch.ones(1))


def close_then_fail(rank: int, world_size: int) -> None:
    if rank == 1:
        dist.all_reduce(torch.ones(1))
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the reason")
    dist.all_reduce(torch.ones(1))
    dist.all_reduce(torch.ones(1))


def die_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def hang_on(rank: int, world_size: int, bad_rank: int) -> None:
    if rank == bad_rank:
        time.sleep(600)


def echo(rank: int, world_size: int) -> None:
    raise RuntimeError("Connection closed by peer")


def unpicklable(rank: int, world_size: int) -> Any:
    return lambda: rank


def test_results_come_in_order_of_rank_and_tensors_travel() -> None:
    results = run_ranks(summed, 2, torch.tensor([1.0, 10.0]), factor=2)
    assert [result.tolist() for result in results] == [[6.0, 42.0]] * 2


def test_ranks_are_isolated_and_single_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "7")
    for rank, fact in enumerate(run_ranks(facts, 2)):
        assert fact["rank"] == (rank, rank)
        assert (fact["threads"], fact["omp"], fact["env"]) == (1, "1", [])
        assert fact["answer"].value == rank


@pytest.mark.parametrize("world_size", [1, 2])
def test_without_init_the_function_makes_its_own_group(world_size: int) -> None:
    assert run_ranks(own_group, world_size, free_port(), init=False) == [(False, float(world_size))] * world_size


@pytest.mark.parametrize("bad_rank", [0, 1])
def test_the_rank_that_failed_first_is_reported(bad_rank: int) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=f"rank {bad_rank} of 2 failed") as caught:
        run_ranks(fail_on, 2, bad_rank, 0.2)
    assert caught.value.rank == bad_rank
    assert f'raise ValueError(f"boom on rank {{rank}}")\nValueError: boom on rank {bad_rank}' in str(caught.value)
    assert time.monotonic() - start < 10
    assert not multiprocessing.active_children()


def test_an_echo_that_comes_before_the_reason_does_not_hide_it() -> None:
    with pytest.raises(RankFailure, match=r"ValueError: the reason[\s\S]*afterwards: rank 0: .*onnection") as caught:
        run_ranks(close_then_fail, 2)
    assert caught.value.rank == 1


def test_a_killed_rank_is_reported_before_the_echo() -> None:
    with pytest.raises(RankFailure, match="died without an exception, exit code -9") as caught:
        run_ranks(die_on, 2, 1)
    assert caught.value.rank == 1


def test_the_time_limit_names_the_hung_rank_and_shows_its_stack() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"ranks \[1\] are still running[\s\S]*in hang_on") as caught:
        run_ranks(hang_on, 2, 1, timeout=12)
    assert caught.value.rank == 1
    assert time.monotonic() - start < 20
    assert not multiprocessing.active_children()


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(RankFailure, match="pickle"):
        run_ranks(unpicklable, 1)


def test_an_error_that_is_only_an_echo_is_still_an_error() -> None:
    with pytest.raises(RankFailure, match="Connection closed by peer"):
        run_ranks(echo, 1)


def fails_to_connect_once(rank, world_size, folder):
    """As gloo does now and then."""
    if not (mark := folder / str(rank)).exists():
        mark.touch()
        raise RuntimeError("Gloo connectFullMesh failed with [...] Connection closed by peer")
    return rank


def test_a_group_that_could_not_be_made_is_tried_once_more(tmp_path):
    assert run_ranks(fails_to_connect_once, 2, tmp_path) == [0, 1]
