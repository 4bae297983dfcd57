"""What ranks leave for each other of how they ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from halfmesh import end_log
from halfmesh.end_log import End, EndLog, Ends
from tests.support.ranks import free_port

NAME = "halfmesh ends"
linux_only = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are seen in /proc")


class BrokenStore:
    """Works until `broken` is set, as a store does whose host ends; counts what is asked of it from then on."""

    def __init__(self) -> None:
        self.works = dist.HashStore()
        self.broken = False
        self.asked = 0

    def __getattr__(self, name: str) -> object:
        if self.broken:
            self.asked += 1
            raise RuntimeError("Connection reset by peer")
        return getattr(self.works, name)


def read(log: EndLog) -> Ends:
    ends = log.read()
    assert ends is not None
    return ends


def test_ends_in_their_order_with_the_first_error() -> None:
    store = dist.HashStore()
    logs = [EndLog(store, rank, 4) for rank in range(4)]
    assert read(logs[0]) == Ends(dict.fromkeys(range(4), End.RUNNING))
    logs[3].leave(End.FAILED, "three\nlines\nof it")
    logs[1].leave(End.FAILED, "another")
    logs[2].leave(End.LOST)
    logs[0].finish()
    ends = read(logs[2])
    assert list(ends.of_rank.items()) == [(3, End.FAILED), (1, End.FAILED), (2, End.LOST), (0, End.FINISHED)]
    assert ends.first_error == "three\nlines\nof it"


def test_the_first_end_of_a_rank_counts() -> None:
    log = EndLog(dist.HashStore(), 0, 4)
    log.leave(End.TIMED_OUT)
    log.leave(End.FAILED, "later")
    log.finish()
    assert read(log) == Ends({0: End.TIMED_OUT})


def test_an_earlier_run_in_the_same_store_means_nothing() -> None:
    store = dist.HashStore()
    for rank in range(2):
        EndLog(store, rank, 4).leave(End.FAILED, "earlier")
    logs = [EndLog(store, rank, 4) for rank in range(2)]
    assert read(logs[0]) == Ends({0: End.RUNNING, 1: End.RUNNING})


def test_found_dead_too_late() -> None:
    store = dist.HashStore()
    logs = [EndLog(store, rank, 3) for rank in range(3)]
    logs[0].leave(End.FAILED, "boom")
    logs[1].leave_killed([0, 2])
    logs[1].leave(End.TIMED_OUT)
    logs[1].leave_killed([2])  # another has found it at the same time
    expected = {0: End.FAILED, 2: End.KILLED, 1: End.TIMED_OUT}
    assert list(read(logs[1]).of_rank.items()) == list(expected.items())


@linux_only
def test_a_process_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    alive, ended = EndLog(store, 0, 4), subprocess.Popen(["true"])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: ended.pid)
        gone = EndLog(store, 1, 4)
    with monkeypatch.context() as patch:  # the same number on another machine
        patch.setattr(end_log, "_machine", lambda: "another/pid:[1]")
        patch.setattr(os, "getpid", lambda: ended.pid)
        EndLog(store, 2, 4)
    os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie from now on
    read(alive)
    assert alive.find_killed() == [1]
    ended.wait()
    assert alive.find_killed() == [1]
    alive.leave_killed([1])
    assert read(alive).of_rank == {0: End.RUNNING, 2: End.RUNNING, 1: End.KILLED}
    assert alive.find_killed() == []
    gone.finish()  # was on its way
    assert read(alive).of_rank[1] is End.FINISHED


def test_where_processes_cannot_be_seen_none_is_said_to_be_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(end_log, "_machine", lambda: "")
    monkeypatch.setattr(end_log, "_is_running", lambda process: False)
    log = EndLog(dist.HashStore(), 0, 4)
    read(log)
    assert log.find_killed() == []


def test_a_store_that_is_gone_is_asked_once() -> None:
    store = BrokenStore()
    log = EndLog(store, 1, 4)  # type: ignore[arg-type]
    store.broken = True
    log.leave(End.LOST)
    assert log.read() is None
    assert store.asked == 1


def test_the_reason_outlives_the_store() -> None:
    port = free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    host, other = EndLog(hosted, 0, 4, host=0), EndLog(client, 1, 4, host=0)
    host.publish("one hangs")
    assert other.published() == "one hangs"
    host.publish("later")
    other.publish("later")
    del host, hosted
    other.leave(End.LOST)
    assert other.read() is None
    assert other.published() == "one hangs"


def test_a_host_that_ends_without_a_word() -> None:
    port = free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    other = EndLog(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 4, host=0)
    del hosted
    assert other.published() == ""
    assert other.read() is None


def test_no_thread_is_left_at_the_end() -> None:
    port = free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    other = EndLog(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 4, host=0)
    assert NAME in [thread.name for thread in threading.enumerate()]
    other.finish()
    assert NAME not in [thread.name for thread in threading.enumerate()]
    assert EndLog(hosted, 0, 4, host=0).published() == ""


def test_a_store_of_the_launchers_needs_no_thread() -> None:
    log = EndLog(dist.HashStore(), 1, 4)
    log.publish("x")
    assert log.published() == ""
    assert NAME not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("others_end", [False, True])
def test_waiting_for_the_others(others_end: bool) -> None:
    store = dist.HashStore()
    logs = [EndLog(store, rank, 2) for rank in range(2)]
    logs[0].leave(End.FAILED, "boom")
    if others_end:
        logs[1].leave(End.LOST)
    start = time.monotonic()
    assert logs[0].await_others(1.0) == others_end
    assert (time.monotonic() - start >= 1.0) != others_end


def answered(log: EndLog, count: int) -> dict[int, str]:
    until = time.monotonic() + 10
    while len(log.answers()) < count and time.monotonic() < until:
        time.sleep(0.01)
    return log.answers()


@pytest.mark.parametrize("host", [0, None])
def test_all_ranks_say_where_they_are(host: int | None) -> None:
    port = free_port()
    stores = [dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)]
    stores += [dist.TCPStore("127.0.0.1", port, is_master=False) for _ in range(2)]
    logs = [EndLog(store, rank, 3, host, lambda rank=rank: f"at {rank}") for rank, store in enumerate(stores)]
    assert logs[1].answers() == {}
    logs[1].ask_all()
    assert answered(logs[1], 2) == {0: "at 0", 2: "at 2"}
    logs[1].leave_answer("timed out")
    assert logs[2].answers() == {0: "at 0", 1: "timed out", 2: "at 2"}
    logs[1].publish("the reason")  # after it was asked, too
    assert logs[2].published() == ("the reason" if host == 0 else "")
    for log in logs[::-1]:
        log.finish("ended")
    assert NAME not in [thread.name for thread in threading.enumerate()]
    assert logs[0].answers() == dict.fromkeys(range(3), "ended")


def test_who_was_not_asked_learns_the_reason() -> None:
    port = free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", port, is_master=False)
    host, other = (EndLog(store, rank, 2, 0, lambda: "here") for rank, store in enumerate((hosted, client)))
    host.publish("one hangs")
    assert other.published() == "one hangs"
    host.finish()
    other.finish()


def test_answers_of_an_earlier_run_in_the_same_store_mean_nothing() -> None:
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    earlier = [EndLog(store, rank, 2, None, lambda: "earlier") for rank in range(2)]
    earlier[0].ask_all()
    assert answered(earlier[0], 1) == {1: "earlier"}
    for log in earlier:
        log.finish()
    logs = [EndLog(store, rank, 2, None, lambda: "now") for rank in range(2)]
    assert logs[0].answers() == {}
    logs[0].ask_all()
    assert answered(logs[0], 1) == {1: "now"}
    for log in logs:
        log.finish()


@linux_only
def test_a_host_that_is_stopped_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    hosted = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    host = EndLog(hosted, 0, 2, 0, lambda: "host")
    other = EndLog(dist.TCPStore("127.0.0.1", port, is_master=False), 1, 2, 0, lambda: "other")
    host.ask_all()
    assert answered(host, 1) == {1: "other"}  # by then it knows the host's process
    assert not other.host_is_stopped
    monkeypatch.setattr(end_log, "_state", lambda process: "T" if process == os.getpid() else "R")
    assert other.host_is_stopped
    assert not host.host_is_stopped
    assert other.read() is None
    assert host.read() is not None
    monkeypatch.undo()
    assert other.read() is not None
    for log in (other, host):
        log.finish()
