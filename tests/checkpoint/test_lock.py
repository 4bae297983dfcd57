"""Two jobs in one folder: the second is rejected by name, as long as the first is there."""

from __future__ import annotations

import os
import socket

import pytest

from halfmesh.errors import CheckpointError
from tests.support.checkpoint_runs import make_engine, make_small, train
from tests.support.ranks import run_ranks


def second_job(rank, world_size, folder):
    engine, words = make_engine("dp2", "none"), []
    with pytest.raises(CheckpointError) as told:
        engine.save(folder, keep=1)
    words.append(str(told.value))
    engine.load(folder)
    engine.close()
    engine = make_engine("dp2", "none", checkpoint=folder, resume="auto")
    with pytest.raises(CheckpointError) as told:
        train(engine, 2)
    words.append(str(told.value))
    engine.close()
    return words


def another_job(rank, world_size, folder):
    train(engine := make_small(), 1)
    engine.save(folder)


@pytest.mark.distributed
def test_a_second_job_is_rejected_by_name_on_all_ranks(tmp_path):
    """Until the first has closed its engine. Another engine of the same job is not rejected."""
    folder = tmp_path / "checkpoints"
    train(first := make_small(checkpoint=str(folder)), 1)
    train(second := make_small(), 2)
    places = [first.save(folder), second.save(folder)]
    second.close()
    places.append(first.save(folder))  # the lock that went with `second` is taken again
    who = f"another job saves into {folder} (process {os.getpid()} on {socket.gethostname()})"
    for by_hand, automatic in run_ranks(second_job, 2, str(folder)):
        assert by_hand.startswith(f"saving step 0 to {folder} failed; earlier checkpoints are unchanged:")
        assert automatic.startswith(f"checkpoint.directory={str(folder)!r}:")
        assert who in by_hand
        assert who in automatic
        assert "end it first, or use another folder" in automatic
    assert all(place.exists() for place in places[1:])
    first.close()
    run_ranks(another_job, 1, str(folder))
