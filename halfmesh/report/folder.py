"""The folder that keeps what a run was: config, plan, records, findings about its precision."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import platform
import sys
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InputError, Preempted, cut
from ..log import Listener, get_logger
from ..loop.parts import EngineHook
from ..tensors import count_rows
from .facts import describe_ranks, describe_settings, make_plain
from .names import CONFIG, FILES, METRICS, PLAN, PRECISION, SKIPPED, WARNINGS
from .run_files import RecordFile, begin_together, replace_file, set_aside

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..debug.precision import PrecisionReport
    from ..engine import Engine

_log = get_logger(__name__)
_MOST_UNREAD = 1000
"""Results that are kept unread; older ones have reached the host long ago, so that reading them waits for nothing."""
_OWN_NAMES = ("step", SKIPPED, WARNINGS)


class RunFolder:
    """Keeps in `directory` what a run was, for `halfmesh report`:

        with halfmesh.RunFolder(engine, "runs/first") as run:
            for images, labels in engine.dataloader:
                ...
                run.note(engine.step())
                if engine.global_step % 10 == 0:
                    run.record(loss=loss)

    Rank 0 writes. All ranks make it together; `note`, `record` and `close` do not communicate.

    A run that begins moves the files of an earlier one into `earlier-1` there. One that goes on from a checkpoint takes
    away the records of what is trained again, and adds its config to the earlier ones.

    Raises:
        InputError: the folder cannot be made or written; on all ranks.
    """

    def __init__(self, engine: Engine, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._engine = engine
        self._file = RecordFile(self.directory / METRICS)
        self._results: deque[tuple[int, StepResult]] = deque()
        self._skipped: list[int] = []
        self._warnings: list[tuple[int, str]] = []
        self._listener = Listener(logging.WARNING)
        self._listener.emit = self._hear  # type: ignore[method-assign]
        self._noted = engine.global_step
        self._last: StepResult | None = None
        self._is_open = True
        self._sessions: list[dict[str, Any]] = []
        ranks = engine.context.everyone(describe_ranks(engine))
        begin_together(engine.context, self.directory, lambda: self._begin(ranks))
        self._first_batch = contextlib.ExitStack()
        if self._writes:
            logging.getLogger("halfmesh").addHandler(self._listener)
            self._first_batch.enter_context(engine._with_hook(_FirstBatch(engine, self._note_rows)))

    # -- while it trains ---------------------------------------------------------------------------------------

    def note(self, result: StepResult | None) -> StepResult | None:
        """Keep what `engine.step()` returned, right after it, to know which updates were skipped. Reads nothing now.

        Returns:
            `result`; None (inside an accumulation cycle) is nothing to note.
        """
        if result is not None and self._writes and self._noted != self._engine.global_step:
            self._noted, self._last = self._engine.global_step, result
            self._results.append((self._noted, result))
            if len(self._results) > _MOST_UNREAD:
                self._read(_MOST_UNREAD // 2)
        return result

    def record(self, **values: Any) -> None:
        """Write a record of this moment: `values` (numbers, or tensors of one, as rank 0 has them), the number of
        updates, and of the last update noted the learning rate, the gradient norm if it is known, and the loss scale.

        A value of yours that has the name of one of these takes its place. Reads the device, so not every update. Use
        the Trainer's names to have them drawn together: loss, eval_loss, samples_per_s, memory_mib.

        Raises:
            InputError: a value is no number, or has a name that the record itself uses.
        """
        _refuse_odd(values)
        if not self._writes:
            return
        numbers = {name: _as_number(name, value) for name, value in values.items()}
        engine, last = self._engine, self._last
        record: dict[str, Any] = {"step": engine.global_step}
        if last is not None:
            record["lr"] = last.lr
            if last.grad_norm is not None:
                record["grad_norm"] = last.grad_norm
        if engine.config.precision is not None:
            record |= {"loss_scale": engine.loss_scale, "skipped_steps": engine.skipped_steps}
        self.write(record | numbers)

    def write(self, record: dict[str, Any]) -> None:
        """Write a record that is complete, with a "step", and the updates skipped and warnings since the last one."""
        if not self._writes:
            return
        self._read()
        heard, self._warnings = self._warnings, []
        since = {SKIPPED: self._skipped, WARNINGS: heard}
        self._file.write(record | {name: found for name, found in since.items() if found})
        self._skipped = []

    def flush(self) -> None:
        """Write what is not written yet of skipped updates and warnings, as before a checkpoint."""
        if self._writes:
            self._read()
            if self._skipped or self._warnings:
                self.write({"step": self._engine.global_step})

    def save_precision_report(self, report: PrecisionReport) -> None:
        """Keep what `with engine.precision_report() as report:` has measured."""
        if self._writes:
            self._put(PRECISION, {"step": self._engine.global_step, "report": make_plain(report.to_dict())})

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None = None) -> None:
        """Write how the run ended: with `error`, or well. May be called twice; the first counts."""
        if not self._is_open:
            return
        logging.getLogger("halfmesh").removeHandler(self._listener)
        self._first_batch.close()
        if self._writes:
            with contextlib.suppress(RuntimeError):  # the device is of no use after some errors
                self.flush()
            self._sessions[-1] |= {"ended": _now(), "to_step": self._engine.global_step, **_how(error)}
            self._put(CONFIG, {"sessions": self._sessions})
            self._file.close()
        self._is_open = False

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    # -- parts -------------------------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        return self._is_open and self._engine.context.rank == 0

    def _begin(self, ranks: list[dict[str, Any]]) -> None:
        step = self._engine.global_step
        self.directory.mkdir(parents=True, exist_ok=True)
        if step == 0:
            _move_earlier(self.directory)
        sessions, plans = (_read_list(self.directory / name, key) for name, key in _LISTS)
        self._sessions = [*sessions, self._session()]
        plan = {"rows": dict(self._engine.plan.rows), "values": {**self._engine.plan.values, "ranks": ranks}}
        if not plans or {key: plans[-1].get(key) for key in plan} != plan:
            plans.append({"from_step": step, **plan})
        self._put(CONFIG, {"sessions": self._sessions})
        self._put(PLAN, {"plans": plans})
        dropped = self._file.open(step)
        self._skipped = sorted({number for line in dropped for number in _skips_of(line) if number <= step})
        self._warnings = [found for line in dropped for found in _warnings_of(line) if found[0] <= step]
        self.flush()

    def _session(self) -> dict[str, Any]:
        from ..version import __version__

        engine, device = self._engine, self._engine.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} ({platform.machine()})"
        versions = {"python": platform.python_version(), "torch": torch.__version__, "halfmesh": __version__}
        return {
            "started": _now(),
            "ended": None,
            "status": "running",
            "from_step": engine.global_step,
            "argv": [str(word) for word in sys.argv],
            "versions": versions,
            "device": name,
            "world_size": engine.context.size,
            "config": make_plain(engine.config.to_dict()),
            "settings": describe_settings(engine.config),
        }

    def _hear(self, record: logging.LogRecord) -> None:
        self._warnings.append((self._engine.global_step, record.getMessage().removeprefix("[rank 0] ")))

    def _note_rows(self, rows: int) -> None:
        """Once: the size of the first batch, which a loader need not tell."""
        self._first_batch.close()
        if self._writes:
            self._sessions[-1]["batch_rows"] = rows
            self._put(CONFIG, {"sessions": self._sessions})

    def _read(self, count: int | None = None) -> None:
        """Read the results that were noted, the `count` oldest or all."""
        for _ in range(len(self._results) if count is None else count):
            number, result = self._results.popleft()
            if result.skipped:
                self._skipped.append(number)

    def _put(self, name: str, content: dict[str, Any]) -> None:
        replace_file(self.directory / name, json.dumps({"format": 1, **content}, indent=1) + "\n")


class _FirstBatch(EngineHook):
    def __init__(self, engine: Engine, note: Callable[[int], None]) -> None:
        self._engine = engine
        self._note = note

    def before_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._engine.training:
            self._note(count_rows((args, kwargs)))


_LISTS = ((CONFIG, "sessions"), (PLAN, "plans"))


def _read_list(path: Path, key: str) -> list[dict[str, Any]]:
    """What an earlier part of the run has written, as far as it can be read; what cannot is renamed."""
    if not path.exists():
        return []
    try:
        return [dict(item) for item in json.loads(path.read_text())[key]]
    except (ValueError, KeyError, TypeError, RecursionError):
        set_aside(path)
        return []


def _skips_of(line: str) -> list[int]:
    try:
        return [int(number) for number in json.loads(line).get(SKIPPED, [])]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _warnings_of(line: str) -> list[tuple[int, str]]:
    try:
        return [(int(step), str(text)) for step, text in json.loads(line).get(WARNINGS, [])]
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []


def _move_earlier(directory: Path) -> None:
    """Make room: the files of another run go into a folder of their own, which can be reported as well."""
    there = [path for name in FILES if (path := directory / name).exists()]
    if not any(path.stat().st_size for path in there):
        return
    number = 1
    while (earlier := directory / f"earlier-{number}").exists():
        number += 1
    earlier.mkdir()
    for path in there:
        path.rename(earlier / path.name)
    _log.info("%s held a run already, which is in %s now", directory, earlier)


def _how(error: BaseException | None) -> dict[str, Any]:
    if error is None:
        return {"status": "finished"}
    if isinstance(error, Preempted):
        return {"status": "preempted"}
    lines = str(error).splitlines()
    return {"status": "failed", "error": cut(f"{type(error).__name__}: {lines[0] if lines else ''}")}


def _refuse_odd(values: dict[str, Any]) -> None:
    for name, value in values.items():
        if name in _OWN_NAMES:
            raise InputError(f"{name}= is what a record says by itself; give the value another name")
        if not isinstance(value, (int, float)) and (not hasattr(value, "item") or math.prod(_shape(value)) != 1):
            raise _no_number(name, f"{type(value).__name__}{list(_shape(value)) or ''}")


def _shape(value: Any) -> tuple[int, ...]:
    return tuple(getattr(value, "shape", ()))


def _as_number(name: str, value: Any) -> int | float:
    number = value if isinstance(value, (int, float)) else value.item()
    if not isinstance(number, (int, float)):
        raise _no_number(name, type(number).__name__)
    return number


def _no_number(name: str, what: str) -> InputError:
    return InputError(f"{name}={what} is no number; give record numbers, or tensors of one element")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
