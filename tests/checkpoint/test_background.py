"""engine.save(in_background=True): what is written is the state at the call, errors come with a step, ends wait."""

import errno
import threading

import pytest

from halfmesh.errors import CheckpointError
from tests.support.checkpoint_runs import Gate, differing, make_engine, train, weights, whole_state
from tests.support.ranks import run_ranks


def made(**options):
    return make_engine("one", "naive", samples=16, batch=4, **options)


def beside_training(rank, world_size, layout, mode, folder):
    """Each state is saved in the foreground, and in the background with two steps before the first file is written;
    twice, because the second copy goes into the memory of the first. What is wrong."""
    wrong, places = [], []
    engine = make_engine(layout, mode, dropout=0.3)
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        for number in range(2):
            train(engine, 2)
            waiting = engine.save(f"{folder}/{number}/waiting")
            gate.open.clear()
            place = engine.save(f"{folder}/{number}/background", in_background=True)
            train(engine, 2)
            wrong += ["it was complete before it was written"] * place.exists()
            gate.open.set()
            engine.wait_for_save()
            places.append((waiting, place))
    engine.close()
    for pair in places:
        found = []
        for place in pair:
            again = make_engine(layout, mode, dropout=0.3, seed=2)
            again.load(place)
            found.append((train(again, 2), whole_state(again)))  # with its random numbers and its place in the data
        wrong += ["losses"] * (found[0][0] != found[1][0]) + differing(found[1][1], found[0][1])
    return wrong


def in_cells(rank, world_size, cells, folder):
    return {cell: wrong for cell in cells if (wrong := beside_training(rank, world_size, *cell, f"{folder}/{cell[0]}"))}


@pytest.mark.distributed
def test_what_is_written_on_two_ranks(tmp_path):
    cells = [("zero1", "naive"), ("fsdp", "none")]
    assert run_ranks(in_cells, 2, cells, str(tmp_path), timeout=100) == [{}, {}]


def test_save_load_and_close_wait(tmp_path, monkeypatch):
    engine, gate = made(), Gate(monkeypatch)
    for number, end in enumerate((engine.save, engine.load, lambda folder: engine.close())):
        gate.open.clear()
        train(engine, 1)
        state = weights(engine)
        place = engine.save(tmp_path, in_background=True, keep=1)
        train(engine, 1)
        assert not place.exists()
        threading.Timer(0.2, gate.open.set).start()
        end(tmp_path / "other" if number == 0 else tmp_path)
        assert place.exists()
    other = made(seed=3)
    assert other.load(tmp_path) == place
    assert differing(weights(other), state) == []
    assert len(list(tmp_path.glob("step-*"))) == 1


@pytest.mark.parametrize("tells", ["close", "save"])
def test_an_error_is_logged_at_once_and_comes_with_what_waits(tells, tmp_path, monkeypatch, caplog):
    engine, before = made(), set(threading.enumerate())
    train(engine, 1)
    gate = Gate(monkeypatch, OSError(errno.ENOSPC, "no room"))
    engine.save(tmp_path, in_background=True)
    threads = set(threading.enumerate()) - before
    gate.open.set()
    for thread in threads:
        thread.join(20)
    assert "saving step 1 to" in caplog.text
    train(engine, 1)  # training goes on
    failed = r"saving step 1 to .* failed; earlier checkpoints are unchanged: OSError: .*no room"
    with pytest.raises(CheckpointError, match=failed):
        getattr(engine, tells)(*([tmp_path] if tells == "save" else []))
    assert not list(tmp_path.glob("*step-*"))
    if tells == "close":
        engine.close()
    else:
        engine.wait_for_save()  # said once
        assert engine.save(tmp_path).exists()
