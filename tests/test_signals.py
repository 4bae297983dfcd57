"""SIGTERM while a rank finds out why it fails."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from halfmesh.signals import sigterm_held


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
