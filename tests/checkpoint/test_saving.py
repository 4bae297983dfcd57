"""engine.save: a checkpoint is complete or not there, what was saved before stays, only older ones are removed, and a
second job in the folder is rejected."""

import errno
import os
import resource
import shutil
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from halfmesh.checkpoint.storage import LOCK
from halfmesh.distributed.local_ranks import RankError
from halfmesh.errors import CheckpointError, InputError
from tests.support.checkpoint_runs import make_engine, make_small, train
from tests.support.models import CLASSES, FEATURES
from tests.support.ranks import run_ranks

FILE_EVENTS = {"open", "os.mkdir", "os.rename"}


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.name != LOCK)


def killed_while_saving(rank, world_size, folder, moment):
    """Ends this process at its `moment`-th use of a file there. Returns the number of uses."""
    (engine := make_small()).load(folder)
    train(engine, 1)
    uses = []

    def watch(event, args):  # what is removed is named within its folder
        if event == "os.remove" or (event in FILE_EVENTS and str(folder) in os.fsdecode(str(args[0]))):
            uses.append(event)
            if len(uses) > moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)
    engine.save(folder, keep=1)
    return len(uses)


def test_a_save_that_is_killed_leaves_what_was_there(tmp_path):
    """While it writes, and at the last uses of files: the rename and what is removed after it."""
    train(engine := make_small(), 1)
    engine.save(tmp_path)
    engine.close()
    uses = run_ranks(killed_while_saving, 1, str(tmp_path), 10**6, fresh=True)[0]
    for moment in [24, *range(uses - 12, uses, 4)]:
        step = int(max(name for name in names_in(tmp_path) if name.startswith("step"))[5:])
        for path in tmp_path.glob(".step-*"):  # or else this save, too, would begin with removing it
            shutil.rmtree(path)
        with pytest.raises(RankError, match="killed by SIGKILL"):
            run_ranks(killed_while_saving, 1, str(tmp_path), moment)
        other = make_small()
        assert other.load(tmp_path).name in (f"step-{step:08d}", f"step-{step + 1:08d}")
        for place in tmp_path.glob("step-*"):
            make_small().load(place)
    assert list(tmp_path.glob(".step-*"))
    train(other, 1)
    place = other.save(tmp_path, keep=1)
    assert names_in(tmp_path) == [place.name]  # what the others left is gone


def disk_is_full(rank, world_size, folder):
    engine, words = make_engine("tp2", "none"), ""
    train(engine, 1)
    engine.save(folder)
    train(engine, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))  # more than the ranks' store
    try:
        engine.save(folder, in_background=True)
        engine.wait_for_save()
    except CheckpointError as error:
        words = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    return words, names_in(folder), engine.load(folder).name


@pytest.mark.distributed
def test_a_full_disk_on_one_rank_is_told_on_all(tmp_path):
    (words, *there), other = run_ranks(disk_is_full, 2, str(tmp_path))
    assert (words, *there) == other
    assert f"saving step 2 to {tmp_path} failed; earlier checkpoints are unchanged:\n  - rank 1 (tp 1): " in words
    assert os.strerror(errno.EFBIG) in words
    assert there == [["step-00000001"], "step-00000001"]


def test_saves_that_are_rejected_leave_what_is_there(tmp_path):
    engine = make_small(gradient_accumulation=2)
    place = engine.save(tmp_path)
    (tmp_path / "file").write_text("in the way")
    failed = r"saving step 0 to .*file failed; earlier checkpoints are unchanged: Fil"
    with pytest.raises(CheckpointError, match=failed):
        engine.save(tmp_path / "file")
    with pytest.raises(InputError, match="keep=0: expected a whole number, 1 or more"):
        engine.save(tmp_path, keep=0)
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    with pytest.raises(InputError, match=r"engine\.save\(\) was called in the middle of a cycle, after microbatch 1"):
        engine.save(tmp_path)
    assert names_in(tmp_path) == ["file", place.name]


def test_keep(tmp_path, caplog):
    engine = make_small()
    for _ in range(4):
        train(engine, 1)
        engine.save(tmp_path, keep=2)
    assert names_in(tmp_path) == ["step-00000003", "step-00000004"]
    assert engine.save(tmp_path).name == "step-00000004.1"  # of the same step: never in the place of a complete one
    assert names_in(tmp_path) == ["step-00000003", "step-00000004.1"]
    assert make_small().load(tmp_path).name == "step-00000004.1"
    assert "later step" not in caplog.text
    engine.load(tmp_path / "step-00000003")
    assert engine.save(tmp_path).name == "step-00000003.1"
    assert "step-00000003.1, but resume='auto' would load step-00000004.1, of a later step; if you went" in caplog.text


def test_only_checkpoints_of_this_model_are_removed(tmp_path):
    (tmp_path / "step-00000001").mkdir()
    (tmp_path / "step-00000001" / "notes.txt").write_text("mine")
    (tmp_path / "step-00000002").write_text("a file")
    other, engine = make_small(model=nn.Sequential(nn.Linear(FEATURES, CLASSES))), make_small()
    for number in (1, 2):
        train(other, 1)
        train(engine, 1)
        places = other.save(tmp_path, keep=1), engine.save(tmp_path, keep=1)
        assert [place.name for place in places] == [f"step-0000000{number}.{again}" for again in (1, 2)]
    assert names_in(tmp_path) == ["step-00000001", "step-00000002", "step-00000002.1", "step-00000002.2"]
    assert (tmp_path / "step-00000001" / "notes.txt").exists()


def second_job(rank, world_size, folder):
    def rejection(call, *args, **options):
        with pytest.raises(CheckpointError) as told:
            call(*args, **options)
        return str(told.value)

    with make_engine("dp2", "none") as engine:
        by_hand = rejection(engine.save, folder, keep=1)
        engine.load(folder)
    engine = make_engine("dp2", "none", checkpoint=folder, resume="auto")
    automatic = rejection(train, engine, 2)
    engine.close()
    return by_hand, automatic


def save_anew(rank, world_size, folder):
    make_small().save(folder)


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
    run_ranks(save_anew, 1, str(folder))
