"""Saves that nobody calls: every so many steps, and when the run is told to end."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..config.automatic import AutomaticConfig
from ..errors import CheckpointError, Preempted
from ..launching.signals import StopSignals
from ..log import get_logger
from ..parallel.context import ParallelContext
from . import finding
from .preemption import Preemption, say_where
from .together import on_first
from .workers import shelter_workers

if TYPE_CHECKING:
    from ..engine.engine import Engine

_log = get_logger(__name__)


class Automatic:
    """Saves `engine` at the boundaries of its optimizer steps.

    A boundary is the first of these after a step: the loop asks `engine.dataloader` for its next batch, or, where that
    is not in use, begins a forward for training; or it closes the engine. By then the loop is through with what it does
    after a step (a scheduler of its own, an average of weights), and has drawn nothing for the next one. A loop that
    asks for its next batch between backward and step passes it at the forward for that batch.

    In evaluation there is none: the loop is not through with the step then. All ranks pass the same boundaries, so what
    depends on their numbers alone is done by all ranks.
    """

    def __init__(self, engine: Engine, options: AutomaticConfig) -> None:
        self._engine = engine
        self._options = options
        self._directory = folder_of(options)
        self._step = self._tried = engine.global_step
        self._ended = self._locked = False
        self._handled = sys.exception()
        self._signals = StopSignals(options.signals)
        self._preemption = Preemption(engine.context, self._signals.came)
        for loader in (engine._dataloader, engine._eval_dataloader):
            if loader is not None:
                loader.loader = shelter_workers(loader.loader, self._signals.handled)
        if engine._dataloader is not None:
            engine._dataloader.before_fetch = self.before_fetch
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
        self._step = self._tried = self._engine.global_step

    def before_fetch(self) -> None:
        """The loop asks for a batch."""
        self._handled = sys.exception()
        if torch.is_grad_enabled():
            self._pass_boundary()

    def before_forward(self) -> None:
        """The loop calls the engine."""
        engine = self._engine
        self._handled = sys.exception()
        if engine.model.training and torch.is_grad_enabled():
            loader = engine._dataloader
            if loader is None or not loader.runs or loader.is_untouched:
                self._pass_boundary()

    def close(self, failed: bool = False) -> None:
        """The loop is over. With an error in flight nothing is saved: other ranks may be elsewhere.

        Args:
            failed: there is one. Else it is looked for: one that is handled now, but was not when the loop went on.
        """
        try:
            error = sys.exception()
            if not failed and not self._ended and (error is None or error is self._handled):
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

    def _pass_boundary(self) -> None:
        engine, before = self._engine, self._step
        if not self._locked:  # not earlier: an evaluation beside the run that trains saves nothing
            what = f"checkpoint.directory={self._options.directory!r}"
            on_first(engine.context, what, lambda: engine._locks.take(self._directory))
            self._locked = True
        step = engine.global_step
        if step == before or engine._accumulation.holds_gradients or engine._accumulation.averaged:
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
        engine, before = self._engine, self._step
        told = engine.context.everyone((list(self._signals.came), engine._accumulation.holds_gradients))
        reason = say_where([came for came, _ in told])
        if any(holds for _, holds in told):
            if reason:
                _log.warning("told to end (%s), but not saved: gradients are left that no step has used", reason)
        elif reason and engine.global_step != self._tried:
            self._save_last(reason)
        else:
            self._save_if_due(before)

    def _save_if_due(self, before: int) -> None:
        """With `every`: the last save was decided on after step `before`."""
        engine, every = self._engine, self._options.every
        if every is not None and engine.global_step // every > before // every:
            self._tried = engine.global_step
            engine.save(self._directory, keep=self._options.keep, in_background=self._options.in_background)

    def _save_last(self, reason: str, then: str = "") -> Path:
        engine = self._engine
        self._tried = engine.global_step
        with contextlib.suppress(CheckpointError):  # it was logged; this one may do better
            engine.wait_for_save()
        place = engine.save(self._directory, keep=self._options.keep)
        self._preemption.stop()
        _log.info("told to end (%s): saved to %s%s", reason, place, then)
        return place


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


def begin(engine: Engine) -> None:
    """What the keys `checkpoint` and `resume` say. All ranks together.

    Raises:
        CheckpointError, InputError: as `engine.load`; or some ranks do not see the folder that others see.
    """
    options = engine.config.checkpoint
    if options is not None:
        engine._automatic = Automatic(engine, options)
    try:
        _resume(engine, options)
    except BaseException:
        if engine._automatic is not None:
            engine._automatic.stop()
        raise


def _resume(engine: Engine, options: AutomaticConfig | None) -> None:
    path = engine.config.resume
    if path is None:
        return
    if path != "auto" or options is None:
        engine.load(Path(path).expanduser())
        return
    folder = folder_of(options)
    if finding.holds_any(folder, engine.context):
        engine.load(folder)
    else:
        _log.info("resume='auto': there is no checkpoint in %s yet, and training begins anew", folder)
