"""Ranks of this machine: what they give back, which error is told, and that nothing of them is left."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from halfmesh.distributed.local_ranks import ATTEMPTS, NOT_CONNECTED, LocalRanks, RankError
from halfmesh.errors import InputError, LaunchError

ROOT = Path(__file__).parents[2]


def add(start):
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    print("this is no part of an answer")
    return value.item(), os.environ["RANK"], torch.get_num_threads()


def look_around():
    return os.environ.get("RANK"), dist.is_initialized(), os.environ["OMP_NUM_THREADS"]


def leave_a_mark(name):
    """Changes what the next call should find as it was."""
    found = os.getpid(), os.environ.get(name), os.getcwd(), "left" in sys.path
    os.environ[name] = "left"
    os.chdir("/")
    sys.path.append("left")
    return found


def miss(folder, times):
    """As gloo's sockets miss each other now and then."""
    Path(folder, str(os.getpid())).touch()
    if len(os.listdir(folder)) <= times:
        raise RuntimeError(f"{NOT_CONNECTED} with [...] Connection closed by peer")
    return len(os.listdir(folder))


def fail_on(rank, how):
    if dist.get_rank() == rank:
        if how == "raise":
            raise LaunchError("of its own")
        if how == "late":  # the other one's error comes first
            dist.destroy_process_group()
            time.sleep(0.5)
            raise ValueError("the reason")
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(folder):
    """Rank 1 with a process that it has started, the others in a collective."""
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 1:
        Path(folder, str(subprocess.Popen(["sleep", "1000"]).pid)).touch()
        time.sleep(1000)
    dist.barrier()


def wait_for(folder, count):
    """The processes of `hang`, when all are there."""
    until = time.monotonic() + 250
    while len(found := [int(path.name) for path in folder.iterdir()]) < count and time.monotonic() < until:
        time.sleep(0.05)
    assert len(found) == count
    return found


def running(pids):
    """Those that still run a little later."""
    until = time.monotonic() + 10
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.fixture
def seen(tmp_path, monkeypatch):
    """Where `hang` notes its processes. No temporary folder of ranks may be left."""
    for name in ("temporary", "seen"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    yield tmp_path / "seen"
    assert not list((tmp_path / "temporary").glob("halfmesh_ranks_*"))


def test_results_come_in_the_order_of_ranks_with_a_group_and_without(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "7")  # of a launch around this process
    with LocalRanks(2) as pair, LocalRanks(1) as alone:
        pair.begin(add, (1.0,), timeout=100)
        assert alone.call(look_around, group=False) == [(None, False, "1")]
        assert pair.wait() == [(3.0, "0", 1), (3.0, "1", 1)]
    assert capfd.readouterr().out == ""


def test_processes_serve_many_calls_until_one_fails(tmp_path, monkeypatch):
    before = os.getcwd()
    with LocalRanks(2) as ranks:
        first = ranks.call(leave_a_mark, ("MINE",))
        monkeypatch.setenv("MINE", "of this process")
        monkeypatch.chdir(tmp_path)
        second = ranks.call(leave_a_mark, ("MINE",))
        assert [value for value, *_ in ranks.call(add, (2.0,))] == [5.0, 5.0], "a group for each call"
        with pytest.raises(RankError) as caught:
            ranks.call(fail_on, (1, "raise"))
        assert (caught.value.rank, caught.value.reason) == (1, "LaunchError: of its own"), "not the echo of another"
        assert caught.value.rejection == "of its own"
        assert "in fail_on" in str(caught.value)
        assert not running([pid for pid, *_ in first])
        third = ranks.call(leave_a_mark, ("MINE",))
        with pytest.raises(RankError, match=r"rank 1: (.|\n)*ValueError: the reason"):
            ranks.call(fail_on, (1, "late"))
        with pytest.raises(RankError) as caught:
            ranks.call(fail_on, (1, "die"))
        assert str(caught.value) == "rank 1: killed by SIGKILL (out of memory?)\nthe last words"
    assert [pid for pid, *_ in second] == [pid for pid, *_ in first]
    assert not {pid for pid, *_ in third} & {pid for pid, *_ in first}
    assert [found[1:] for found in first] == [(None, before, False)] * 2
    assert [found[1:] for found in second + third] == [("of this process", str(tmp_path), False)] * 4
    assert not running([pid for pid, *_ in third])


def test_ranks_that_missed_each_other_are_started_again(tmp_path):
    with LocalRanks(1) as ranks:
        assert ranks.call(miss, (str(tmp_path), ATTEMPTS - 1)) == [ATTEMPTS]
        with pytest.raises(RankError, match=NOT_CONNECTED):
            ranks.call(miss, (str(tmp_path), 2 * ATTEMPTS))


def test_ranks_that_hang_are_told_with_their_stacks_and_ended(seen):
    with LocalRanks(3) as ranks:
        ranks.begin(hang, (str(seen),), timeout=100)
        pids = wait_for(seen, 4)
        ranks._deadline = time.monotonic() + 1
        with pytest.raises(RankError) as caught:
            ranks.wait()
    assert caught.value.hung
    text = str(caught.value)
    assert text.startswith("rank 0: had not ended after 100 s\nranks 0, 2 at:\n"), text
    assert "in barrier" in text.partition("rank 1 at:")[0]
    assert "in hang" in text.partition("rank 1 at:")[2]
    assert not running(pids)


def test_ctrl_c_ends_all(seen):
    with contextlib.suppress(KeyboardInterrupt), LocalRanks(2) as ranks:
        ranks.begin(hang, (str(seen),), timeout=100)
        pids = wait_for(seen, 3)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ranks.wait()
        pytest.fail("nothing was raised")
    assert not running(pids)


def test_ranks_end_with_a_parent_that_is_killed(tmp_path, seen):
    call = f"if __name__ == '__main__':\n    LocalRanks(2).call(hang, ({str(seen)!r},), timeout=100)\n"
    (tmp_path / "script.py").write_text(f"from tests.distributed.test_local_ranks import LocalRanks, hang\n{call}")
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "script.py"], cwd=tmp_path, env=environment)
    pids = wait_for(seen, 3)
    parent.kill()
    parent.wait()
    assert not running(pids)
    assert not list(tmp_path.glob("halfmesh_ranks_*"))


def test_what_other_processes_cannot_call_is_rejected():
    with pytest.raises(InputError, match=r"cannot be sent .*lambda.*name functions at the top level of a module"):
        LocalRanks(1).begin(lambda: 1)
