"""Automatic checkpoints: periodic, and on preemption."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..config.automatic import AutomaticConfig
from ..data.sharding import ShardedLoader
from ..errors import CheckpointError, Preempted
from ..log import get_logger
from ..loop.parts import EngineHook, EngineParts
from ..parallel.context import ParallelContext
from ..parallel.objects import is_alone
from . import storage
from .collective import run_on_rank_zero

if TYPE_CHECKING:
    from ..config import Config
    from .checkpointer import Checkpointer

_log = get_logger(__name__)


class PreemptionHook(EngineHook):
    """Saves at the boundaries of its optimizer steps.

    A boundary is the first of these after a step: the loop asks `engine.dataloader` for its next batch, or, where that
    is not in use, begins a forward for training; or it closes the engine. By then the loop is through with what it does
    after a step (a scheduler of its own, an average of weights), and has drawn nothing for the next one. A loop that
    asks for its next batch between backward and step passes it at the forward for that batch.

    In evaluation there is none: the loop is not through with the step then. All ranks pass the same boundaries. At each
    they begin to tell each other, over gloo, whether a signal has come to any of them, and read the answer at the next
    one: so nobody waits, and all of them save there.
    """

    def __init__(self, parts: EngineParts, checkpointer: Checkpointer, options: AutomaticConfig) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._options = options
        self._directory = folder_of(options)
        self._step = self._tried = parts.global_step
        self._ended = self._locked = False
        self._handled = sys.exception()
        self._several = parts.context.size > 1 and not is_alone()  # a dry run is alone
        self._group = parts.context.host_group if self._several else None
        self._flag: tuple[dist.Work, torch.Tensor] | None = None
        self._signals = StopSignals(options.signals)
        for loader in (parts.dataloader, parts.eval_dataloader):
            if loader is not None:
                shelter_workers(loader.loader, self._signals.handled)
        if self._signals.others:
            _log.warning(
                "checkpoint.signals: %s: handled already (or this is not the main thread), which is left as it is; "
                "call engine.preempt() from that handler, or leave the signal out",
                ", ".join(self._signals.others),
                ranks=None,
            )

    def ask(self) -> None:
        """The run is to end, as if a signal had come. May be called by a handler of signals."""
        self._signals.came.append("engine.preempt()")

    def forget(self) -> None:
        """What comes next is not a boundary: the state was loaded."""
        self._read_flag()
        self._step = self._tried = self._parts.global_step

    def before_fetch(self) -> None:
        """The loop asks for a batch."""
        self._handled = sys.exception()
        if torch.is_grad_enabled():
            self._pass_boundary()

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The loop calls the engine."""
        parts = self._parts
        self._handled = sys.exception()
        if parts.model.training and torch.is_grad_enabled():
            loader = parts.dataloader
            if loader is None or not loader.runs or loader.is_untouched:
                self._pass_boundary()

    def close(self, error: BaseException | None) -> None:
        """The loop is over. With an error in flight nothing is saved: other ranks may be elsewhere. One that is handled
        now, but was not when the loop went on, counts, too."""
        try:
            handled = sys.exception()
            if error is None and not self._ended and (handled is None or handled is self._handled):
                self._end_together()
        finally:  # signals are as they were, unless they are ignored because one ends the process
            self._handled = None
            self._signals.remove()
            self._checkpointer.preemption = None

    def _pass_boundary(self) -> None:
        parts, before = self._parts, self._step
        if not self._locked:  # not earlier: an evaluation beside the run that trains saves nothing
            what = f"checkpoint.directory={self._options.directory!r}"
            run_on_rank_zero(parts.context, what, lambda: self._checkpointer.locks.take(self._directory))
            self._locked = True
        step = parts.global_step
        if step == before or parts.accumulation.holds_gradients or parts.accumulation.averaged:
            return
        self._step = step
        if self._is_due():
            came = parts.context.everyone(list(self._signals.came))
            place = self._save_last(_say_where(came), f", and ends with status {Preempted().code}")
            self._ended = True
            self._signals.ignore()
            raise Preempted(place)
        self._save_if_due(before)

    def _is_due(self) -> bool:
        """Whether a signal had come to some rank by the boundary before; to the only one, by this one."""
        if not self._several:
            return bool(self._signals.came)
        due = self._read_flag()
        if not due:
            flag = torch.tensor(int(bool(self._signals.came)))
            work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
            assert work is not None
            self._flag = work, flag
        return due

    def _read_flag(self) -> bool:
        """What the ranks have told each other since the last boundary, if they have."""
        pending, self._flag = self._flag, None
        if pending is None:
            return False
        pending[0].wait()
        return bool(pending[1].item())

    def _end_together(self) -> None:
        """All ranks close: what came to any of them after the last boundaries counts as well."""
        parts, before = self._parts, self._step
        self._read_flag()
        told = parts.context.everyone((list(self._signals.came), parts.accumulation.holds_gradients))
        reason = _say_where([came for came, _ in told])
        if any(holds for _, holds in told):
            if reason:
                _log.warning("told to end (%s), but not saved: gradients are left that no step has used", reason)
        elif reason and parts.global_step != self._tried:
            self._save_last(reason)
        else:
            self._save_if_due(before)
        if reason:
            _log.info("stop signal arrived after training; exiting normally")

    def _save_if_due(self, before: int) -> None:
        """With `every`: the last save was decided on after step `before`."""
        step, every = self._parts.global_step, self._options.every
        if every is not None and step // every > before // every:
            self._tried = step
            self._save(self._options.in_background)

    def _save_last(self, reason: str, then: str = "") -> Path:
        self._tried = self._parts.global_step
        with contextlib.suppress(CheckpointError):  # it was logged; this one may do better
            self._checkpointer.wait()
        place = self._save()
        _log.info("told to end (%s): saved to %s%s", reason, place, then)
        return place

    def _save(self, in_background: bool = False) -> Path:
        self._parts.before_call("engine.save()")
        return self._checkpointer.save(self._directory, self._options.keep, in_background)


