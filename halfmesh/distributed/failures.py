"""Ends all ranks within seconds when one fails. Each rank names the first that failed, with its error.

This uses no collective and does not depend on the wording of torch's errors. Ranks write to the store of the launch how
they ended, in one word: "failed", "lost" (an error that may only say that another rank is gone) or "ended". A thread of
each other rank reads it, answers "running", and ends a process that waits for its device and so gets no error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from ..errors import HalfmeshError, cut
from .env import RankNames, ranks_by_value

POLL_S = 1.0  # how often the thread of each rank looks at the store
ANSWER_S = 3.0  # how long the others may take to answer a failure
GRACE_S = 5.0  # how long a rank may take to exit on its own after another one has failed
LINGER_S = 2.0  # how long the rank that hosts the store stays for the others to read it
EXIT_LIMIT_S = 8  # how long the end of a failed process may take: destructors of a broken process group may block
DUMP_AT = 0.9  # part of the time limit without an update after which a rank writes its stacks: before torch ends it


class FailureWatch:
    """Thread, and after `install` exception hook, of one of several ranks; `remove()` ends both.

    Args:
        store: where the ranks met.
        host: the rank whose process hosts the store; None if the launcher does.
        timeout_s: the time limit of collectives.
    """

    def __init__(self, store: dist.Store, rank: int, names: RankNames, host: int | None, timeout_s: float) -> None:
        # torchrun's store may have the words of an earlier start of the same ranks.
        starts = store.add("halfmesh/starts", 1)
        run = (starts - 1) // names.world_size
        # Not in `run`'s part: if a rank of an earlier start has ended before it counted, none is the last of this one.
        # Then no rank waits, as without a meeting.
        self._meeting, self._is_last = dist.PrefixStore("halfmesh", store), starts >= names.world_size
        # A second connection, because the first may be blocked in a wait. (The stubs know no `append`.)
        self._store = cast(Any, dist.PrefixStore(f"halfmesh/{run}", store.clone()))
        self._store.set_timeout(timedelta(seconds=ANSWER_S))
        for key in ("log", "failed", "lost"):
            self._store.append(key, "")
        self._rank, self._name, self._names = rank, names.name(rank), names
        self._host, self._timeout_s, self._store_is_gone = host, timeout_s, False
        self._in_call = threading.Lock()
        self._told: dict[int, str] = {}  # the last word that each rank has sent
        self._calls: dict[int, str] = {}  # how often it had called its engines then
        self._failed = self._lost = ""  # the first error of each kind
        self._engines: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._ending = threading.Event()  # this rank is exiting on its own
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        # Processes of multiprocessing call this, and nothing that is registered with atexit.
        self._at_exit = multiprocessing.util.Finalize(None, self._on_exit, exitpriority=0)
        self._thread = threading.Thread(target=self._watch, daemon=True, name="halfmesh failure watch")
        self._thread.start()

    def meet(self) -> None:
        """Wait, for the time limit at most, until all ranks have a watch, and so learn of a failure from now on."""
        if self._is_last:
            self._meeting.set("all here", "")
        self._meeting.wait(["all here"], timedelta(seconds=self._timeout_s))

    def give_up(self, error: BaseException) -> None:
        """Tell the others that `error` keeps this rank from a process group, and `remove` this watch: a caller may
        catch it. If it may come from another rank's, it gets that as a note."""
        self._tell(error)
        self.remove()

    def install(self) -> None:
        """Report errors that nothing catches. Call it after `init_process_group`, which installs torch's hook."""
        self._previous_hook, sys.excepthook = sys.excepthook, self._on_error

    def watch(self, engine: Any, progress: Any) -> None:
        """Write this rank's stacks when `engine` makes no update for `DUMP_AT` of the time limit, while it trains; its
        `progress` has `global_step`, and the `calls` since that."""
        self._engines = weakref.WeakKeyDictionary({**self._engines, engine: progress})  # the thread goes through it

    def remove(self) -> None:
        """Stop: this rank does not need the others any more. A hook that was installed on top of this one stays."""
        self._end("ended")
        if self._host != self._rank and not self._thread.is_alive():  # nothing is left to do at exit
            self._at_exit.cancel()  # which would keep this, and its connection
        if sys.excepthook == self._on_error:
            sys.excepthook = self._previous_hook

    def told(self) -> dict[int, str]:
        """The last word that each other rank has sent: "failed", "lost", "ended" without an error, "late" (for long no
        update here or elsewhere), or "running", in answer to a failure."""
        self._exchange()
        return {rank: word for rank, word in self._told.items() if rank != self._rank}

    def _exchange(self, word: str = "", error: str = "") -> None:
        """Send this rank's `word` to the others, and `error` if it is the first, and read theirs."""
        if self._store_is_gone:  # torch would print a stack of its C++ code each time
            return
        if not self._in_call.acquire(timeout=ANSWER_S):  # of a host without power or network; torch's call stays there
            self._store_is_gone = True
            return
        try:
            if error:
                self._store.compare_set(word, "", error)
            if word:
                self._store.append("log", f"{self._rank} {word} {self._count_calls()}\n")
            log, self._failed, self._lost = map(bytes.decode, self._store.multi_get(["log", "failed", "lost"]))
            lines = [line.split(" ", 2) for line in log.splitlines()]
            self._told = {int(rank): theirs for rank, theirs, _ in lines}
            self._calls = {int(rank): calls for rank, _, calls in lines}
        except Exception:
            self._store_is_gone = True
        finally:
            self._in_call.release()

    def _count_calls(self) -> str:
        return ", ".join(f"{each.calls} since update {each.global_step}" for each in list(self._engines.values()))

    def _end(self, word: str, error: str = "") -> None:
        if not self._ending.is_set():
            self._ending.set()
            self._exchange(word, error)
        self._thread.join(POLL_S)  # one that comes back from C++ while the interpreter shuts down aborts the process

    def _wait_for_others(self, seconds: float, or_failure: bool) -> None:
        """Until all have ended, or (`or_failure`) one has failed by itself."""
        until, pause = time.monotonic() + seconds, max(0.05, self._names.world_size / 500)  # one store answers all
        while time.monotonic() < until and not (or_failure and self._failed) and not self._store_is_gone:
            if sum(word not in ("late", "running") for word in self.told().values()) == self._names.world_size - 1:
                break
            time.sleep(pause)

    def _on_exit(self) -> None:
        self._end("ended")
        if self._host == self._rank:
            self._wait_for_others(LINGER_S, or_failure=False)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._pid or self._ending.is_set():  # a forked child is no rank
            self._previous_hook(kind, error, trace)
            return
        is_lost = may_be_of_peer(error)
        self._exchange()
        if is_lost and self._failed:
            self._say(f"ended at {_in_one_line(error)}")
        elif not self._rank or kind is not KeyboardInterrupt:  # of Ctrl-C, which all get, one traceback does
            self._previous_hook(kind, error, trace)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel's: at shutdown no Python code runs
        signal.alarm(EXIT_LIMIT_S)
        until = time.monotonic() + ANSWER_S
        self._tell(error)
        if is_lost and "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun shows any of the errors it finds together
            time.sleep(max(0.0, until - time.monotonic()))
        try:
            raise error  # the handler formats the exception in flight
        except BaseException:
            get_error_handler().record_exception(error)

    def _tell(self, error: BaseException) -> None:
        """End with `error`. One that may be of a peer gets a note with the first error."""
        is_lost = may_be_of_peer(error)
        self._end("lost" if is_lost else "failed", f"{self._name} at {_in_one_line(error)}")
        if is_lost:
            self._wait_for_others(ANSWER_S, or_failure=True)
            error.add_note(f"[{self._name}] {self._say(self._report())}")

    def _report(self) -> str:
        """The first error, and the ranks that may be the reason for it."""
        told, names, found = self._told, self._names, list[str]()
        if self._store_is_gone and not self._failed:
            agent = f"the launcher on {os.environ.get('MASTER_ADDR')}"
            found = [f"no answer from {agent if self._host is None else names.name(self._host)}, which hosts the store"]
        elif not self._failed:
            others = [rank for rank in range(names.world_size) if rank != self._rank]
            for word, text in {
                "late": "no answer from {} (killed, out of memory, or stopped?)",
                "running": "still running: {}",
                "ended": "ended without an error: {}",
            }.items():
                if ranks := [rank for rank in others if told.get(rank, "late") == word]:
                    found.append(text.format(names.names(ranks)))
            if len(calls := ranks_by_value({rank: text for rank, text in sorted(self._calls.items()) if text})) > 1:
                counts = "; ".join(f"{names.names(ranks)}: {text}" for text, ranks in calls.items())
                found.append(f"calls of engine(...): {counts} (under fsdp and expert all data ranks need as many)")
        if first := self._failed or self._lost:
            found.append(f"the first error was of {first}")
        return "; ".join(found)

    def _watch(self) -> None:
        steps, since = list[int](), time.monotonic()
        while not self._ending.wait(POLL_S):
            told = set(self.told().values())
            if {"failed", "lost"} & told:
                break
            if self._store_is_gone:
                if self._host is None or self._told.get(self._host) == "ended":
                    return
                break
            # The engines get no name here, which would keep them until the next pass, and so for ever.
            training = [each.global_step for engine, each in list(self._engines.items()) if engine.model.training]
            limit = DUMP_AT * self._timeout_s
            if training != steps or not training:
                steps, since = training, time.monotonic()
            is_late = time.monotonic() > since + limit
            if is_late or ("late" in told and self._rank not in self._told):  # for another rank, also in evaluation
                why = f"no update for {limit:g} s, {DUMP_AT:g} x the config key timeout"
                calls = f"calls of engine(...): {self._count_calls()}"
                self._dump(f"{why if is_late else f'another rank has made {why}'}; {calls}")
                self._exchange("late")
                since = float("inf")
        self._exchange("" if self._ending.is_set() else "running")
        for _ in range(int(GRACE_S / POLL_S)):
            if self._ending.wait(POLL_S):
                return
            self._exchange()  # as long as the store is there
        late = f"ended, because another rank failed and this one was still running after {GRACE_S:g} s"
        self._dump(f"{late}; {self._report()}")
        os._exit(1)

    def _say(self, text: str) -> str:
        sys.stderr.write(f"[{self._name}] {text}\n")  # in one go: other ranks also write
        sys.stderr.flush()
        return text

    def _dump(self, why: str) -> None:
        sys.stdout.flush()
        self._say(f"{why}\nThis rank is at:")
        faulthandler.dump_traceback(file=2)


