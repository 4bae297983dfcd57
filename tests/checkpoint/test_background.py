"""engine.save(in_background=True): what is written is the state at the call, errors come with a step, ends wait."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from halfmesh.engine.checkpointing import progress
from halfmesh.engine.checkpointing.background import Background
from halfmesh.engine.checkpointing.folder import Manifest
from halfmesh.errors import CheckpointError, InputError
from halfmesh.parallel.context import ParallelContext
from tests.support.checkpoint_runs import make_engine, train
from tests.support.ranks import RankFailure, run_ranks


class Gate:
    """Holds up the thread of a save before its first file, until it is opened."""

    def __init__(self, patch):
        self.open = threading.Event()
        self._write = progress.write
        patch.setattr(progress, "write", self.write)

    def write(self, path, content):
        if threading.current_thread().name == "halfmesh save":
            assert self.open.wait(20)
        self._write(path, content)


@pytest.fixture
def gate(monkeypatch):
    return Gate(monkeypatch)


def made(**options):
    return make_engine("one", "naive", samples=16, batch=4, **options)


def weights(engine):
    return {name: piece.held.clone() for name, piece in engine._run.holding.weights().items()}


def differing_files(place, other):
    """Names of files whose contents differ."""
    files, others = Manifest.read(place).files, Manifest.read(other).files
    assert files.keys() == others.keys()
    differ = {name for name in files if files[name] != others[name]} - {".metadata"}  # that has a number of its own
    tables = [pickle.loads((path / ".metadata").read_bytes()) for path in (place, other)]
    if tables[0].state_dict_metadata != tables[1].state_dict_metadata:
        differ.add(".metadata: tensors")
    if tables[0].storage_data != tables[1].storage_data:
        differ.add(".metadata: places")
    return differ


def beside_training(rank, world_size, layout, mode, folder):
    """Each state is saved as ever, and in the background with three steps before the first file is written."""
    wrong = []
    engine = make_engine(layout, mode, dropout=0.3)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        memory = []
        for number in range(2):
            train(engine, 3)
            expected = engine.save(f"{folder}/{number}/waiting")
            gate.open.clear()
            place = engine.save(f"{folder}/{number}/background", in_background=True)
            train(engine, 3)
            if place.exists():
                wrong.append("it was complete before it was written")
            gate.open.set()
            engine.wait_for_save()
            wrong += differing_files(expected, place)
            memory.append(list(engine._background.buffers._buffers.values()))  # kept, so that no address is used again
    if not memory[0] or [b.data_ptr() for b in memory[0]] != [b.data_ptr() for b in memory[1]]:
        wrong.append("the second copy was made in other memory")
    after = weights(engine)
    engine.load(f"{folder}/1/background")
    if all(torch.equal(value, after[name]) for name, value in weights(engine).items()):
        wrong.append("the steps beside it have changed nothing")
    engine.close()
    return wrong


@pytest.mark.parametrize("mode", ["none", "naive"])
def test_what_is_written_is_the_state_at_the_call(mode, tmp_path):
    assert beside_training(0, 1, "one", mode, str(tmp_path)) == []


def several_layouts(rank, world_size, folder):
    cells = [("dp2", "none"), ("zero1", "naive"), ("fsdp", "torch"), ("pp2", "none"), ("tp2", "naive")]
    found = {cell: beside_training(rank, world_size, *cell, f"{folder}/{'_'.join(cell)}") for cell in cells}
    return {cell: wrong for cell, wrong in found.items() if wrong}


@pytest.mark.distributed
def test_what_is_written_on_two_ranks(tmp_path):
    assert run_ranks(several_layouts, 2, str(tmp_path), timeout=100) == [{}, {}]


def test_a_save_waits_for_the_one_before(tmp_path, gate):
    engine = made()
    threading.Timer(0.3, gate.open.set).start()
    first = engine.save(tmp_path, in_background=True, keep=1)
    train(engine, 1)
    assert not first.exists()
    second = engine.save(tmp_path, in_background=True, keep=1)
    assert first.exists()
    expected = weights(engine)
    train(engine, 1)
    engine.wait_for_save()
    engine.wait_for_save()  # nothing to wait for
    assert list(tmp_path.iterdir()) == [second]
    other = made(seed=3)
    assert other.load(tmp_path) == second
    assert all(torch.equal(value, expected[name]) for name, value in weights(other).items())


@pytest.mark.parametrize("waits", ["close", "load", "save"])
def test_what_waits(waits, tmp_path, gate):
    engine = made()
    train(engine, 1)
    place = engine.save(tmp_path, in_background=True)
    threading.Timer(0.3, gate.open.set).start()
    assert not place.exists()
    if waits == "close":
        engine.close()
    elif waits == "load":
        assert engine.load(tmp_path) == place
    else:
        assert engine.save(tmp_path).name == f"{place.name}.1"
    assert place.exists() == (waits != "save")  # there is one of each step


ENDS = """
import sys, time
from tests.support.checkpoint_runs import make_engine
from halfmesh.engine.checkpointing import progress
inner = progress.write
def slowly(path, content):
    time.sleep(0.3)
    inner(path, content)
