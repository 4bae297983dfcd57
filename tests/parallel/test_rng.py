"""Random numbers of a tensor group that a recomputation draws again, however much was drawn since."""

from __future__ import annotations

import torch

from halfmesh.parallel.rng import CPU, RandomFork


def test_a_state_from_long_ago_still_shows_how_its_fork_goes_on():
    """As a recomputation has it that begins inside a fork, with thousands of microbatches and layers after it."""
    torch.manual_seed(7)
    fork = RandomFork(3, CPU)
    fork.open()
    state = torch.get_rng_state()
    found = []
    for _ in range(2):
        torch.set_rng_state(state)
        assert fork.is_open
        inside = float(torch.rand(()))
        fork.close()
        found.append((inside, float(torch.rand(()))))
        for _ in range(5000):
            fork.open()
            fork.close()
    assert found[0] == found[1]
    assert not fork.is_open
