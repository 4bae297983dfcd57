"""Ranks of this machine: what they give back, which error is told, and that nothing of them is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from halfmesh.distributed.local_ranks import ATTEMPTS, NOT_CONNECTED, LocalRanks
from halfmesh.distributed.rank_process import RankError
from halfmesh.errors import InputError, LaunchError

ROOT = Path(__file__).parents[2]


def add(start: float) -> tuple[torch.Tensor, str, int]:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    print("this is no part of an answer")
    return value, os.environ["RANK"], torch.get_num_threads()


def look_around() -> tuple[str | None, bool, str]:
    return os.environ.get("RANK"), dist.is_initialized(), os.environ["OMP_NUM_THREADS"]


def leave_a_mark(name: str) -> tuple[int, str | None, str, bool]:
    """Changes what the next call should find as it was."""
    found = os.getpid(), os.environ.get(name), os.getcwd(), "left" in sys.path
    os.environ[name] = "left"
    os.chdir("/")
    sys.path.append("left")
    return found


def end_before_an_error() -> None:
    if dist.get_rank() == 1:
        dist.destroy_process_group()
        time.sleep(0.5)
        raise ValueError("the reason")
    dist.barrier()


def miss(folder: str, times: int) -> int:
    """As gloo's sockets miss each other now and then."""
    Path(folder, str(os.getpid())).touch()
    if len(os.listdir(folder)) <= times:
        raise RuntimeError(f"{NOT_CONNECTED} with [...] Connection closed by peer")
    return len(os.listdir(folder))


