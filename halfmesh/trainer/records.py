"""Hooks for records: on the terminal, in the folder of a run, and to TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from operator import length_hint
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..errors import InputError, readable
from ..report.folder import RunFolder, on_rank_zero
from ..utils.log import get_logger
from .hook import Hook, Record

if TYPE_CHECKING:
    from ..amp.step_result import StepResult
    from ..engine.summary import EffectivePlan
    from .batch import Outcome
    from .trainer import Trainer

_log = get_logger(__name__)


class ProgressHook(Hook):
    """Shows records on rank 0: if stderr is a terminal, a bar for the whole training, with loss, norm and learning
    rate, and a line for each evaluation; else a line for each record.

    Args:
        plain: print lines on a terminal as well.
    """

    def __init__(self, plain: bool = False) -> None:
        self._plain = plain or not sys.stderr.isatty()
        self._bar: Any = None
        self._numbers, self._evaluated = "", 0

    def before_epoch(self, trainer: Trainer) -> None:
        if self._plain or trainer.engine.context.rank != 0:
            return
        if self._bar is None:
            self._start(trainer)
        self._bar.update(self._task, epoch=_name_epoch(trainer, trainer.epoch))

    def _start(self, trainer: Trainer) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        def text(field: str, **options: Any) -> TextColumn:
            return TextColumn(f"{{task.fields[{field}]}}", markup=False, table_column=Column(no_wrap=True, **options))

        self._bar = Progress(
            text("epoch"),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            text("rate"),
            TimeRemainingColumn(elapsed_when_finished=True, table_column=Column(no_wrap=True)),
            text("numbers", overflow="ellipsis"),
            console=Console(stderr=True),
            expand=True,
        )
        fields = {"epoch": _name_epoch(trainer, trainer.epoch), "rate": "", "numbers": ""}
        done = trainer.engine.global_step
        self._task = self._bar.add_task("", total=trainer.total_steps, completed=done, **fields)
        self._bar.start()

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=trainer.engine.global_step)

    def before_eval(self, trainer: Trainer) -> None:
        self._evaluated = 0

    def after_eval_batch(self, trainer: Trainer, outcome: Outcome) -> None:
        if self._bar is not None:
            self._evaluated += 1
            total = length_hint(trainer._evaluated or ())  # 0: not known
            of = f"/{total}" if total else ""
            self._bar.update(self._task, numbers=f"evaluating {self._evaluated}{of}")

    def after_eval(self, trainer: Trainer, results: Mapping[str, float]) -> None:
        if self._bar is not None:
            self._bar.update(self._task, numbers=self._numbers)

    def write(self, trainer: Trainer, record: Record) -> None:
        is_evaluation = any(name.startswith("eval_") for name in record)
        if self._bar is not None and not is_evaluation:
            speed = self._bar.tasks[0].speed or 0.0  # of the last 30 s
            rate = "" if not speed else f"{speed:.3g} it/s" if speed >= 1 else f"{1 / speed:.3g} s/it"
            named = {"loss": "loss", "grad_norm": "norm", "lr": "lr"}
            numbers = "  ".join(f"{short} {_short(record[name])}" for name, short in named.items() if name in record)
            self._numbers = numbers
            self._bar.update(self._task, rate=rate, numbers=numbers)
        else:
            # Where nothing is scaled, as in bf16, these two say nothing.
            silent = {"step", "epoch", "skipped_steps" if not record.get("skipped_steps") else ""}
            silent |= {"loss_scale"} if record.get("loss_scale") == 1 else set()
            numbers = "  ".join(_in_words(name, value) for name, value in record.items() if name not in silent)
            of = "" if trainer.total_steps is None else f"/{trainer.total_steps}"
            line = f"{_name_epoch(trainer, record['epoch'])}  step {record['step']}{of}  {numbers}"
            if self._bar is None:
                _log.info("%s", line)
            else:  # above the bar
                self._bar.console.print(line, markup=False, emoji=False, highlight=False, soft_wrap=True)

    def close(self, trainer: Trainer) -> None:
        if self._bar is not None:
            # After Ctrl-C or a signal, the line about it stays the last one.
            self._bar.live.transient = isinstance(trainer.error, (KeyboardInterrupt, SystemExit))
            self._bar.stop()
            self._bar = None


def _name_epoch(trainer: Trainer, epoch: int) -> str:
    """As people count: "epoch 1/3" is the first, number 0 in records."""
    return f"epoch {epoch + 1}" + ("" if trainer.epochs is None else f"/{trainer.epochs}")


def _in_words(name: str, value: Any) -> str:
    """A number of a record with its unit, if that is known."""
    if name == "memory_mib":
        return f"memory {readable(value * 2**20)}"
    if name == "model_flops_per_s":
        return _flops(value)
    if name.endswith("_per_s"):
        return f"{f'{value:,.0f}' if value >= 1000 else _short(value)} {name.removesuffix('_per_s')}/s"
    return f"{name} {_short(value)}"


def _flops(per_second: float) -> str:
    for letter in ("", "k", "M", "G", "T"):
        if per_second < 1000:
            return f"{per_second:.4g} {letter}FLOP/s"
        per_second /= 1000
    return f"{per_second:.4g} PFLOP/s"


def _short(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e9:
        return f"{value:.0f}"  # a loss scale: 65536, as everywhere else
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class RunHook(Hook):
    """Writes config, plan, records and skipped updates to a folder: `halfmesh.RunFolder` for a Trainer.

    Add the hooks "throughput" and "memory" to record their values.

    Args:
        directory: the folder; see RunFolder if it exists.
        precision_report: measure `engine.precision_report()` in the first update of each epoch; the last one is kept.
    """

    def __init__(self, directory: str | Path, precision_report: bool = False) -> None:
        self.directory = Path(directory)
        self._wants_precision = precision_report
        self._run: Any = None
        self._measuring = ExitStack()
        self._report: Any = None

    def before_fit(self, trainer: Trainer) -> None:
        self._run = RunFolder(trainer.engine, self.directory)

    def before_epoch(self, trainer: Trainer) -> None:
        if self._wants_precision and self._report is None:
            self._report = self._measuring.enter_context(trainer.engine.precision_report())

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        self._run.note(result)
        if self._report is not None:
            self._measuring.close()  # fills it
            self._run.save_precision_report(self._report)
            self._report = None

    def before_save(self, trainer: Trainer) -> None:
        if self._run is not None:  # in `evaluate`, and in an earlier hook's `before_fit`, there is none
            self._run.flush()

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._run is not None:  # in `evaluate` there is none
            self._run.write(record)

    def close(self, trainer: Trainer) -> None:
        if self._run is not None:
            self._run.close(trainer.error, trainer._stopped)
            self._run = None
        self._measuring.__exit__(*sys.exc_info())
        self._report = None


Log = Callable[[dict[str, float], int], None]
"""Writes the numbers of a record, measured after an update of this number."""
End = Callable[[BaseException | None], Any]
"""Ends the tracker's run, with the error that ended it, if any."""


