"""Ctrl-C, SIGTERM and the end of a process, where code in C++ may block and Python does not get to run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
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


class StopSignals:
    """Handlers of signals that tell a run to end: they note that the signal came, and do nothing else.

    A handler runs between any two instructions of the main thread, so it takes no lock and talks to nobody. Where the
    user, or a library, handles a signal already, that stays; `others` names these signals. `remove` puts back what was
    there before.

    Attributes:
        came: names of what came, in order; append to it to say the same in another way.
        others: signals of `names` that are not handled here.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.came: list[str] = []
        self.others: list[str] = []
        self._mine: list[signal.Signals] = []
        for name in names:
            if _is_free(signal.Signals[name]):
                signal.signal(signal.Signals[name], self)
                self._mine.append(signal.Signals[name])
            else:
                self.others.append(name)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number).name)

    @property
    def handled(self) -> tuple[signal.Signals, ...]:
        """The signals that are handled here."""
        return tuple(self._mine)

    def remove(self) -> None:
        """Restore what was there before, where nobody has taken this one's place."""
        self._replace(signal.SIG_DFL)

    def ignore(self) -> None:
        """Ignore the signals until the process has ended. A handler in Python would not do: the interpreter takes it
        away when it shuts down, and a launcher's second signal would end the process with another status."""
        self._replace(signal.SIG_IGN)

    def _replace(self, handler: signal.Handlers) -> None:
        if _in_main_thread():
            for number in self._mine:
                if signal.getsignal(number) is self:
                    signal.signal(number, handler)


class ShelteredWorker:
    """`worker_init_fn` of a DataLoader whose workers outlive `signals`, which launchers send to a whole group of
    processes; without them, what ends the run well would fail. Those of the worker's parent end it, as ever.

    Args:
        then: the `worker_init_fn` that there was.
    """

    def __init__(self, signals: Iterable[signal.Signals], then: Callable[[int], object] | None) -> None:
        self._signals = frozenset(signals)
        self._then = then

    def __call__(self, worker: int) -> None:
        # A handler of Python's does not learn who has sent the signal; a thread that waits for it does.
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        threading.Thread(target=self._wait, args=(os.getppid(),), daemon=True).start()
        if self._then is not None:
            self._then(worker)

    def _wait(self, parent: int) -> None:
        while signal.sigwaitinfo(self._signals).si_pid != parent:
            pass
        os._exit(0)


def _is_free(number: signal.Signals) -> bool:
    """Whether nobody handles the signal, in Python or, where /proc says so, in C (faulthandler)."""
    if not _in_main_thread() or signal.getsignal(number) is not signal.SIG_DFL:
        return False
    with contextlib.suppress(OSError, StopIteration):
        with open("/proc/self/status") as status:
            caught = next(line for line in status if line.startswith("SigCgt:"))
        return not int(caught.split()[1], 16) >> (number - 1) & 1
    return True


@contextlib.contextmanager
def sigterm_held() -> Iterator[Callable[[], bool]]:
    """SIGTERM does not end the process within the block; yields a function that says whether it came.

    Does nothing where the user handles SIGTERM, or in another thread than the main one. The place of `StopSignals` is
    taken for good: a run that has failed does not save any more.
    """
    came: list[int] = []
    handler = signal.getsignal(signal.SIGTERM)
    mine = _in_main_thread() and (handler is signal.SIG_DFL or isinstance(handler, StopSignals))
    if mine:
        signal.signal(signal.SIGTERM, lambda number, frame: came.append(number))
    earlier = handler.came if isinstance(handler, StopSignals) else []
    try:
        yield lambda: bool(came) or "SIGTERM" in earlier
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