def _say_where(came: Sequence[Sequence[str]]) -> str:
    """What came, and to which ranks; `came` is what came to each."""
    where: dict[str, list[int]] = {}
    for rank, names in enumerate(came):
        for name in dict.fromkeys(names):
            where.setdefault(name, []).append(rank)
    if len(came) == 1:
        return ", ".join(where)
    return "; ".join(f"{name} on rank {', '.join(map(str, ranks))}" for name, ranks in where.items())


# -- what the config says ----------------------------------------------------------------------------------------------


def folder_of(options: AutomaticConfig) -> Path:
    """`checkpoint.directory`, wherever the program goes later."""
    return Path(options.directory).expanduser().absolute()


def make_folder(options: AutomaticConfig, context: ParallelContext) -> None:
    """Make `checkpoint.directory`, so that a run does not learn after hours that it cannot. All ranks together.

    Raises:
        CheckpointError: it cannot be made, or not written to.
    """
    folder = folder_of(options)

    def make() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise CheckpointError(f"{folder} cannot be written to; give another folder, or change its permissions")

    run_on_rank_zero(context, f"checkpoint.directory={options.directory!r}", make)


def find_resumed(config: Config, context: ParallelContext) -> Path | None:
    """What the config's `resume` says to load, None if there is nothing yet. All ranks together.

    Raises:
        CheckpointError, InputError: as `engine.load`; or some ranks do not see the folder that others see.
    """
    path, options = config.resume, config.checkpoint
    if path is None:
        return None
    if path != "auto" or options is None:
        return Path(path).expanduser()
    folder = folder_of(options)
    if storage.holds_any(folder, context):
        return folder
    _log.info("resume='auto': there is no checkpoint in %s yet, and training begins anew", folder)
    return None


# -- signals -----------------------------------------------------------------------------------------------------------


class StopSignals:
    """Handlers of signals that tell a run to end: they note that the signal came, and do nothing else.

    A handler runs between any two instructions of the main thread, so it takes no lock and talks to nobody. Where the
    user, or a library, handles a signal already, that stays; `others` names these signals. `remove` puts back what was
    there before.

    Attributes:
        came: names of what came, in order; append to it to say the same in another way.
        handled: the signals that are handled here.
        others: the names of those that are not.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self.came: list[str] = []
        self.others: list[str] = []
        self.handled: list[signal.Signals] = []
        for name in names:
            if _is_free(signal.Signals[name]):
                signal.signal(signal.Signals[name], self)
                self.handled.append(signal.Signals[name])
            else:
                self.others.append(name)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.came.append(signal.Signals(number).name)

    def remove(self) -> None:
        """Restore what was there before, where nobody has taken this one's place."""
        self._replace(signal.SIG_DFL)

    def ignore(self) -> None:
        """Ignore the signals until the process has ended. A handler in Python would not do: the interpreter takes it
        away when it shuts down, and a launcher's second signal would end the process with another status."""
        self._replace(signal.SIG_IGN)

    def _replace(self, handler: signal.Handlers) -> None:
        if _in_main_thread():
            for number in self.handled:
                if signal.getsignal(number) is self:
                    signal.signal(number, handler)


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


def shelter_workers(sharded: ShardedLoader, signals: Iterable[signal.Signals]) -> None:
    """Let workers outlive `signals`: torchrun and SLURM send them to a whole group of processes, and a DataLoader that
    has lost a worker raises an error."""
    loader = sharded.loader
    if signals and loader.num_workers:
        loader.worker_init_fn = ShelteredWorker(signals, loader.worker_init_fn)


class ShelteredWorker:
    """`worker_init_fn` of a DataLoader whose workers outlive `signals`. Those of the worker's parent end it, as ever.

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