class WriterHook(Hook):
    """Passes records to a tracker, which rank 0 opens when `fit` begins and closes when it ends. Numbers get the names
    "train/loss", "eval/loss" ("loss" and "eval_loss" in a record), and "epoch".

    Attributes:
        settings: the config and the optimizer's settings, by dotted names ("fp16.mode", "optimizer.lr"), for the
            tracker's table of hyperparameters. Set before `open`.
    """

    settings: Mapping[str, bool | float | str] = MappingProxyType({})

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._opened: tuple[Log, End] | None = None

    def open(self, step: int) -> tuple[Log, End]:
        """Import the package, and begin a run that has done `step` updates."""
        raise NotImplementedError

    def before_fit(self, trainer: Trainer) -> None:
        engine = trainer.engine
        self.settings = dict(_flatten({**engine.config.to_dict(), **optimizer_settings(engine.plan)}))
        begin = partial(self.open, engine.global_step)
        self._opened = on_rank_zero(engine.context, f"{type(self).__name__} cannot start", begin)

    def write(self, trainer: Trainer, record: Record) -> None:
        if self._opened is not None:
            self._opened[0]({_tag(name): value for name, value in record.items() if name != "step"}, record["step"])

    def close(self, trainer: Trainer) -> None:
        if self._opened is not None:
            (_, end), self._opened = self._opened, None
            end(trainer.error)


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, package):  # the package itself is there
            raise
        raise InputError(f"{package} is not installed; run: pip install {package}") from error


