"""What the guard of one rank says and leaves for each kind of error. `test_mesh_failures.py` has real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from halfmesh import failures
from halfmesh.end_log import End, EndLog
from halfmesh.failures import FailureGuard, is_echo, is_timeout, told_to_torchrun
from halfmesh.layout import Layout
from halfmesh.positions import RUNS, WAITS, Position, Whereabouts

LOST = RuntimeError("[pair.cc:561] Connection closed by peer [127.0.0.1]:86. GLHF!")
LATE = RuntimeError("[unbound_buffer.cc:78] Timed out waiting 5000ms for recv operation to complete")
BY_ITSELF = "ended without an error of its own (killed, out of memory?)"
EARLY = "ended without an error while others waited for it (left its loop early?)"


class Ranks:
    """The guard of rank 0 of 4, in this process, and the logs of the others."""

    def __init__(self, host: int | None = None) -> None:
        self.store = dist.HashStore()
        self.logs = [EndLog(self.store, 0, 4, host), *(EndLog(self.store, rank, 4) for rank in range(1, 4))]
        self.guard = FailureGuard(self.logs[0], Layout(4, tensor=2), timeout_s=5.0)

    def fail(self, error: BaseException) -> None:
        """An error like `error` ends rank 0."""
        try:
            raise type(error)(*error.args)
        except BaseException as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)

    def ends(self) -> dict[int, End]:
        ends = self.logs[1].read()
        assert ends is not None
        return ends.of_rank


@pytest.fixture(params=[None])
def ranks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Parametrized with the rank that hosts the store."""
    monkeypatch.setattr(failures, "end_soon", lambda: None)
    monkeypatch.setattr(failures, "GRACE_S", 1.0)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    made = Ranks(request.param)
    yield made
    made.guard.remove()
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> Path:
    """Where a rank under torchrun leaves its error for the closing summary."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def test_an_error_of_its_own(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.fail(ValueError("boom"))
    assert capsys.readouterr().err.endswith("ValueError: boom\nraised on rank 0 (dp 0, tp 0)\n")
    ends = ranks.logs[1].read()
    assert ends is not None
    assert ends.of_rank[0] is End.FAILED
    assert ends.first_error.startswith("[rank 0 (dp 0, tp 0)] Traceback (most recent call last)")
    assert ends.first_error.endswith("ValueError: boom")


def test_ctrl_c(ranks: Ranks) -> None:
    ranks.fail(KeyboardInterrupt())
    assert ranks.ends()[0] is End.INTERRUPTED


@pytest.mark.parametrize(
    ("error", "end", "said"),
    [
        (LOST, End.LOST, "ends because the connection to another rank was lost"),
        (LATE, End.TIMED_OUT, "waited 5 s (config key timeout) for another rank"),
    ],
)
def test_the_error_of_another(
    ranks: Ranks, error: RuntimeError, end: End, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks.logs[3].leave(End.FAILED, "[rank 3] Traceback\nValueError: boom")
    ranks.fail(error)
    shown = f"{error}\n[rank 0 (dp 0, tp 0)] {said}; the first error was:\n[rank 3] Traceback\nValueError: boom\n"
    assert capsys.readouterr().err.endswith(shown)
    assert ranks.ends()[0] is end


def test_whoever_has_not_come_at_the_end_of_the_grace(ranks: Ranks, capsys: pytest.CaptureFixture[str]) -> None:
    ranks.logs[1].leave(End.TIMED_OUT)
    ranks.logs[3].leave(End.LOST)
    ranks.fail(LATE)
    assert capsys.readouterr().err.endswith("likely hanging (or slower than that): rank 2 (dp 1, tp 0)\n")


@pytest.mark.parametrize("error", [LOST, LATE])
def test_where_the_ranks_are(
    ranks: Ranks, error: RuntimeError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rank 1 waits, but has time left; rank 2 is silent; rank 3 is the reason."""
    monkeypatch.setattr(ranks.guard, "_whereabouts", Whereabouts())
    monkeypatch.setattr(failures, "ANSWER_S", 0.3)
    ranks.logs[1].leave_answer(Position(WAITS, "engine.step()", (8,)).dump())
    ranks.logs[3].leave_answer(Position(RUNS, "", (8,), "train.py:3 in load: sleep()").dump())
    if error is LOST:
        ranks.logs[2].leave(End.TIMED_OUT)
    ranks.fail(error)
    said = capsys.readouterr().err
    missing = "rank 2 (dp 1, tp 0), rank 3 (dp 1, tp 1)" if error is LATE else "rank 3 (dp 1, tp 1)"
    assert f"likely hanging (or slower than that): {missing}\n" in said
    report = said.partition("Where the ranks are:\n")[2].splitlines()
    assert report[0].startswith("  rank 0 (dp 0, tp 0): waiting - ")
    assert report[0].endswith(" in fail: raise type(error)(*error.args)")
    assert report[1:] == [
        "  rank 1 (dp 0, tp 1): waiting, in engine.step(), after update 8",
        "  rank 2 (dp 1, tp 0): no answer (stopped, or its machine is lost)",
        "  rank 3 (dp 1, tp 1): after update 8 - train.py:3 in load: sleep()   <- not waiting",
    ]
    for rank in (1, 2, 3):  # was asked
        assert ranks.store.check([f"halfmesh/call_to_rank_{rank}/0"])


def test_after_an_error_nobody_asks_where_ranks_are(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks.guard, "_whereabouts", Whereabouts())
    ranks.logs[3].leave(End.FAILED, "[rank 3] Traceback\nValueError: boom")
    ranks.fail(LATE)
    assert capsys.readouterr().err.endswith("ValueError: boom\n")


