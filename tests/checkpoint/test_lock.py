"""Two jobs in one folder: the second is rejected by name, as long as the first is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import socket
import time

import pytest

from halfmesh.distributed.local_ranks import RankError
from halfmesh.errors import CheckpointError
from tests.support.checkpoint_runs import make_engine, make_small, train
from tests.support.ranks import here, run_ranks


def second_job(rank, world_size, folder):
    """What it is told when it saves, when it trains with automatic saves, and whether it can load."""
    engine, words = make_engine("dp2", "none"), []
    with pytest.raises(CheckpointError) as told:
        engine.save(folder, keep=1)
    words.append(str(told.value))
    engine.load(folder)
    engine.close()
    engine = make_engine("dp2", "none", checkpoint=folder, resume="auto")
    engine.eval()
    engine(here(next(iter(engine.dataloader.loader.given))[0]))  # an evaluation is none of a job that saves
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
        assert "end that job first, or use another folder" in automatic
    assert all(place.exists() for place in places[1:])
    first.close()
    run_ranks(another_job, 1, str(folder))


def dies(rank, world_size, folder):
    """With a child that outlives it, as workers of a DataLoader do for a while."""
    another_job(rank, world_size, folder)
    if os.fork() == 0:
        os.closerange(0, 3)
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if "pipe" in (kind := os.readlink(f"/proc/self/fd/{name}")) or "socket" in kind:
                    os.close(int(name))  # of the test's, which would wait for it
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_job_that_is_killed_locks_nothing(tmp_path):
    with pytest.raises(RankError, match="killed by SIGKILL"):
        run_ranks(dies, 1, str(tmp_path), fresh=True)
    assert (tmp_path / ".lock").exists()
    another_job(0, 1, tmp_path)


def test_where_there_are_no_locks_it_is_said(tmp_path, monkeypatch, caplog):
    def none(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", none)
    assert make_small().save(tmp_path).exists()
    assert f"could not lock {tmp_path} ([Errno {errno.ENOLCK}] No locks available); make sure" in caplog.text