def _tag(name: str) -> str:
    kind, _, rest = name.partition("_")
    return f"eval/{rest}" if kind == "eval" and rest else name if name == "epoch" else f"train/{name}"


def optimizer_settings(plan: EffectivePlan) -> dict[str, Any]:
    """Of each group of parameters, as they are at the start: under "optimizer", or "optimizer_0", "optimizer_1" ..."""
    groups = plan.values["optimizer"]
    return {"optimizer" if len(groups) == 1 else f"optimizer_{number}": group for number, group in enumerate(groups)}


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, bool | float | str]]:
    """Nested mappings as dotted names; what is not a number or text as its text."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (bool, int, float, str)) else str(value)


class TensorBoardHook(WriterHook):
    """Writes the records for TensorBoard, one scalar per name and update; settings into its tabs Text and HParams.

    A resumed run hides records that were written after its checkpoint.

    Args:
        log_dir: the folder for `tensorboard --logdir`.
    """

    def __init__(self, log_dir: str | Path) -> None:
        super().__init__(log_dir=log_dir)

    def open(self, step: int) -> tuple[Log, End]:
        tensorboard = _import("torch.utils.tensorboard", "tensorboard")
        events: Any = tensorboard.SummaryWriter(purge_step=step + 1, **self._options)
        rows = (f"| {name} | {value} |" for name, value in self.settings.items())
        events.add_text("settings", "\n".join(["| | |", "|---|---|", *rows]), step)
        for summary in tensorboard.summary.hparams(dict(self.settings), {"train/loss": 0.0}):
            events.file_writer.add_summary(summary)

        def log(scalars: dict[str, float], step: int) -> None:
            for name, value in scalars.items():
                events.add_scalar(name, value, step)

        return log, lambda _: events.close()


class WandbHook(WriterHook):
    """Logs the records to Weights & Biases, by update.

    Without options, it uses an active run of `wandb.init` and leaves it open. To resume a run, give its `id` and
    `resume="allow"`; W&B ignores updates before its last one.

    Args:
        options: arguments of `wandb.init`: project, name, config. `mode="offline"` writes local files for
            `wandb sync`, without network or login.
    """

    def open(self, step: int) -> tuple[Log, End]:
        wandb = _import("wandb", "wandb")
        before = wandb.run
        run = wandb.init(**self._options) if self._options or before is None else before
        run.config.setdefaults(self.settings)  # those of `options` stay

        def end(error: BaseException | None) -> None:
            if run is not before:  # with options, init may give the active one back
                run.finish(exit_code=0 if error is None else 1)

        return lambda scalars, step: run.log(scalars, step=step), end


class MLflowHook(WriterHook):
    """Logs the records as metrics of an MLflow run, by update.

    Without options, it uses an active run of `mlflow.start_run` and leaves it open. To resume a run, give its `run_id`;
    updates that are repeated are logged twice. MLflow's settings determine where runs are stored
    (`MLFLOW_TRACKING_URI`, `mlflow.set_tracking_uri`).

    Args:
        options: arguments of `mlflow.start_run`: run_name, experiment_id, tags.
    """

    def open(self, step: int) -> tuple[Log, End]:
        mlflow = _import("mlflow", "mlflow")
        is_ours = bool(self._options) or mlflow.active_run() is None
        if is_ours:
            mlflow.start_run(**self._options)
        known = mlflow.active_run().data.params  # MLflow rejects other values for the same name
        mlflow.log_params({name: value for name, value in self.settings.items() if name not in known})

        def end(error: BaseException | None) -> None:
            if is_ours:
                mlflow.end_run("FINISHED" if error is None else "FAILED")

        return lambda scalars, step: mlflow.log_metrics(scalars, step=step), end
