"""Saves automatic checkpoints: every N steps, and on preemption."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config.schema import CheckpointConfig
from ..errors import CheckpointError, Interrupted, Preempted
from ..parallel.comm import is_simulated, own_store
from ..parallel.mesh import ParallelContext
from ..utils.engine_hook import EngineHook, Progress
from ..utils.log import get_logger
from . import storage
from .agreement import StopAgreement, run_on_rank_zero

if TYPE_CHECKING:
    from ..config import Config
    from ..data.loader import EngineDataLoader
    from .checkpointer import Checkpointer

_log = get_logger(__name__)

AGAIN_S = 1.0
"""Seconds within which a second SIGINT is the same Ctrl-C: the terminal and the launcher both send it."""


@dataclass(eq=False, repr=False)
class PreemptionHook(EngineHook):
    """Saves at step boundaries: periodically, and when a signal ends the run.

    The boundary of a step is the first of these after it: the loop asks `engine.dataloader` for its next batch; without
    that loader (or before its first batch), the next forward in training; or `engine.close`. By then the loop has done
    all work that follows a step (scheduler, averaged weights), and has drawn nothing for the next one. There is no
    boundary while gradients are pending, nor in evaluation, before which the loop may not have finished the step; nor
    while a data strategy's ranks have diverged.

    All ranks pass the same boundaries. One that has received a signal asks the others at its next one, and all of them
    save at the same one: see `StopAgreement`.

    Args:
        is_between_steps: returns True if the weights are those of training and no gradients are pending.
        loaders: the loaders of training and of evaluation.
    """

    options: CheckpointConfig
    model: nn.Module
    context: ParallelContext
    progress: Progress
    is_between_steps: Callable[[], bool]
    loaders: Sequence[EngineDataLoader | None]
    checkpointer: Checkpointer

    def __post_init__(self) -> None:
        self._directory = folder_of(self.options)
        self._step = self._saved = self.progress.global_step
        self._prepared = False
        self._handled = sys.exception()  # the engine may be made and used in an `except` block
        self._agreement: StopAgreement | None = None
        if self.context.size > 1 and not is_simulated():
            store, blocked = own_store(self.context, connections=2)
            timeout_s = self.checkpointer.config.timeout
            self._agreement = StopAgreement(store, blocked, self.context.rank, self.context.size, timeout_s)
            self._end_agreement = Finalize(self, self._agreement.close, exitpriority=1)  # if nobody closes the engine
        self._received: list[str] = []  # the requests to end the run, in order
        names = self.options.signals if hasattr(sys, "ps1") else (*self.options.signals, "SIGINT")  # not interactively
        found = {name: find_handler(signal.Signals[name]) for name in names}
        self._handlers = list(filter(None, found.values()))
        for handler in self._handlers:
            handler.listeners.add(self)
        for sharded in self.loaders:
            loader = None if sharded is None else sharded.loader.loader
            if loader is not None and loader.num_workers and self._handlers:
                handled = frozenset(handler.number for handler in self._handlers)
                loader.worker_init_fn = partial(worker_ignoring_signals, handled, loader.worker_init_fn)
        if others := [name for name in self.options.signals if found[name] is None]:
            why = "it already has a handler (or this is not the main thread); call engine.preempt() from that handler"
            _log.warning("checkpoint.signals: %s: %s", ", ".join(others), why, ranks=None)

    def request_stop(self, why: str = "engine.preempt()") -> bool:
        """End the run, because of `why`. May be called by a signal handler. Returns True at the first call."""
        if why in self._received:
            return False
        self._received.append(why)
        if why == "SIGINT" and self.context.rank == 0:
            os.write(2, b"\nCtrl-C: training ends after this update, and is saved; press it again to end at once\n")
        return True

    def after_load(self) -> None:
        """Note that a checkpoint was loaded: the next event is not a step boundary."""
        self._step = self._saved = self.progress.global_step

    def before_fetch(self) -> None:
        """Called when the loop asks for a batch."""
        if torch.is_grad_enabled():
            self._pass_boundary()

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when the loop calls the model."""
        loader = self.loaders[0]
        is_next = loader is None or not loader.runs or loader.is_untouched
        if is_next and self.model.training and torch.is_grad_enabled():
            self._pass_boundary()

    def close(self, error: BaseException | None) -> None:
        """Save, if requested, at the end of the loop. After an error nothing is saved, because other ranks may be at
        another step; nor in `finally: engine.close()` or `except:` while an exception is handled."""
        try:
            if error is None and sys.exception() in (None, self._handled):
                self._end()
        finally:
            self._handled = None
            for handler in self._handlers:
                handler.listeners.discard(self)
                if not handler.listeners:
                    handler.give_way(handler.before)
            if self._agreement is not None:
                self._end_agreement()

    def _pass_boundary(self) -> None:
        step, before = self.progress.global_step, self._step
        if step == before or not self.is_between_steps():
            return
        if self._diverged:  # nothing can be saved: the next boundary also counts for this one
            if self._received and self._agreement is not None:
                self._agreement.ask()
            return
        self._step = step
        if not self._prepared:  # what would fail at the end is reported now
            what = f"checkpoint.directory={self.options.directory!r}"
            run_on_rank_zero(self.context, what, lambda: storage.lock(self._directory, self.checkpointer.locks))
            self.checkpointer.reject_unsavable()
            self._prepared = True
        asks = bool(self._received)
        if not (asks if self._agreement is None else self._agreement.pass_boundary(asks)):
            if self._is_due(before):
                self._save(self.options.in_background)
            return
        reason, folder = self._reason(), self._save_last()
        text = "interrupted by %s: saved update %d in %s; to resume, run it again with resume='auto'"
        _log.info(text, reason, step, folder)
        for handler in self._handlers:
            # Python removes its own handlers when it shuts down, and a second signal would change the status.
            if handler.number is not signal.SIGINT:
                handler.give_way(signal.SIG_IGN)
        raise (Interrupted if reason == "SIGINT" else Preempted)(folder)

    @property
    def _diverged(self) -> str:
        """The reason why the ranks' weights differ between steps, as in a round of local updates. Else ""."""
        return self.checkpointer.state.parallel_model.data.diverged

    def _reason(self) -> str:
        """The requests to end the run, on any rank, in words."""
        return ", ".join(dict.fromkeys(name for names in self.context.everyone(self._received) for name in names))

    def _end(self) -> None:
        """End on all ranks. A signal that came after the last boundary also counts."""
        reason, step = self._reason(), self.progress.global_step
        problem = self._diverged
        if not all(self.context.everyone(self.is_between_steps())):
            problem = "in the middle of an accumulation cycle"
        if problem:
            if reason or self._is_due(self._step):
                _log.warning("the run ends%s: no checkpoint written: %s", reason and f" ({reason})", problem)
        elif reason and step != self._saved:
            _log.info("stop signal (%s) after training: saved update %d in %s", reason, step, self._save_last())
        elif self._is_due(self._step):
            self._save(self.options.in_background)
        elif step not in (self._saved, self.checkpointer.saved):
            text = "the run ended at update %d without saving it; to keep it, call engine.save(%r) before it ends"
            _log.info(text, step, self.options.directory)

    def _is_due(self, before: int) -> bool:
        """True if a multiple of `every` lies after step `before`."""
        every = self.options.every
        return every is not None and self.progress.global_step // every > before // every

    def _save_last(self) -> Path:
        with contextlib.suppress(CheckpointError):  # it was logged; this one may do better
            self.checkpointer.wait()
        return self._save()

    def _save(self, in_background: bool = False) -> Path:
        self._saved = self.progress.global_step
        self.context.agree_on_call("engine.save")
        return self.checkpointer.save(self._directory, self.options.keep, in_background)


