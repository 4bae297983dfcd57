"""`RunFolder` records a run: config, plan, metrics, skipped updates, precision report."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import platform
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..amp.plugin import PRECISIONS
from ..checkpoint.agreement import run_on_all_ranks
from ..config.text import as_json
from ..errors import InputError, Preempted, counted, cut, show_name
from ..utils.log import Listener
from .mesh_picture import block_of, compress, describe_shards
from .run import (
    CONFIG,
    METRICS,
    PLAN,
    PRECISION,
    SKIPPED,
    WARNINGS,
    drop_records,
    format_record,
    move_earlier,
    read_earlier,
    replace_file,
)

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..config import Config
    from ..debug.precision import PrecisionReport
    from ..engine.engine import Engine
    from ..parallel.mesh import ParallelContext

T = TypeVar("T")

_MOST_UNREAD = 1000
"""The number of results that are kept unread. Older ones were computed long ago, so reading them does not wait."""


class RunFolder:
    """Records a run in `directory`, for `halfmesh report`:

        with halfmesh.RunFolder(engine, "runs/first") as run:
            for images, labels in engine.dataloader:
                ...
                run.note(engine.step())
                if engine.global_step % 10 == 0:
                    run.record(loss=loss)

    Rank 0 writes. All ranks must create it together; `note`, `record` and `close` do not communicate.

    A new run moves the files of an earlier run to the subfolder `earlier-1`. A run that resumes from a checkpoint drops
    the records of the updates that it repeats, and appends its config to the earlier ones.

    Raises:
        InputError: the folder cannot be created or written, or an earlier session's files cannot be read; on all ranks.
    """

    def __init__(self, engine: Engine, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._engine = engine
        self._results: deque[tuple[int, StepResult]] = deque()
        self._skipped: list[int] = []
        self._warnings: list[tuple[int, str]] = []
        self._noted = engine.global_step
        self._last: StepResult | None = None
        self._sessions: list[dict[str, Any]] = []
        self._file: Any = None  # of the records; None if this rank does not write, or no longer
        ranks, shown = engine.context.everyone(_describe_rank(engine)), show_name(str(directory))
        what = f"{shown} cannot be the folder of a run; give a new folder, or one that rank 0 can write to"
        on_rank_zero(engine.context, what, lambda: self._begin(ranks))
        self._listener = Listener(logging.WARNING)
        self._listener.emit = self._record_log  # type: ignore[method-assign]
        if self._file is not None:
            logging.getLogger("halfmesh").addHandler(self._listener)

    # -- while it trains ---------------------------------------------------------------------------------------

    def note(self, result: StepResult | None) -> StepResult | None:
        """Keep the result of `engine.step()`, to record later whether the update was skipped. Does not read the device.

        Returns:
            `result`, which is None inside an accumulation cycle.
        """
        if result is not None and self._file is not None and self._noted != self._engine.global_step:
            self._noted, self._last = self._engine.global_step, result
            self._results.append((self._noted, result))
            if len(self._results) > _MOST_UNREAD:
                self._read(_MOST_UNREAD // 2)
        return result

    def record(self, **values: Any) -> None:
        """Write a record: `values` (rank 0's numbers, or tensors with one element), the number of updates, and the
        learning rate, gradient norm (if known) and loss scale of the last update that was noted.

        A value with one of these names replaces it. This reads the device, so do not call it after every update. The
        report has a chart for each of the Trainer's names: loss, eval_loss, samples_per_s, memory_mib.
        """
        if self._file is None:
            return
        numbers = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        self.write(update_record(self._engine, self._last) | {name: float(value) for name, value in numbers.items()})

    def write(self, record: dict[str, Any]) -> None:
        """Write a complete record, with a "step", plus the skipped updates and warnings since the last one."""
        if self._file is None:
            return
        self._read(len(self._results))
        since = {SKIPPED: self._skipped, WARNINGS: self._warnings}
        self._file.write(format_record(record | {name: found for name, found in since.items() if found}))
        self._file.flush()
        self._skipped, self._warnings = [], []

    def flush(self) -> None:
        """Write the skipped updates and warnings that are not written yet; called before a checkpoint."""
        self._read(len(self._results))
        if self._skipped or self._warnings:
            self.write({"step": self._engine.global_step})

    def save_precision_report(self, report: PrecisionReport) -> None:
        """Save the report of `with engine.precision_report() as report:`."""
        if self._file is not None:
            self._put(PRECISION, step=self._engine.global_step, report=report.to_dict(), text=str(report))

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None, stopped: str | None = None) -> None:
        """Write how the run ended: with `error`, or without one. Calling it again does nothing.

        Args:
            stopped: why it ended early, as by early stopping.
        """
        logging.getLogger("halfmesh").removeHandler(self._listener)
        if self._file is None:
            return
        with contextlib.suppress(RuntimeError):  # some errors leave the device unusable
            self.flush()
        self._sessions[-1] |= {"ended": _now(), "to_step": self._engine.global_step, **_how(error)}
        if stopped is not None and error is None:
            self._sessions[-1]["stopped"] = stopped
        self._put(CONFIG, sessions=self._sessions)
        self._file.close()
        self._file = None

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # -- parts -------------------------------------------------------------------------------------------------

    def _begin(self, ranks: list[dict[str, Any]]) -> None:
        step, plan = self._engine.global_step, self._engine.plan
        self.directory.mkdir(parents=True, exist_ok=True)
        if step == 0:
            move_earlier(self.directory)
        self._sessions = [*read_earlier(self.directory / CONFIG, "sessions"), self._session()]
        plans = read_earlier(self.directory / PLAN, "plans")
        new = as_json({"rows": dict(plan.rows), "values": {**plan.values, "ranks": ranks}})
        if not plans or {key: plans[-1].get(key) for key in new} != new:
            plans.append({"from_step": step, **new})
        self._put(CONFIG, sessions=self._sessions)
        self._put(PLAN, plans=plans)
        self._skipped, self._warnings = drop_records(self.directory / METRICS, step)
        self._file = (self.directory / METRICS).open("a")
        self.flush()

    def _session(self) -> dict[str, Any]:
        from .. import __version__

        engine, device = self._engine, self._engine.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name()
        cuda = {"cuda": torch.version.cuda} if device.type == "cuda" else {}
        ours = {"halfmesh": __version__}
        session = {
            "started": _now(),
            "ended": None,
            "status": "running",
            "from_step": engine.global_step,
            "argv": sys.argv,
            "versions": {"python": platform.python_version(), "torch": torch.__version__} | cuda | ours,
            "device": name,
            "world_size": engine.context.size,
            "config": engine.config.to_dict(),
            "settings": _settings(engine.config),
        }
        return dict(as_json(session))

    def _record_log(self, record: logging.LogRecord) -> None:
        self._warnings.append((self._engine.global_step, record.getMessage().removeprefix("[rank 0] ")))

    def _read(self, count: int) -> None:
        """Read the `count` oldest noted results."""
        for _ in range(count):
            number, result = self._results.popleft()
            if result.skipped:
                self._skipped.append(number)

    def _put(self, name: str, **content: Any) -> None:
        replace_file(self.directory / name, json.dumps({"format": 1, **as_json(content)}, indent=1) + "\n")


def on_rank_zero(context: ParallelContext, what: str, work: Callable[[], T]) -> T | None:
    """Do `work` on rank 0. Returns its result there, and None on other ranks.

    Args:
        what: the beginning of the error message.

    Raises:
        InputError: it failed; on all ranks.
    """

    def do() -> T | None:
        try:
            return work() if context.rank == 0 else None
        except InputError:
            raise
        except Exception as error:  # as an error of the user's input
            raise InputError(cut(f"{type(error).__name__}: {error}")) from error

    return run_on_all_ranks(context, what, do)


def update_record(engine: Engine, result: StepResult | None) -> dict[str, Any]:
    """The numbers of an engine's last update, whose `result` may not be known. Reads the device."""
    record: dict[str, Any] = {"step": engine.global_step}
    if result is not None:
        record["lr"] = result.lr
        if result.grad_norm is not None:
            record["grad_norm"] = result.grad_norm
    if engine.config.precision is not None:
        record |= {"loss_scale": engine.loss_scale, "skipped_steps": engine.skipped_steps}
    return record


def _describe_rank(engine: Engine) -> dict[str, Any]:
    """The blocks whose parameters this rank holds, its shard of them, and their bytes."""
    context = engine.context
    return {
        "holds": compress(dict.fromkeys(block_of(name) for name, _ in engine.model.named_parameters())),
        "part": describe_shards(engine.config.parallel, context.dims, context.rank),
        "bytes": sum(size or 0 for size in engine.plan.values["bytes"].values()),
    }


def _settings(config: Config) -> dict[str, Any]:
    """All keys with their values, including defaults; the mode's keys next to the mode, as a user writes them."""
    settings = config.model_dump(exclude=set(config.user))
    for name in PRECISIONS:
        if settings[name] is not None:
            settings[name] = {"mode": settings[name]["mode"], **settings[name]["options"]}
    return settings


def _how(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"status": "finished"}
    if isinstance(error, KeyboardInterrupt):
        return {"status": "interrupted"}
    if isinstance(error, Preempted):
        return {"status": "preempted"}
    first, *_ = str(error).splitlines() or [""]
    return {"status": "failed", "error": cut(f"{type(error).__name__}: {first}")}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _cpu_name() -> str:
    """The CPU's model and number of cores; without a model, its architecture."""
    found = ""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()  # on Linux
        found = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")
    return f"{found or f'cpu ({platform.machine()})'}, {counted(os.cpu_count() or 1, 'core')}"
