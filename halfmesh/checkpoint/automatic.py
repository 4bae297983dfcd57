"""Saves that nobody calls: every so many steps, and when the run is told to end."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..config.automatic import AutomaticConfig
from ..engine.parts import EngineHook, EngineParts
from ..errors import CheckpointError, Preempted
from ..launching.signals import StopSignals
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import finding
from .preemption import Preemption, say_where
from .together import on_first
from .workers import shelter_workers

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

    In evaluation there is none: the loop is not through with the step then. All ranks pass the same boundaries, so what
    depends on their numbers alone is done by all ranks.
    """

    def __init__(self, parts: EngineParts, checkpointer: Checkpointer, options: AutomaticConfig) -> None:
        self._parts = parts
        self._checkpointer = checkpointer
        self._options = options
        self._directory = folder_of(options)
        self._step = self._tried = parts.global_step
        self._ended = self._locked = False
        self._handled = sys.exception()
        self._signals = StopSignals(options.signals)
        self._preemption = Preemption(parts.context, self._signals.came)
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
                if self._signals.came:
                    _log.info("told to end, but training is over: the program goes on to its end", ranks=None)
        finally:
            self.stop()

    def stop(self) -> None:
        """Nothing more is saved. Signals are as they were, unless they are ignored because one ends the process."""
        self._preemption.stop()
        self._handled = None
        self._signals.remove()
        self._checkpointer.preemption = None

    def _pass_boundary(self) -> None:
        parts, before = self._parts, self._step
        if not self._locked:  # not earlier: an evaluation beside the run that trains saves nothing
            what = f"checkpoint.directory={self._options.directory!r}"
            on_first(parts.context, what, lambda: self._checkpointer.locks.take(self._directory))
            self._locked = True
        step = parts.global_step
        if step == before or parts.accumulation.holds_gradients or parts.accumulation.averaged:
            return
        self._step = step
        if self._preemption.is_due(step - before):
            place = self._save_last(self._preemption.reason, f", and ends with status {Preempted().code}")
            self._ended = True
            self._signals.ignore()
            raise Preempted(place)
        self._save_if_due(before)

    def _end_together(self) -> None:
        """All ranks close: what came to any of them, and was not agreed on in time, counts as well."""
        parts, before = self._parts, self._step
        told = parts.context.everyone((list(self._signals.came), parts.accumulation.holds_gradients))
        reason = say_where([came for came, _ in told])
        if any(holds for _, holds in told):
            if reason:
                _log.warning("told to end (%s), but not saved: gradients are left that no step has used", reason)
        elif reason and parts.global_step != self._tried:
            self._save_last(reason)
        else:
            self._save_if_due(before)

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
        self._preemption.stop()
        _log.info("told to end (%s): saved to %s%s", reason, place, then)
        return place

    def _save(self, in_background: bool = False) -> Path:
        self._parts.before_call("engine.save()")
        return self._checkpointer.save(self._directory, self._options.keep, in_background)


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

    on_first(context, f"checkpoint.directory={options.directory!r}", make)


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
    if finding.holds_any(folder, context):
        return folder
    _log.info("resume='auto': there is no checkpoint in %s yet, and training begins anew", folder)
    return None