def call(world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    with LocalRanks(world_size) as ranks:
        return ranks.call(function, args, timeout=100)


def fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise LaunchError("of its own")
        print("the last words", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def hang(folder: str) -> None:
    """Rank 1 with a process that it has started, the others in a collective."""
    Path(folder, str(os.getpid())).touch()
    if dist.get_rank() == 1:
        Path(folder, str(subprocess.Popen(["sleep", "1000"]).pid)).touch()
        time.sleep(1000)
    dist.barrier()


def wait_for(folder: Path, count: int) -> list[int]:
    """The processes of `hang`, when all are there."""
    until = time.monotonic() + 250
    while len(found := [int(path.name) for path in folder.iterdir()]) < count and time.monotonic() < until:
        time.sleep(0.05)
    assert len(found) == count
    return found


def running(pids: list[int]) -> list[int]:
    """Those that still run a little later."""
    until = time.monotonic() + 10
    while left := [pid for pid in pids if is_running(pid)]:
        if time.monotonic() > until:
            break
        time.sleep(0.05)
    return left


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def folders(temporary: Path) -> list[Path]:
    return list(temporary.glob("halfmesh_ranks_*"))


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary folders are made."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "temporary"


@pytest.fixture
def seen(tmp_path: Path) -> Path:
    """Where `hang` notes its processes."""
    (tmp_path / "seen").mkdir()
    return tmp_path / "seen"


def test_results_come_in_the_order_of_ranks_with_a_group_and_without(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "7")  # of a launch around this process
    with LocalRanks(2) as pair, LocalRanks(1) as alone:
        pair.begin(add, (1.0,), timeout=100)
        assert alone.call(look_around, group=False) == [(None, False, "1")]
        results = pair.wait()
    assert [(value.item(), rank, threads) for value, rank, threads in results] == [(3.0, "0", 1), (3.0, "1", 1)]
    assert capfd.readouterr().out == ""
    assert not folders(temporary)


def test_processes_serve_many_calls_until_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.getcwd()
    with LocalRanks(2) as ranks:
        first = ranks.call(leave_a_mark, ("MINE",))
        monkeypatch.setenv("MINE", "of this process")
        monkeypatch.chdir(tmp_path)
        second = ranks.call(leave_a_mark, ("MINE",))
        assert [value.item() for value, *_ in ranks.call(add, (2.0,))] == [5.0, 5.0], "a group for each call"
        with pytest.raises(RankError) as caught:
            ranks.call(fail_on, (1, "raise"))
        assert (caught.value.rank, caught.value.reason) == (1, "LaunchError: of its own"), "not the echo of another"
        assert caught.value.rejection == "of its own"
        assert "in fail_on" in str(caught.value)
        assert not running([pid for pid, *_ in first])
        third = ranks.call(leave_a_mark, ("MINE",))
    assert [pid for pid, *_ in second] == [pid for pid, *_ in first]
    assert not {pid for pid, *_ in third} & {pid for pid, *_ in first}
    assert [found[1:] for found in first] == [(None, before, False)] * 2
    assert [found[1:] for found in second + third] == [("of this process", str(tmp_path), False)] * 4
    assert not running([pid for pid, *_ in third])


def test_an_echo_that_comes_before_the_reason_does_not_hide_it() -> None:
    with pytest.raises(RankError, match="ValueError: the reason") as caught:
        call(2, end_before_an_error)
    assert caught.value.rank == 1


def test_ranks_that_missed_each_other_are_started_again(tmp_path: Path) -> None:
    assert call(1, miss, str(tmp_path), ATTEMPTS - 1) == [ATTEMPTS]
    with pytest.raises(RankError, match=NOT_CONNECTED):
        call(1, miss, str(tmp_path), 2 * ATTEMPTS)
    assert len(list(tmp_path.iterdir())) == 2 * ATTEMPTS


def test_a_killed_rank_is_told_with_its_last_words() -> None:
    with pytest.raises(RankError) as caught:
        call(2, fail_on, 1, "die")
    assert (caught.value.rank, caught.value.rejection) == (1, "")
    assert str(caught.value) == "rank 1: killed by SIGKILL (out of memory?)\nthe last words"


def test_ranks_that_hang_are_told_with_their_stacks_and_ended(temporary: Path, seen: Path) -> None:
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
    assert not folders(temporary)


def test_ctrl_c_ends_all(temporary: Path, seen: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), LocalRanks(2) as ranks:
        ranks.begin(hang, (str(seen),), timeout=100)
        pids = wait_for(seen, 3)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ranks.wait()
        pytest.fail("nothing was raised")
    assert not running(pids)
    assert not folders(temporary)


def in_a_process_of_its_own(text: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A script that has a fork server of its own."""
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=environment, text=True, stdout=-1, stderr=-1)


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path, seen: Path) -> None:
    script = (
        "from halfmesh.distributed.local_ranks import LocalRanks\nfrom tests.distributed.test_local_ranks import hang\n"
    )
    script += f"if __name__ == '__main__':\n    LocalRanks(2).call(hang, ({str(seen)!r},), timeout=100)\n"
    parent = in_a_process_of_its_own(script, tmp_path)
    pids = wait_for(seen, 3)
    parent.kill()
    parent.communicate()
    assert not running(pids)
    assert not folders(tmp_path)


@pytest.mark.slow
def test_modules_are_imported_once_and_one_that_fails_fails_in_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nos.write(2, b'imported\\n')\nprint('no answer')\ndef value(): return 3\n"
    )
    (tmp_path / "broken.py").write_text("raise SystemExit('a script')\n")
    script = "from halfmesh.distributed.local_ranks import LocalRanks\nimport mine\n"
    script += "if __name__ == '__main__':\n"
    script += "    print(LocalRanks(2, preload=['mine', 'broken']).call(mine.value, timeout=100, group=False))\n"
    out, errors = in_a_process_of_its_own(script, tmp_path).communicate()
    assert out == "no answer\n[3, 3]\n"  # its own import of `mine`, and the results
    assert errors.count("imported") == 2  # here, and in the server


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = "from halfmesh.distributed.local_ranks import LocalRanks\n"
    script += "from tests.distributed.test_local_ranks import look_around\nLocalRanks(1).call(look_around)\n"
    _, errors = in_a_process_of_its_own(script, tmp_path).communicate()
    assert 'ended with status 1 while it started; is this called under `if __name__ == "__main__":`?' in errors


def test_what_other_processes_cannot_call_and_more_ranks_than_gpus_are_rejected(monkeypatch) -> None:
    with pytest.raises(InputError, match=r"cannot be sent .*lambda.*name functions at the top level of a module"):
        LocalRanks(1).begin(lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 ranks need a GPU each, but found 1 GPU; use device='cpu'"):
        LocalRanks(2, "cuda").begin(look_around)
