"""Ranks of this machine: what they give back, which error is told, and that nothing of them is left."""

from __future__ import annotations

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

from halfmesh.distributed.env import LaunchError
from halfmesh.errors import InputError
from halfmesh.verify.ranks import RankError, Ranks, run

ROOT = Path(__file__).parents[2]


def add(start: float) -> tuple[torch.Tensor, str, int]:
    value = torch.tensor([start + dist.get_rank()])
    dist.all_reduce(value)
    print("this is no part of an answer")
    return value, os.environ["RANK"], torch.get_num_threads()


def look_around() -> tuple[str | None, bool, str, str]:
    return os.environ.get("RANK"), dist.is_initialized(), os.environ["OMP_NUM_THREADS"], os.environ["MINE"]


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
    until = time.monotonic() + 100
    while len(found := [int(path.name) for path in folder.iterdir()]) < count and time.monotonic() < until:
        time.sleep(0.05)
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


def test_results_come_in_the_order_of_ranks_with_a_group_and_without(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "7")  # of a launch around this process
    with Ranks(add, 2, (1.0,), timeout=100) as pair, Ranks(look_around, 1, environment={"MINE": "x"}) as alone:
        assert alone.wait() == [(None, False, "1", "x")]
        results = pair.wait()
    assert [(value.item(), rank, threads) for value, rank, threads in results] == [(3.0, "0", 1), (3.0, "1", 1)]
    assert capfd.readouterr().out == ""
    assert not folders(temporary)


def test_an_error_of_a_ranks_own_is_told_not_its_echo() -> None:
    with pytest.raises(RankError) as caught:
        run(fail_on, 3, (2, "raise"), timeout=100)
    assert (caught.value.rank, caught.value.reason) == (2, "LaunchError: of its own")
    assert caught.value.refusal == "of its own"
    assert "in fail_on" in str(caught.value)


def test_a_killed_rank_is_told_with_its_last_words() -> None:
    with pytest.raises(RankError) as caught:
        run(fail_on, 2, (1, "die"), timeout=100)
    assert (caught.value.rank, caught.value.refusal) == (1, "")
    assert str(caught.value) == "rank 1: killed by SIGKILL (out of memory?)\nthe last words"


def test_ranks_that_hang_are_told_with_their_stacks_and_ended(temporary: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    with Ranks(hang, 3, (str(seen),), timeout=100) as ranks:
        pids = wait_for(seen, 4)
        ranks._deadline = time.monotonic() + 1
        with pytest.raises(RankError) as caught:
            ranks.wait()
    assert caught.value.hung
    text = str(caught.value)
    assert text.startswith("rank 0: had not ended after 100 s\nrank 0, 2 is at:\n"), text
    assert "in barrier" in text.partition("rank 1 is at:")[0]
    assert "in hang" in text.partition("rank 1 is at:")[2]
    assert len(pids) == 4
    assert not running(pids)
    assert not folders(temporary)


def test_ctrl_c_ends_all(temporary: Path, tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    with contextlib.suppress(KeyboardInterrupt), Ranks(hang, 2, (str(seen),), timeout=100) as ranks:
        pids = wait_for(seen, 3)
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        ranks.wait()
        pytest.fail("nothing was raised")
    assert len(pids) == 3
    assert not running(pids)
    assert not folders(temporary)


def in_a_process_of_its_own(text: str, folder: Path, **variables: str) -> subprocess.Popen[str]:
    """A script that has a fork server of its own."""
    (folder / "script.py").write_text(text)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT), **variables}
    return subprocess.Popen([sys.executable, "script.py"], cwd=folder, env=environment, text=True, stdout=-1, stderr=-1)


def test_ranks_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    script = "from halfmesh.verify.ranks import run\nfrom tests.verify.test_ranks import hang\n"
    script += f"if __name__ == '__main__':\n    run(hang, 2, ({str(seen)!r},), timeout=100)\n"
    parent = in_a_process_of_its_own(script, tmp_path)
    pids = wait_for(seen, 3)
    parent.kill()
    parent.communicate()
    assert len(pids) == 3
    assert not running(pids)
    assert not folders(tmp_path)


@pytest.mark.slow
def test_modules_are_imported_once_and_one_that_fails_fails_in_the_ranks(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\nos.write(2, b'imported\\n')\nprint('no answer')\ndef value(): return 3\n"
    )
    (tmp_path / "broken.py").write_text("raise SystemExit('a script')\n")
    script = "from halfmesh.verify.ranks import run\nimport mine\n"
    script += "if __name__ == '__main__':\n"
    script += "    print(run(mine.value, 2, timeout=100, preload=['mine', 'broken'], groups=False))\n"
    out, errors = in_a_process_of_its_own(script, tmp_path).communicate()
    assert out == "no answer\n[3, 3]\n"  # its own import of `mine`, and the results
    assert errors.count("imported") == 2  # here, and in the server


@pytest.mark.slow
def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = "from halfmesh.verify.ranks import run\nfrom tests.verify.test_ranks import look_around\n"
    _, errors = in_a_process_of_its_own(f"{script}run(look_around, 1, timeout=100)\n", tmp_path).communicate()
    assert 'ended with status 1 while it started; is this called under `if __name__ == "__main__":`?' in errors


def test_what_other_processes_cannot_call_is_refused() -> None:
    with pytest.raises(InputError, match=r"cannot be sent .*lambda.*name functions of a module's top level"):
        run(lambda: 1, 1)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(InputError, match="2 ranks need a GPU each, and there are 1; use device='cpu'"):
        run(look_around, 2, device="cuda")
