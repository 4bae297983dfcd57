"""When a rank fails, all end within seconds and the first error is shown last.

Measured with gloo: when a process ends, its peers get "Connection closed by peer" at once. That echo must not be taken
for the reason. And Ctrl-C does not reach Python while a collective blocks in C++: torchrun then waits 30 s before it
kills. `FailureGuard` takes care of both, for the process that it is installed in.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

# What torch says when a *peer* is gone (gloo, its TCP store, NCCL).
ECHOES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection was likely closed",
    "broken pipe",
    "socket closed",
    "failed to recv, got 0 bytes",
    "remote process exited",
)
FIRST_ERROR = "halfmesh/first_error"  # key in the store
ECHO_GRACE_S = 3.0  # how long a rank with an echo waits, for the launcher to see the rank with the reason end first
SERVE_S = 1.0  # how long a failed rank that hosts the store keeps it up for the others to read its error
EXIT_LIMIT_S = 8.0  # after an error: time for the above, atexit handlers and destructors (a broken group may block)
INTERRUPT_LIMIT_S = 3.0  # after Ctrl-C: time to get back to Python


class FailureGuard:
    """Exception hook and Ctrl-C watch of one rank of several; `remove()` restores what was there before.

    `store` is where the first error is left for the other ranks (None: torchrun's closing summary shows it);
    `hosts_store` says that it ends with this process.
    """

    def __init__(self, rank: int, store: Any = None, hosts_store: bool = False) -> None:
        self.rank = rank
        self._store = store
        self._hosts_store = hosts_store
        self._active = True
        self._hook = self._on_error
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook
        self._watch = _watch_interrupts(rank)

    def remove(self) -> None:
        """Put the previous hooks back. A hook that was installed on top of this one stays, and skips this one."""
        self._active = False
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook
        if self._watch is not None:
            self._watch.remove()

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._previous_hook(kind, error, trace)
        if not self._active:
            return
        _end_soon()
        if is_echo(error):
            first = self._wait_for_first_error()
            reason = f"the first error was:\n{first}" if first else "its own output tells why."
            _say(f"[rank {self.rank}] ends because the connection to another rank was lost; {reason}")
        if isinstance(error, Exception):
            _record_for_torchrun(error, trace)
            if not is_echo(error):
                self._leave_for_the_others("".join(traceback.format_exception(kind, error, trace)))

    def _wait_for_first_error(self) -> str:
        """What the rank that failed first has left in the store, or nothing.

        Waits in any case: a launcher that sees the other rank end first ends this one and shows the other's error.
        """
        first, until = "", time.monotonic() + ECHO_GRACE_S
        while time.monotonic() < until:
            with contextlib.suppress(Exception):  # the store may have ended with its host
                if self._store is not None and not first and self._store.check([FIRST_ERROR]):
                    first = self._store.get(FIRST_ERROR).decode()
            time.sleep(0.1)
        return first

    def _leave_for_the_others(self, text: str) -> None:
        if self._store is None:
            return
        with contextlib.suppress(Exception):
            self._store.compare_set(FIRST_ERROR, "", f"[rank {self.rank}] {text}")
        if self._hosts_store:
            # The others notice only when this process's connections close, so those are closed before the store.
            threading.Thread(target=_close_connections, daemon=True).start()
            time.sleep(SERVE_S)


class _InterruptWatch:
    """Ends the process when Ctrl-C has not become a KeyboardInterrupt within `INTERRUPT_LIMIT_S`.

    Python runs signal handlers between its own instructions, never while a collective blocks in C++. The byte that it
    writes to the wake-up descriptor comes at once, and a thread can read it.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._delivered_at = 0.0
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._handler = self._on_interrupt
        signal.signal(signal.SIGINT, self._handler)
        threading.Thread(target=self._wait, daemon=True, name="halfmesh interrupt watch").start()

    def remove(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python allows it nowhere else
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
                    _say(f"[rank {self.rank}] interrupted while it waited for another rank or a device; it ends now")
                    os._exit(128 + signal.SIGINT)

    def _was_delivered(self, received_at: float) -> bool:
        while time.monotonic() < received_at + INTERRUPT_LIMIT_S:
            if self._delivered_at > received_at - 0.5:  # the handler may have run before this thread woke up
                return True
            time.sleep(0.05)
        return False


def _watch_interrupts(rank: int) -> _InterruptWatch | None:
    """A watch, unless the user (or an event loop) handles Ctrl-C already, or this is not the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return None
    used = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(used)
    return _InterruptWatch(rank) if used == -1 else None


def is_echo(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error).lower() for words in ECHOES)


def _record_for_torchrun(error: Exception, trace: TracebackType | None) -> None:
    """Write the error file that torchrun shows in its closing summary, what its `record` decorator does."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise error  # the handler formats the exception in flight
    except Exception:
        error.__traceback__ = trace  # without the frame of this function
        get_error_handler().record_exception(error)


@contextlib.contextmanager
def told_to_torchrun() -> Iterator[None]:
    """Errors in this block are shown in torchrun's closing summary, also before there is a guard."""
    try:
        yield
    except Exception as error:
        _record_for_torchrun(error, error.__traceback__)
        raise


def _close_connections() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _end_soon() -> None:
    """Let the kernel end the process if its shutdown blocks: no Python code would run by then."""
    sys.stderr.flush()
    sys.stdout.flush()
    if hasattr(signal, "setitimer") and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, EXIT_LIMIT_S)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