# -- config keys -------------------------------------------------------------------------------------------------------


def folder_of(options: CheckpointConfig) -> Path:
    """`checkpoint.directory`, also when the program changes its working directory later."""
    return Path(options.directory).expanduser().absolute()


def find_resumed(config: Config, context: ParallelContext) -> Path | None:
    """The checkpoint to load by the config key `resume`; None: there is none yet. All ranks together."""
    path, options = config.resume, config.checkpoint
    if path is None:
        return None
    if path != "auto" or options is None:
        return Path(path).expanduser()
    directory = folder_of(options)
    if run_on_rank_zero(context, "resume='auto'", lambda: directory.is_dir() and bool(storage.checkpoints(directory))):
        return directory
    _log.info("resume='auto': there is no checkpoint in %s yet; training starts from scratch", directory)
    return None


# -- signals -----------------------------------------------------------------------------------------------------------


class StopHandler:
    """Handler of a signal that ends a run. It only notifies the engines that listen: a handler runs between any two
    instructions of the main thread, so it takes no lock and does not communicate.

    If none listens any more, and at a second Ctrl-C, the handler `before` it runs instead.

    Attributes:
        listeners: the hooks of engines that are neither closed nor garbage-collected.
    """

    def __init__(self, number: signal.Signals, before: Any) -> None:
        self.number, self.before = number, before
        self.listeners: weakref.WeakSet[PreemptionHook] = weakref.WeakSet()
        self._process = os.getpid()
        self._again_at = 0.0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        listeners = self.listeners if os.getpid() == self._process else ()  # not in a forked process
        asked, now = [listener.request_stop(self.number.name) for listener in listeners], time.monotonic()
        if any(asked):
            self._again_at = now + (AGAIN_S if "LOCAL_RANK" in os.environ else 0)
        elif not asked or (self.number is signal.SIGINT and now > self._again_at):
            signal.signal(number, self.before)
            signal.raise_signal(number)

    def give_way(self, other: Any) -> None:
        """Make `other` the signal's handler, unless this is not the handler any more, or cannot be replaced here."""
        present: object = signal.getsignal(self.number)
        if present is self and _in_main_thread():
            signal.signal(self.number, other)


def find_handler(number: signal.Signals) -> StopHandler | None:
    """The handler of the signal, which may be that of an earlier engine. None: the user or a library has set one, which
    stays; or this is not the main thread, outside of which Python allows none."""
    if not _in_main_thread():
        return None
    present: Any = signal.getsignal(number)
    if present in ([signal.default_int_handler] if number is signal.SIGINT else [signal.SIG_DFL, signal.SIG_IGN]):
        present = StopHandler(number, present)
        signal.signal(number, present)
    return present if isinstance(present, StopHandler) else None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def worker_ignoring_signals(signals: frozenset[int], then: Callable[[int], object] | None, worker: int) -> None:
    """`worker_init_fn` of a DataLoader whose workers outlive `signals`, unless their parent sends them: torchrun and
    SLURM send signals to a whole process group, and a DataLoader that loses a worker raises an error.

    Args:
        then: the user's `worker_init_fn`.
    """
    # A handler in Python does not get the sender of the signal; a thread that waits for it does.
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    parent = os.getppid()

    def end_with_parent() -> None:
        while signal.sigwaitinfo(signals).si_pid != parent:
            pass
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if then is not None:
        then(worker)