@pytest.mark.parametrize("error", [LOST, LATE])  # LATE: the sockets of a dead rank may live on in its data workers
def test_the_dead_are_named_to_all(
    ranks: Ranks, error: RuntimeError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EndLog, "find_killed", lambda self: [2])
    ranks.fail(error)
    assert "; rank 2 (dp 1, tp 0) ended without an error of its own" in capsys.readouterr().err
    assert ranks.ends()[2] is End.KILLED


def test_after_sigterm_nobody_is_said_to_be_killed(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EndLog, "find_killed", lambda self: [2])
    monkeypatch.setattr(failures, "end_soon", lambda: signal.raise_signal(signal.SIGTERM))
    ranks.fail(LOST)
    assert "not heard of, so likely the reason" in capsys.readouterr().err
    assert ranks.ends()[2] is End.RUNNING


def test_the_summary_of_torchrun_has_the_reason(ranks: Ranks, error_file: Path) -> None:
    ranks.logs[3].finish()
    start = time.monotonic()
    ranks.fail(LOST)
    assert time.monotonic() - start >= 1.0  # a rank with an error of its own comes first in the summary
    trace = json.loads(error_file.read_text())["message"]["extraInfo"]["py_callstack"]
    assert "Connection closed by peer" in trace
    assert trace.rstrip().endswith(
        "rank 3 (dp 1, tp 1) ended without an error while others waited for it (left its loop early?)"
    )


def test_once_torchrun_has_seen_another_end_its_summary_stays_as_it_is(
    ranks: Ranks, error_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "end_soon", lambda: signal.raise_signal(signal.SIGTERM))
    monkeypatch.setattr(failures, "GRACE_S", 1000.0)  # nor is there anything to wait for
    ranks.logs[3].leave(End.FAILED, "boom")
    ranks.fail(LOST)
    assert not error_file.exists()


@pytest.mark.parametrize(("error", "recorded"), [(LOST, False), (LATE, True), (ValueError("x"), True)])
def test_what_is_recorded_before_there_is_a_guard(error_file: Path, error: Exception, recorded: bool) -> None:
    with pytest.raises(type(error)), told_to_torchrun():
        raise error
    assert error_file.exists() == recorded


def test_a_fork_does_not_speak_for_its_rank(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getpid", lambda: 1)
    ranks.fail(ValueError("boom"))
    ranks.guard._on_exit()
    assert ranks.ends()[0] is End.RUNNING


def test_an_end_without_an_error(ranks: Ranks) -> None:
    ranks.guard._on_exit()
    assert ranks.ends()[0] is End.FINISHED
    assert ranks.ends()[1] is End.RUNNING


hosts_the_store = pytest.mark.parametrize("ranks", [0], indirect=True)


@hosts_the_store
@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError("boom"), "ValueError: boom"), (LOST, f"rank 3 (dp 1, tp 1) {BY_ITSELF}")]
)
@pytest.mark.parametrize("others_end", [False, True])
def test_a_host_stays_until_the_others_know_the_reason(
    ranks: Ranks, error: Exception, reason: str, others_end: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failures, "SERVE_S", 2.0)
    ranks.logs[1].leave_killed([3])
    for log in ranks.logs[1:3] if others_end else ():
        log.leave(End.LOST)
    start = time.monotonic()
    ranks.fail(error)
    ranks.guard._on_exit()
    assert (time.monotonic() - start >= 2.0) != others_end
    assert ranks.store.get("halfmesh/reason_for_rank_2").decode().endswith(reason)


@hosts_the_store
@pytest.mark.parametrize("others_end", [False, True])
def test_a_host_that_ends_before_the_others_says_so(ranks: Ranks, others_end: bool) -> None:
    for log in ranks.logs[1:] if others_end else ():
        log.finish()
    ranks.guard.remove()
    if others_end:
        assert not ranks.store.check(["halfmesh/reason_for_rank_2"])
    else:
        assert ranks.store.get("halfmesh/reason_for_rank_2").decode() == f"rank 0 (dp 0, tp 0) {EARLY}"


def test_a_launcher_that_is_gone(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(EndLog, "read", lambda self: None)
    ranks.fail(LOST)
    assert capsys.readouterr().err.endswith("; the launcher is gone, too\n")


def test_a_removed_guard_has_finished(ranks: Ranks) -> None:
    ranks.guard.remove()
    assert ranks.ends()[0] is End.FINISHED


@pytest.mark.parametrize(
    ("message", "echo", "timeout"),
    [
        (str(LOST), True, False),
        ("Read error [127.0.0.1]:38284: Connection reset by peer", True, False),
        (str(LATE), False, True),
        ("[unbound_buffer.cc:129] Timed out waiting 2000ms for send operation to complete", False, True),
        ("Application timeout caused pair closure", False, True),
        ("wait timeout after 2000ms, keys: /default_pg/0//9//cpu//0/1", False, True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", False, True),
        ("DataLoader timed out after 5 seconds", False, False),
        ("boom", False, False),
    ],
)
def test_what_only_says_that_another_rank_is_gone_or_late(message: str, echo: bool, timeout: bool) -> None:
    assert (is_echo(RuntimeError(message)), is_timeout(RuntimeError(message))) == (echo, timeout)
    assert not is_echo(ValueError(message))
    assert not is_timeout(ValueError(message))


def test_an_oserror_is_an_echo_too() -> None:
    assert is_echo(ConnectionResetError("[Errno 104] Connection reset by peer"))