def _in_one_line(error: BaseException) -> str:
    frames, text = traceback.extract_tb(error.__traceback__), cut(" ".join(str(error).split()), 2000)
    place = f"{frames[0].filename}:{frames[0].lineno}, " if frames else ""
    return f"{place}{type(error).__name__}: {text}"


def may_be_of_peer(error: BaseException) -> bool:
    """Return True if `error` is of a kind that torch raises where another rank is gone or late, or explains one."""
    if isinstance(error, HalfmeshError):
        return error.__cause__ is not None and may_be_of_peer(error.__cause__)
    return isinstance(error, (RuntimeError, OSError))


@contextlib.contextmanager
def recorded_for_torchrun() -> Iterator[None]:
    """Errors in this block are shown in torchrun's closing summary, also before there is a `FailureWatch`. Before there
    is a process group, all ranks reject the same: then only the first rank of a node prints the traceback."""
    try:
        yield
    except Exception as error:
        is_of_all, trace = isinstance(error, HalfmeshError) and not dist.is_initialized(), error.__traceback__
        if is_of_all:
            error.__traceback__ = None  # the handler formats what is there
        if not may_be_of_peer(error):
            get_error_handler().record_exception(error)
        error.__traceback__ = trace
        if is_of_all and os.environ.get("LOCAL_RANK", "0") != "0":
            _print_in_one_line(error)
        raise


def _print_in_one_line(error: Exception) -> None:
    """Print `error` in one line if nothing catches it."""
    known, before = weakref.ref(error), sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is known():
            sys.stderr.write(f"[rank {os.environ.get('RANK')}] ended at {_in_one_line(raised)}\n")
        else:
            before(kind, raised, trace)

    sys.excepthook = hook
