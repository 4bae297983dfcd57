"""What ranks tell each other of their state: once, and again only where it has changed."""

from __future__ import annotations

import pytest

from halfmesh.checkpoint import state
from halfmesh.checkpoint.full_state import find_tensors
from tests.support.checkpoint_runs import make_engine, train
from tests.support.ranks import run_ranks


def save_four_times(rank, world_size, folder):
    """For each save, how often all tensors were described. The average is new in the third, and one rank was
    interrupted in it."""
    counts, described = [], []
    with pytest.MonkeyPatch.context() as patch, make_engine("zero1", "none") as engine:
        patch.setattr(state, "find_tensors", lambda *a, **k: described.append(0) or find_tensors(*a, **k))
        for number in range(4):
            train(engine, 1)
            if number == 2:
                engine.averaged_model(0.9)
            if number == 3 and rank == 1:
                engine._state.saved._known = b""
            described.clear()
            engine.save(folder)
            counts.append(len(described))
    return counts


@pytest.mark.distributed
def test_a_second_save_describes_no_tensors_unless_something_is_new(tmp_path):
    assert run_ranks(save_four_times, 2, str(tmp_path)) == [[1, 0, 1, 1]] * 2
