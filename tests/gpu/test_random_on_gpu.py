"""Random numbers of a tensor group on a GPU: the state is a seed and a counter, which the host knows."""

from __future__ import annotations

import pytest
import torch

from halfmesh.parallel.rng import RandomFork

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def draws(rank: int) -> list[torch.Tensor]:
    """Outside, inside and after a fork of rank `rank`."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.manual_seed(7)
    fork = RandomFork(rank, device)
    found = [torch.rand(1000, device=device)]
    for _ in range(2):
        fork.open()
        found.append(torch.rand(1000, device=device))
        fork.close()
        found.append(torch.rand(1000, device=device))
    return found


def test_ranks_agree_outside_and_differ_inside():
    first, second = draws(0), draws(1)
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True, False, True]
    values = torch.stack([*first, second[1], second[3]])
    assert len(values.unique(dim=0)) == 7, "no sequence comes twice"


def test_a_fork_does_not_wait_for_the_device():
    fork = RandomFork(1, torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.set_sync_debug_mode("error")
    try:
        fork.open()
        torch.rand(10, device="cuda")
        fork.close()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_restored_state_repeats_the_fork():
    device = torch.device("cuda", torch.cuda.current_device())
    fork = RandomFork(1, device)
    state = torch.cuda.get_rng_state(device)
    found = []
    for _ in range(2):
        torch.cuda.set_rng_state(state, device)
        fork.open()
        found.append(torch.rand(10, device=device))
        fork.close()
    assert torch.equal(*found)
