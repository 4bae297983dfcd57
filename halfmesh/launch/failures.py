"""When a rank fails, all end within seconds, and all say which rank was the first, and why.

Measured with gloo: when a process ends, its peers get "Connection closed by peer" at once, and when it hangs, they get
"Timed out waiting" after the time limit. Neither may be taken for the reason. `FailureGuard` finds it, in the process
that it is installed in. It is an exception hook: NCCL's watchdog ends a process from C++, without it.

A process that hangs cannot end itself. torchrun, srun and mpirun end it when another one has ended with an error.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType

from .causes import Cause, find_cause
from .end_log import End, EndLog, Ends
from .layout import Layout
from .position_report import report, waiting
from .positions import Position, Whereabouts
from .signals import end_soon, sigterm_held, watch_interrupts

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
# What it says when a peer has not come: gloo, also of collectives after the one that timed out, its TCP store, and NCCL
# under TORCH_NCCL_BLOCKING_WAIT.
TIMEOUTS = (
    "ms for recv operation to complete",
    "ms for send operation to complete",
    "application timeout caused pair closure",
    "wait timeout after",
    "collective operation timeout",
)
ANSWER_S = 2.0  # how long a rank waits for others to say where they are
GRACE_S = 3.0  # how long a rank waits for others to say how they end, and for the launcher to see the first one end
SETTLED_S = 0.2  # how long a reason has to stay the same: a better one may be on its way
SERVE_S = 1.5  # how long a failed rank that hosts the store keeps it up for the others to learn the reason
READ_S = 0.2  # and for those that have just learned that there is something to read
PARTING_S = 0.5  # the same for one that ends without an error; all ranks usually do so at the same time


class FailureGuard:
    """Exception hook and Ctrl-C watch of one rank of several; `remove()` restores what was there before.

    Args:
        log: where the ranks tell each other how they end.
        layout: to name them by.
        timeout_s: the time limit of collectives, for messages.
        whereabouts: of this rank, for the same.
    """

    def __init__(self, log: EndLog, layout: Layout, timeout_s: float, whereabouts: Whereabouts | None = None) -> None:
        self._log = log
        self._layout = layout
        self._timeout_s = timeout_s
        self._whereabouts = whereabouts
        self._name = layout.name(log.rank)
        self._active = True
        self._process = os.getpid()
        self._hook = self._on_error
        self._previous_hook = sys.excepthook
        sys.excepthook = self._hook
        self._watch = watch_interrupts(self._name)
        atexit.register(self._on_exit)

    def remove(self) -> None:
        """Put the previous hooks back. A hook that was installed on top of this one stays, and skips this one."""
        self._active = False
        self._finish()
        atexit.unregister(self._on_exit)
        if sys.excepthook == self._hook:
            sys.excepthook = self._previous_hook
        if self._watch is not None:
            self._watch.remove()

    def ended(self) -> dict[int, bool]:
        """The other ranks that are known to have ended, or to have waited in vain; False: by a failure."""
        ends = self._log.read()
        if ends is None:
            return {}
        ended = {rank: end in (End.FINISHED, End.TIMED_OUT) for rank, end in ends.of_rank.items() if end != End.RUNNING}
        ended.pop(self._log.rank, None)
        return ended | dict.fromkeys(self._log.find_killed(), False)

    def _on_exit(self) -> None:
        if os.getpid() == self._process:  # not in a fork
            self._finish()

    def _finish(self) -> None:
        ends_now = self._log.finish("" if self._whereabouts is None else self._whereabouts.ended().dump())
        if ends_now and self._log.host == self._log.rank and not self._log.await_others(PARTING_S):
            self._log.publish(find_cause(Ends({self._log.rank: End.FINISHED}), self._layout).text)
            time.sleep(READ_S)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not self._active or os.getpid() != self._process:
            self._previous_hook(kind, error, trace)
            return
        if self._whereabouts is not None:
            self._whereabouts.stop_at(error)
        with sigterm_held() as told_to_end:
            end_soon()
            if is_echo(error):
                lost = "ends because the connection to another rank was lost"
                self._find_reason(error, End.LOST, lost, told_to_end)
            elif is_timeout(error):
                waited = f"waited {self._timeout_s:g} s (config key timeout) for another rank"
                self._find_reason(error, End.TIMED_OUT, waited, told_to_end)
            else:
                self._tell_reason(error)

    def _tell_reason(self, error: BaseException) -> None:
        """This rank is the first to fail, or one of the first."""
        text = f"[{self._name}] {''.join(traceback.format_exception(error)).rstrip()}"
        if self._layout.has_places:
            error.add_note(f"raised on {self._name}")
        self._previous_hook(type(error), error, error.__traceback__)
        if isinstance(error, Exception):
            _record_for_torchrun(error)
            self._log.leave(End.FAILED, text)
        else:
            self._log.leave(End.INTERRUPTED)
        self._log.publish(self._look_around(lambda: True).text)
        self._serve()

    def _find_reason(self, error: BaseException, end: End, what: str, told_to_end: Callable[[], bool]) -> None:
        """Another rank is the first to fail: say which."""
        self._previous_hook(type(error), error, error.__traceback__)
        self._look_around(told_to_end)  # whoever is gone by now is gone for a reason of its own
        if self._whereabouts is not None:
            self._log.leave_answer(self._whereabouts.here().dump())
            if end is End.TIMED_OUT:
                self._log.ask_all()
        self._log.leave(end)
        reason = self._locate(self._await_cause(told_to_end), told_to_end)
        self._log.publish(reason)
        text = f"[{self._name}] {what}; {reason}"
        sys.stderr.write(f"{text}\n")  # in one go: other ranks write, too
        sys.stderr.flush()
        if isinstance(error, Exception) and not told_to_end():  # else its summary has an earlier one
            error.add_note(text)
            _record_for_torchrun(error)
        self._serve()

    def _locate(self, cause: Cause, told_to_end: Callable[[], bool]) -> str:
        """The reason, with where the ranks are if that tells more."""
        if self._whereabouts is None or not cause.asks:
            return cause.text
        self._log.ask_all()
        until = time.monotonic() + ANSWER_S
        while True:
            ends, answers = self._log.read(), self._log.answers()
            if ends is None:
                return cause.text
            silent = [rank for rank, end in ends.of_rank.items() if end is End.RUNNING and rank not in answers]
            if not silent or told_to_end() or time.monotonic() > until:
                break
            time.sleep(0.02)
        positions = {rank: Position.load(text) for rank, text in answers.items()}
        text = find_cause(ends, self._layout, waiting(positions)).text
        return f"{text}\n{report(positions, ends.of_rank, self._layout)}"

    def _serve(self) -> None:
        if self._log.host == self._log.rank:
            self._log.await_others(SERVE_S)
            time.sleep(READ_S)

    def _await_cause(self, told_to_end: Callable[[], bool]) -> Cause:
        """The reason, when it is certain, or the likely one after `GRACE_S`.

        Under torchrun it waits in any case until the agent has seen another rank end, and ends this one: of the errors
        that are recorded, its summary shows the first, in whole seconds.
        """
        until = time.monotonic() + GRACE_S
        pause = max(0.02, self._layout.world_size / 500)  # one store answers all ranks
        seen, since = Cause("", certain=False), 0.0
        while True:
            cause, now = self._look_around(told_to_end), time.monotonic()
            seen, since = (cause, now) if cause != seen else (seen, since)
            in_a_hurry = told_to_end() or (not _under_torchrun() and now > since + SETTLED_S)
            if now > until or (cause.certain and in_a_hurry):
                return cause
            time.sleep(pause)

    def _look_around(self, told_to_end: Callable[[], bool]) -> Cause:
        """What can be said of the reason now. Ranks that are found dead are named to all."""
        ends = self._log.read()
        killed = self._log.find_killed()
        if killed and not told_to_end():  # by then the launcher may have ended the others, too
            self._log.leave_killed(killed)
            ends = self._log.read()
        if ends is None:
            return self._published_cause()
        return find_cause(ends, self._layout)

    def _published_cause(self) -> Cause:
        """The reason as far as it was known when the store ended."""
        host = self._log.host
        if host is None:
            return Cause("the launcher is gone, too", certain=True)
        if self._log.host_is_stopped:
            said = f"{self._layout.name(host)} is stopped (SIGSTOP, or a debugger), which hosts what others would say"
            return Cause(said, certain=True)
        ended_by_itself = find_cause(Ends({host: End.KILLED}), self._layout)
        return Cause(self._log.published() or ended_by_itself.text, certain=True)


def is_echo(error: BaseException) -> bool:
    """Whether `error` only says that another rank is gone."""
    return isinstance(error, (RuntimeError, OSError)) and any(words in str(error).lower() for words in ECHOES)


def is_timeout(error: BaseException) -> bool:
    """Whether `error` only says that another rank did not come."""
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in TIMEOUTS)


@contextlib.contextmanager
def told_to_torchrun() -> Iterator[None]:
    """Errors in this block are shown in torchrun's closing summary, also before there is a guard."""
    try:
        yield
    except Exception as error:
        if not is_echo(error):
            _record_for_torchrun(error)
        raise


def _under_torchrun() -> bool:
    return "TORCHELASTIC_ERROR_FILE" in os.environ


def _record_for_torchrun(error: Exception) -> None:
    """Write the error file that torchrun shows in its closing summary, what its `record` decorator does."""
    if not _under_torchrun():
        return
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    trace = error.__traceback__
    try:
        raise error  # the handler formats the exception in flight
    except Exception:
        error.__traceback__ = trace  # without the frame of this function
        get_error_handler().record_exception(error)
