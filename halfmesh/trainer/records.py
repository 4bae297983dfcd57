"""Hooks for records: on the terminal, in the folder of a run, and to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError
from ..report.folder import RunFolder
from ..utils.log import get_logger
from .hook import Hook, Record

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..debug.precision import PrecisionReport
    from .batch import Outcome
    from .trainer import Trainer

_log = get_logger(__name__)


class ProgressHook(Hook):
    """Shows records on rank 0: a progress bar with the last record if stderr is a terminal, else a line for each.

    Args:
        plain: print lines on a terminal, too.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain or not sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None

    def before_epoch(self, trainer: Trainer) -> None:
        engine = trainer.engine
        if self._plain or engine.context.rank != 0:
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        if self._bar is None:
            columns = TextColumn("epoch {task.fields[epoch]}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
            self._bar = Progress(*columns, TextColumn("{task.description}"), console=Console(stderr=True))
            self._bar.start()
        total = engine.dataloader.loader.length if engine.has_dataloader else None
        done = engine.dataloader.next_batch if engine.has_dataloader else 0
        self._task = self._bar.add_task("", total=total, completed=done, epoch=trainer.epoch)

    def after_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def write(self, trainer: Trainer, record: Record) -> None:
        text = "  ".join(f"{name} {_short(value)}" for name, value in record.items() if name not in ("step", "epoch"))
        if self._bar is not None:
            self._bar.update(self._task, description=text)
            if any(name.startswith("eval_") for name in record):
                self._bar.console.print(f"epoch {record['epoch']}  step {record['step']}  {text}")
        elif self._plain:
            _log.info("epoch %s  step %s  %s", record["epoch"], record["step"], text)

    def close(self, trainer: Trainer) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _short(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e9:
        return f"{value:.0f}"  # a loss scale: 65536, as everywhere else
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class RunHook(Hook):
    """Writes config, plan, records and skipped updates to a folder: `halfmesh.RunFolder` for a Trainer.

    The hooks "throughput" and "memory" add their values to the records.

    Args:
        directory: the folder; see RunFolder if it exists.
        precision_report: measure `engine.precision_report()` in the first update of each epoch, and keep the last one.
    """

    def __init__(self, directory: str | Path, precision_report: bool = False) -> None:
        self._directory = Path(directory)
        self._wants_precision = precision_report
        self._run: RunFolder | None = None
        self._is_due = False
        self._measuring = ExitStack()
        self._report: PrecisionReport | None = None

    def before_fit(self, trainer: Trainer) -> None:
        self._run = RunFolder(trainer.engine, self._directory)

    def before_epoch(self, trainer: Trainer) -> None:
        self._is_due = self._wants_precision

    def before_batch(self, trainer: Trainer, batch: Any) -> None:
        if self._is_due:
            self._is_due = False
            self._report = self._measuring.enter_context(trainer.engine.precision_report())

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._run is None:
            return
        self._run.note(result)
        if self._report is not None:
            self._measuring.close()  # fills it
            self._run.save_precision_report(self._report)
            self._report = None

    def before_save(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.flush()

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._run is not None:
            self._run.write(record)

    def close(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.close(sys.exception())
            self._run = None
        error = sys.exception()
        self._measuring.__exit__(type(error) if error else None, error, None)
        self._report = None


class WriterHook(Hook):
    """Passes records to a tracker, which rank 0 opens when `fit` begins and closes when it ends."""

    package: ClassVar[str]
    """The package to install."""

    _is_open = False

    def open(self, step: int) -> None:
        """Import the package, and begin a run that has done `step` updates."""
        raise NotImplementedError

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        """Write the numbers of a record, measured after update `step`."""
        raise NotImplementedError

    def end(self) -> None:
        """End the run; `sys.exception()` is the error that ended it, if any."""
        raise NotImplementedError

    def before_fit(self, trainer: Trainer) -> None:
        context, problem = trainer.engine.context, None
        if context.rank == 0:
            try:
                self.open(trainer.engine.global_step)
                self._is_open = True
            except ImportError as error:
                problem = f"needs {self.package} ({error}): pip install {self.package}"
            except Exception as error:  # the other ranks wait for the answer
                problem = f"cannot start: {type(error).__name__}: {error}"
        problem = context.from_first(problem)
        if problem is not None:
            raise InputError(f"{type(self).__name__} {problem}")

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._is_open:
            self.log({name: value for name, value in record.items() if name != "step"}, record["step"])

    def close(self, trainer: Trainer) -> None:
        if self._is_open:
            self._is_open = False
            self.end()


class TensorBoardHook(WriterHook):
    """Writes the records for TensorBoard, one scalar per name and update.

    A resumed run hides records that were written after its checkpoint.

    Args:
        log_dir: the folder for `tensorboard --logdir`.
    """

    package = "tensorboard"

    def __init__(self, log_dir: str | Path) -> None:
        self._log_dir = log_dir

    def open(self, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(self._log_dir, purge_step=step + 1)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)

    def end(self) -> None:
        self._events.close()


class WandbHook(WriterHook):
    """Logs the records to Weights & Biases, by update.

    Without options, an active run of `wandb.init` is used and left open. To resume a run, give its `id` and
    `resume="allow"`; W&B ignores updates before its last one.

    Args:
        options: arguments of `wandb.init`: project, name, config. `mode="offline"` writes local files for
            `wandb sync`, without network or login.
    """

    package = "wandb"

    def __init__(self, **options: Any) -> None:
        self._options = options

    def open(self, step: int) -> None:
        import wandb

        before = wandb.run
        self._run = wandb.init(**self._options) if self._options or before is None else before
        self._is_ours = self._run is not before  # with options, init may give the active one back

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def end(self) -> None:
        if self._is_ours:
            self._run.finish(exit_code=0 if sys.exception() is None else 1)


class MLflowHook(WriterHook):
    """Logs the records as metrics of an MLflow run, by update.

    Without options, an active run of `mlflow.start_run` is used and left open. To resume a run, give its `run_id`;
    updates that are trained again are logged twice. MLflow's setting determines where runs are stored
    (`MLFLOW_TRACKING_URI`, `mlflow.set_tracking_uri`).

    Args:
        options: arguments of `mlflow.start_run`: run_name, experiment_id, tags.
    """

    package = "mlflow"

    def __init__(self, **options: Any) -> None:
        self._options = options

    def open(self, step: int) -> None:
        import mlflow

        self._mlflow = mlflow
        self._is_ours = bool(self._options) or mlflow.active_run() is None
        if self._is_ours:
            mlflow.start_run(**self._options)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._mlflow.log_metrics(dict(scalars), step=step)

    def end(self) -> None:
        if self._is_ours:
            self._mlflow.end_run("FINISHED" if sys.exception() is None else "FAILED")
