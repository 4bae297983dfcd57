"""Hooks that record some updates of a run: a trace of torch.profiler, and a history of the GPU's memory."""

from __future__ import annotations

import sys
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerAction, profile

from ..engine.ranges import add_ranges
from ..errors import InputError, reject_below, show
from ..utils.log import get_logger
from .hook import Hook
from .records import RunHook

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from .trainer import Trainer

_log = get_logger(__name__)

Ranks = Collection[int] | Literal["all"]


class RecordingHook(Hook):
    """Base of hooks that record updates and write them to a file on some ranks.

    Updates are counted over the whole run (`engine.global_step`), skipped ones included: a run that resumes after them
    records none. If training ends earlier, the updates until then are written.

    Args:
        steps: the first and the last update.
        folder: of the files; None: "profile", in the directory of the hook "run" if there is one.
        ranks: those that write, or "all".

    Raises:
        InputError: `steps` is not such a pair.
    """

    _warm_up: ClassVar[int]
    """Updates before the first one that it needs."""
    _suffix: ClassVar[str]

    def __init__(self, steps: tuple[int, int], folder: str | Path | None, ranks: Ranks) -> None:
        is_pair = isinstance(steps, (tuple, list)) and len(steps) == 2 and all(type(step) is int for step in steps)
        if not is_pair or not self._warm_up < steps[0] <= steps[1]:
            least = f"{self._warm_up + 1} or later" + self._warm_up * ", after one to warm up"
            raise InputError(f"steps={show(steps)}: expected the first and the last update, as in (10, 15): {least}")
        self._first, self._last = steps
        self._folder, self._ranks = folder, ranks
        self._told = (0,) if ranks == "all" else tuple(ranks)
        self._recording: ExitStack | None = None

    def _begin(self, trainer: Trainer, first: int, scope: ExitStack) -> None:
        """Record from update `first` on, until `scope` ends."""
        raise NotImplementedError

    def _next(self) -> None:
        """An update has ended, and others follow."""

    def _save(self, path: Path, scope: ExitStack) -> None:
        """Write the file."""
        raise NotImplementedError

    def _records(self, trainer: Trainer) -> bool:
        """True if this rank records."""
        return self._is_chosen(trainer)

    def _name(self, trainer: Trainer) -> str:
        """The name of the file of what was recorded; "" to write none."""
        step = trainer.engine.global_step
        return f"updates-{self._begun}-{step}" if step >= self._begun and self._is_chosen(trainer) else ""

    def before_fit(self, trainer: Trainer) -> None:
        size = trainer.engine.context.size
        if self._ranks != "all" and not all(rank in range(size) for rank in self._ranks):
            raise InputError(f"ranks={show(self._ranks)}: expected ranks below {size}, or 'all'")
        self._before, self._has_written = trainer.engine.global_step, False
        self._begin_if_due(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._recording is None:
            self._begin_if_due(trainer)
        elif trainer.engine.global_step < self._last:
            self._next()
        else:
            self.close(trainer)

    def after_fit(self, trainer: Trainer) -> None:
        self.close(trainer)
        if self._records(trainer) and self._is_chosen(trainer) and not self._has_written and self._last < sys.maxsize:
            steps = self._first, self._last, self._before + 1, trainer.engine.global_step
            _log.info("none of the updates %d to %d was recorded: this fit made %d to %d", *steps, ranks=self._told)

    def _is_chosen(self, trainer: Trainer) -> bool:
        return self._ranks == "all" or trainer.engine.context.rank in self._ranks

    def _begin_if_due(self, trainer: Trainer) -> None:
        """Begin if the next update is the first one, or its warm-up; after a resume also between first and last."""
        coming = trainer.engine.global_step + 1
        if self._first - self._warm_up <= coming <= self._last - self._warm_up and self._records(trainer):
            self._begun = max(self._first, coming + self._warm_up)
            with ExitStack() as scope:
                self._begin(trainer, self._begun, scope)
                self._recording = scope.pop_all()

    def close(self, trainer: Trainer) -> None:
        if self._recording is None:
            return
        scope, self._recording = self._recording, None
        with scope:
            if name := self._name(trainer):
                self._write(trainer, name, scope)

    def _write(self, trainer: Trainer, name: str, scope: ExitStack) -> None:
        """Write the file; an error does not end training."""
        runs = [hook.directory for hook in trainer._hooks if isinstance(hook, RunHook)]
        folder = Path(self._folder) if self._folder is not None else Path(*runs[:1], "profile")
        self._has_written = True
        path = folder / f"{name}.rank{trainer.engine.context.rank}.{self._suffix}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._save(path, scope)
        except OSError as error:
            _log.warning("cannot write %s: %s", path, error, ranks=None)
        else:
            _log.info("wrote %s", path, ranks=self._told if name.startswith("updates") else None)


class ProfileHook(RecordingHook):
    """Writes a trace of some updates with torch.profiler, including the ranges of the config's `profile_ranges`. Open
    it in https://ui.perfetto.dev or chrome://tracing. The update before them warms up the profiler. The results of
    training stay the same.

    Args:
        steps: the first and the last update.
        folder: of the files; None: "profile", in the directory of the hook "run" if there is one.
        ranks: the ranks to profile, or "all".
        record_shapes: record the shapes of inputs. This and the next two are arguments of torch.profiler, and slow down
            each operation.
        profile_memory: record what operations allocate and free.
        with_stack: record the Python lines that call them.
    """

    _warm_up = 1
    _suffix = "json.gz"

    def __init__(
        self,
        steps: tuple[int, int] = (10, 15),
        folder: str | Path | None = None,
        *,
        ranks: Ranks = (0,),
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
    ) -> None:
        super().__init__(steps, folder, ranks)
        self._options: dict[str, Any] = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
        }

    def _begin(self, trainer: Trainer, first: int, scope: ExitStack) -> None:
        def action(step: int) -> ProfilerAction:
            return ProfilerAction.RECORD if step >= first else ProfilerAction.WARMUP

        if not trainer.engine.config.profile_ranges:
            scope.enter_context(add_ranges(trainer.engine))
        self._profiler = profile(schedule=action, **self._options)
        self._profiler.step_num = first - 1  # "ProfilerStep#10" is update 10
        scope.enter_context(self._profiler)

    def _next(self) -> None:
        self._profiler.step()

    def _save(self, path: Path, scope: ExitStack) -> None:
        scope.close()  # ends the profiler
        self._profiler.export_chrome_trace(str(path))
        del self._profiler  # it keeps the events


