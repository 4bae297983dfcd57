"""Ctrl-C, SIGTERM and the end of a process, where code in C++ may block and Python does not get to run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

EXIT_LIMIT_S = 8.0  # after an error: time to tell the others, for atexit handlers and destructors (which may block)
INTERRUPT_LIMIT_S = 3.0  # after Ctrl-C: time to get back to Python


class InterruptWatch:
    """Ends the process when Ctrl-C has not become a KeyboardInterrupt within `INTERRUPT_LIMIT_S`.

    Python runs signal handlers between its own instructions, never while a collective blocks in C++. The byte that it
    writes to the wake-up descriptor comes at once, and a thread can read it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._delivered_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handler = self._on_interrupt
        signal.signal(signal.SIGINT, self._handler)
        threading.Thread(target=self._wait, daemon=True, name="halfmesh interrupt watch").start()

    def remove(self) -> None:
        """Restore what was there before."""
        if _in_main_thread():
            if signal.getsignal(signal.SIGINT) == self._handler:
                signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.set_wakeup_fd(self._previous_fd)
        with contextlib.suppress(OSError):
            self._writer.shutdown(socket.SHUT_RDWR)  # ends the thread, which closes both

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self._delivered_at = time.monotonic()
        signal.default_int_handler(number, frame)

    def _wait(self) -> None:
        with self._reader, self._writer:
            while received := self._reader.recv(1):
                if received[0] == signal.SIGINT and not self._was_delivered(time.monotonic()):
                    text = f"[{self._name}] interrupted while it waited for another rank or a device; it ends now"
                    print(text, file=sys.stderr, flush=True)
                    os._exit(128 + signal.SIGINT)

    def _was_delivered(self, received_at: float) -> bool:
        while time.monotonic() < received_at + INTERRUPT_LIMIT_S:
            if self._delivered_at > received_at - 0.5:  # the handler may have run before this thread woke up
                return True
            time.sleep(0.05)
        return False


def watch_interrupts(name: str) -> InterruptWatch | None:
    """A watch, unless the user (or an event loop) handles Ctrl-C already, or this is not the main thread."""
    if not _in_main_thread():
        return None
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    used = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(used)
    return InterruptWatch(name) if used == -1 else None


@contextlib.contextmanager
def sigterm_held() -> Iterator[Callable[[], bool]]:
    """SIGTERM does not end the process within the block; yields a function that says whether it came.

    Does nothing where the user handles SIGTERM, or in another thread than the main one.
    """
    came: list[int] = []
    mine = _in_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    try:
        yield lambda: bool(came)
    finally:
        if mine:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def end_soon() -> None:
    """Let the kernel end the process if its shutdown blocks: no Python code would run by then."""
    sys.stderr.flush()
    sys.stdout.flush()
    if hasattr(signal, "setitimer") and _in_main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_LIMIT_S)


def _in_main_thread() -> bool:
    """Python allows handlers nowhere else."""
    return threading.current_thread() is threading.main_thread()