progress.write = slowly
place = make_engine("one", "none").save(sys.argv[1], in_background=True)
print(place.exists())
"""


def test_the_end_of_the_process_waits(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert made().load(tmp_path).name == "step-00000000"


def killed_in_the_background(rank, world_size, folder):
    engine = made()
    train(engine, 1)
    engine.save(folder)
    train(engine, 1)
    with pytest.MonkeyPatch.context() as patch:
        Gate(patch)
        engine.save(folder, in_background=True)
        train(engine, 2)
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_kill_leaves_what_was_there(tmp_path):
    with pytest.raises(RankFailure, match="exit code -9"):
        run_ranks(killed_in_the_background, 1, str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step-00000002.tmp", "step-00000001"]
    engine = made()
    assert engine.load(tmp_path).name == "step-00000001"
    train(engine, 1)
    engine.save(tmp_path, in_background=True)
    engine.wait_for_save()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def lose_its_folder(engine, folder, gate):
    """A save that fails. Returns when it has."""
    gate.open.clear()
    place = engine.save(folder, in_background=True)
    shutil.rmtree(place.with_name(f".{place.name}.tmp"))
    gate.open.set()
    engine._background._thread.join()


LOST = r"saving step 1 to .* failed, and what was saved before is as it was: FileNotFoundError: "


def test_an_error_comes_with_the_next_step(tmp_path, gate, caplog):
    engine = made()
    train(engine, 1)
    lose_its_folder(engine, tmp_path, gate)
    assert "saving step 1 to" in caplog.text  # at once: there may be no step
    x, y = next(iter(engine.dataloader))
    engine.backward(engine.criterion(engine(x), y))
    before = weights(engine)
    with pytest.raises(CheckpointError, match=LOST):
        engine.step()
    assert engine.global_step == 1
    assert all(torch.equal(value, before[name]) for name, value in weights(engine).items())
    assert engine.step() is not None  # said once; nothing was lost
    assert engine.global_step == 2


@pytest.mark.parametrize("tells", ["close", "load", "save", "wait_for_save"])
def test_an_error_comes_with_what_waits(tells, tmp_path, gate):
    engine = made()
    train(engine, 1)
    lose_its_folder(engine, tmp_path, gate)
    with pytest.raises(CheckpointError, match=LOST):
        getattr(engine, tells)(*([tmp_path] if tells in ("load", "save") else []))
    assert list(tmp_path.iterdir()) == []
    if tells == "close":
        with pytest.raises(InputError, match="this engine is closed"):
            engine.step()
        engine.close()
    else:
        assert engine.save(tmp_path).exists()


def test_what_the_call_itself_refuses(tmp_path):
    (tmp_path / "file").write_text("in the way")
    engine = made()
    with pytest.raises(CheckpointError, match=r"saving step 0 to .*file failed, and .*: FileExistsError"):
        engine.save(tmp_path / "file", in_background=True)
    with pytest.raises(InputError, match=r"engine.save: keep=0 is not a number of checkpoints; give 1 or more"):
        engine.save(tmp_path, keep=0, in_background=True)
    train(engine, 1)  # no error is left for a step


def disk_is_full(rank, world_size, folder):
    """On rank 1 only. What every rank was told and by which step, and what is there."""
    engine = make_engine("tp2", "none")
    train(engine, 1)
    engine.save(folder)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    engine.save(folder, in_background=True)
    words, deadline = "", time.monotonic() + 20
    while not words and time.monotonic() < deadline:
        try:
            train(engine, 1)
        except CheckpointError as error:
            words = str(error)
    told_at = engine.global_step
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    torch.distributed.barrier()
    engine.step()  # the one that told
    there = sorted(os.listdir(folder))
    torch.distributed.barrier()
    engine.save(folder, in_background=True)
    engine.wait_for_save()
    return words, told_at, there, engine.load(folder).name == f"step-{told_at + 1:08d}"


@pytest.mark.distributed
def test_a_full_disk_on_one_rank(tmp_path):
    found = run_ranks(disk_is_full, 2, str(tmp_path))
    assert found[0] == found[1]
    words, _, there, loaded = found[0]
    assert "and what was saved before is as it was:\n  - rank 1 (tp 1): " in words
    assert os.strerror(errno.EFBIG) in words
    assert (there, loaded) == (["step-00000001"], True)


def steps_at_their_own_pace(rank, world_size):
    """How many steps a rank has begun when it is told; they do not wait for each other, and fail at other times."""
    background = Background(ParallelContext(1, 1, torch.device("cpu")))

    def fail(ranks):
        ranks.everyone(None)
        time.sleep(0.2 * rank)
        raise CheckpointError("no room")

    counts = []
    for _ in range(2):
        background.start(fail)
        begun, deadline = 0, time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                background.before_step()
            except CheckpointError:
                break
            begun += 1
            time.sleep(0.001 if rank == 0 else 0.003)
        counts.append(begun)
    return counts


@pytest.mark.distributed
def test_all_ranks_are_told_by_the_same_step():
    found = run_ranks(steps_at_their_own_pace, 2)
    assert found[0] == found[1]
    assert min(found[0]) > 0
    assert max(found[0]) < 4000  # told, not at the deadline
