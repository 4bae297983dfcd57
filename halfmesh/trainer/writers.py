"""Hooks that write records to TensorBoard, Weights & Biases and MLflow, from rank 0."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import InputError
from .hook import Hook, Record

if TYPE_CHECKING:
    from .trainer import Trainer


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
