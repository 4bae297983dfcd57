"""SIGTERM while a rank finds out why it fails."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader

from halfmesh.signals import ShelteredWorker, StopSignals, sigterm_held


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_noted_and_does_not_end_the_process() -> None:
    with sigterm_held() as came:
        assert not came()
        signal.raise_signal(signal.SIGTERM)
        assert came()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_handler_of_the_users_stays() -> None:
    seen: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    with sigterm_held() as came:
        signal.raise_signal(signal.SIGTERM)
        assert not came()
    assert seen == [signal.SIGTERM]


def test_in_another_thread_it_does_nothing() -> None:
    came_there: list[bool] = []

    def hold() -> None:
        with sigterm_held() as came:
            came_there.append(came())

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert came_there == [False]


def test_stop_signals_note_what_came_and_go_again() -> None:
    signals = StopSignals(["SIGTERM"])
    signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    assert (signals.came, signals.others) == (["SIGTERM", "SIGTERM"], [])
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_stop_signals_leave_those_of_others() -> None:
    def mine(number: int, frame: object) -> None:
        raise AssertionError

    signal.signal(signal.SIGTERM, mine)
    signals = StopSignals(["SIGTERM"])
    assert (signals.handled, signals.others) == ((), ["SIGTERM"])
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is mine
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals = StopSignals(["SIGTERM"])
    signal.signal(signal.SIGTERM, mine)  # installed later
    signals.remove()
    assert signal.getsignal(signal.SIGTERM) is mine


def test_a_rank_that_fails_takes_the_place_of_stop_signals() -> None:
    """A launcher that ends it need not wait, and what came before counts."""
    signals = StopSignals(["SIGTERM"])
    with sigterm_held() as came:
        assert not came()
        signal.raise_signal(signal.SIGTERM)
        assert came()
    assert signals.came == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    signals = StopSignals(["SIGTERM"])
    signal.raise_signal(signal.SIGTERM)
    with sigterm_held() as came:
        assert came()


class Processes(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        time.sleep(0.05)
        return os.getpid()


def test_a_sheltered_worker_outlives_what_comes_from_others() -> None:
    called: list[int] = []
    init = ShelteredWorker([signal.SIGTERM, signal.SIGUSR2], called.append)
    loader = DataLoader(Processes(), num_workers=1, worker_init_fn=init)
    seen = []
    for process in loader:
        seen.append(process.item())
        if len(seen) == 1:
            for name in ("TERM", "USR2"):
                os.system(f"kill -{name} {seen[0]}")  # another process than its parent
    assert len(seen) == 6
    assert set(seen) != {os.getpid()}
    assert called == []  # in the worker


def test_a_sheltered_worker_ends_when_its_parent_says_so() -> None:
    """As DataLoader does at the end of the program, where its workers stay (persistent_workers)."""
    loader = DataLoader(
        Processes(), num_workers=1, worker_init_fn=ShelteredWorker([signal.SIGTERM], None), persistent_workers=True
    )
    process = next(iter(loader)).item()
    worker = loader._iterator._workers[0]  # type: ignore[union-attr]
    assert worker.pid == process
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0
