"""Signals that tell a run to end: handlers that note them, and workers of a dataloader that outlive them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterable
from types import FrameType


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


def _in_main_thread() -> bool:
    """Python allows handlers nowhere else."""
    return threading.current_thread() is threading.main_thread()