class MemorySnapshotHook(RecordingHook):
    """Writes a snapshot of the GPU's memory with the history of its allocations, after some updates, and on a rank that
    raises torch.OutOfMemoryError while it records. Open it in https://pytorch.org/memory_viz. On a CPU it does nothing.

    Args:
        steps: the first and the last update to record. None: record the whole run, and write a file only on that error.
        folder: of the files; None: "profile", in the directory of the hook "run" if there is one.
        ranks: the ranks that write after `steps`, or "all". All ranks record.
        max_entries: how many of the last allocations and frees to keep.
    """

    _warm_up = 0
    _suffix = "pickle"

    def __init__(
        self,
        steps: tuple[int, int] | None = None,
        folder: str | Path | None = None,
        *,
        ranks: Ranks = (0,),
        max_entries: int = 100_000,
    ) -> None:
        reject_below(1, max_entries=max_entries)
        super().__init__((1, sys.maxsize) if steps is None else steps, folder, ranks)
        self._most = max_entries

    def _records(self, trainer: Trainer) -> bool:
        return trainer.engine.device.type == "cuda"

    def before_fit(self, trainer: Trainer) -> None:
        if not self._records(trainer):
            _log.info(
                "the hook memory_snapshot records nothing on the device %s: it needs a GPU", trainer.engine.device
            )
        super().before_fit(trainer)

    def _begin(self, trainer: Trainer, first: int, scope: ExitStack) -> None:
        torch.cuda.memory._record_memory_history(max_entries=self._most, stacks="python")
        scope.callback(torch.cuda.memory._record_memory_history, enabled=None)

    def _name(self, trainer: Trainer) -> str:
        if isinstance(trainer.error, torch.OutOfMemoryError):
            return f"out-of-memory-{trainer.engine.global_step + 1}"
        return super()._name(trainer) if self._last < sys.maxsize else ""

    def _save(self, path: Path, scope: ExitStack) -> None:
        torch.cuda.memory._dump_snapshot(str(path))
