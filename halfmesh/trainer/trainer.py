"""Trainer: the loop of forward, backward and step, with epochs, evaluation and hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ..amp.step_result import StepResult
from ..debug.precision import judge_scale
from ..engine.engine import Engine
from ..errors import InputError, Interrupted, reject_below
from ..report.folder import update_record
from ..utils.log import get_logger
from .batch import Compute, compute_batch
from .evaluation import MeanLoss, choose_eval_loader, choose_train_loader, evaluating, predict
from .hook import Hook, HookLike, Record, add_measured, make_hook

_log = get_logger(__name__)


class FitState:
    """The state of a `fit` that is saved with the engine, separately by each rank.

    Attributes:
        evaluated_at: the update of the last evaluation; -1 before the first.
        hooks: by class name; the second of a class is "MetricHook 2".
    """

    def __init__(self, hooks: Sequence[Hook] = ()) -> None:
        self.evaluated_at = -1
        self.hooks: dict[str, Hook] = {}
        for hook in hooks:
            kind = type(hook).__name__
            count = 1 + sum(type(earlier).__name__ == kind for earlier in self.hooks.values())
            self.hooks[kind if count == 1 else f"{kind} {count}"] = hook

    def state_dict(self) -> dict[str, Any]:
        hooks = {name: dict(state) for name, hook in self.hooks.items() if (state := hook.state_dict())}
        return {"evaluated_at": self.evaluated_at, "hooks": hooks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.evaluated_at = state["evaluated_at"]
        for name, hook in self.hooks.items():
            if name in state["hooks"]:
                hook.load_state_dict(state["hooks"][name])


class Trainer:
    """Runs an engine's loop:

        trainer = halfmesh.Trainer(engine)
        trainer.fit(epochs=10, hooks=["progress", "memory"])

    All ranks must call its methods together.

    Args:
        compute: computes loss and output of a batch; by default `halfmesh.compute_batch`.
        log_every: updates between two records for the hooks. Each record reads the device.

    Attributes:
        engine: the engine.
        epoch: number of the current epoch, from 0; -1 before the first.
        epochs: the argument of `fit`; None before it, and without a limit.
        total_steps: the update (`engine.global_step`) that ends `fit`; None if the length of the data is not known.
        result: the result of the last `engine.step()`: None inside an accumulation cycle.
        error: the error that ended `fit` or `evaluate`, for the hooks' `close`; else None.
    """

    def __init__(self, engine: Engine, *, compute: Compute = compute_batch, log_every: int = 10) -> None:
        reject_below(1, log_every=log_every)
        self.engine = engine
        self.compute = compute
        self.log_every = log_every
        self.epoch = -1
        self.epochs: int | None = None
        self.total_steps: int | None = None
        self.result: StepResult | None = None
        self.error: BaseException | None = None
        self._hooks: list[Hook] = []
        self._max_steps: int | None = None
        self._stopped: str | None = None
        self._eval_steps: int | None = None
        self._evaluated: Iterable[Any] | None = None
        self._has_odd_scale = False
        self._loss = MeanLoss(engine)
        self._fit_state = FitState()

    # -- the loop ----------------------------------------------------------------------------------------------

    def fit(
        self,
        train: Iterable[Any] | None = None,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        eval_dataloader: Iterable[Any] | None = None,
        eval_interval: int = 1,
        eval_steps: int | None = None,
        hooks: Sequence[HookLike] = (),
    ) -> None:
        """Train for `epochs` epochs or `max_steps` updates, whichever ends first, counted from the start of the run:
        after `engine.load`, only the rest. (Calling it again continues with the next epoch; epochs of your own batches
        count from this call.)

        Args:
            train: by default the engine's dataloader; or your own batches, already on the device: different ones on
                each data rank, and the same number.
            epochs: passes over the data; unlimited if only `max_steps` is given.
            max_steps: updates (`engine.global_step`, including skipped ones).
            eval_dataloader: by default the engine's, if it has one. halfmesh shards a DataLoader over the data ranks.
            eval_interval: epochs between evaluations; fit always evaluates after the last one. 0: off.
            eval_steps: updates between evaluations within epochs. None: off.
            hooks: Hook objects, names of registered ones ("progress"), or dict(type="run", directory=...).

        Raises:
            InputError: an argument is wrong. Raised before anything runs.
        """
        if epochs is None and max_steps is None:
            raise InputError("fit needs an end: give it epochs=, max_steps=, or both")
        reject_below(1, epochs=epochs, max_steps=max_steps, eval_steps=eval_steps)
        reject_below(0, eval_interval=eval_interval)
        batches = choose_train_loader(self.engine, train)
        evaluated = choose_eval_loader(self.engine, eval_dataloader) if eval_interval or eval_steps else None
        if eval_steps is not None and evaluated is None:
            raise InputError("eval_steps needs data to evaluate on: give fit or initialize an eval_dataloader")
        self._max_steps, self._stopped = max_steps, None
        self._eval_steps, self._evaluated = eval_steps, evaluated
        self._loss = MeanLoss(self.engine)
        first = batches.next_epoch if batches is self._own_loader else 0
        self.epochs, self.total_steps = epochs, self._find_total(batches, epochs, first)
        with self._ended_by_ctrl_c(), self._hooked(hooks), self._saved_with_the_engine():
            self._call("before_fit")
            self.epoch = first - 1
            while (epochs is None or self.epoch + 1 < epochs) and not self._is_over:
                self.epoch += 1
                is_complete = self._train_epoch(batches)
                if is_complete and eval_interval and (self.epoch + 1) % eval_interval == 0:
                    self._evaluate_once()
            self._evaluate_once()
            self._call("after_fit")
        if self._stopped is not None:
            _log.info("stopped after update %d: %s", self.engine.global_step, self._stopped)

    def evaluate(self, dataloader: Iterable[Any] | None = None, hooks: Sequence[HookLike] = ()) -> dict[str, float]:
        """The mean loss per sample over a dataloader, and the results of `hooks`; the same on all ranks.

        Args:
            dataloader: by default the engine's eval_dataloader. halfmesh shards a DataLoader over the data ranks.

        Returns:
            "eval_loss" (if there is a loss) and the hooks' results.
        """
        loader = choose_eval_loader(self.engine, dataloader)
        if loader is None:
            raise InputError("no data to evaluate on: give evaluate a dataloader, or initialize an eval_dataloader")
        with self._hooked(hooks):
            return self._evaluate(loader)

    def predict(self, dataloader: Iterable[Any]) -> Any:
        """The model's outputs for all samples of a DataLoader, in its order, on the CPU of every rank.

        The model does not get the target: the last item of a tuple of two or more items, or the target in a dict.

        Returns:
            The model's outputs (a tensor, or nested tensors), joined along the first dim. If their shapes differ (such
            as sequences of another length in each batch), a list of the outputs: one for each batch in one process, or
            one for each sample, whose first dim is 1, if data ranks take turns in samples.

        Raises:
            InputError: data ranks take turns in samples, and an output does not have one row for each sample.
        """
        return predict(self.engine, dataloader)

    def stop(self, reason: str = "a hook asked for it") -> None:
        """End `fit` after this update. All ranks must call it."""
        self._stopped = reason

    def save(self, directory: str | Path, *, keep: int | None = None, in_background: bool = False) -> Path:
        """`engine.save`, with the hooks' `before_save` and `after_save` around it."""
        self._call("before_save")
        path = self.engine.save(directory, keep=keep, in_background=in_background)
        self._call("after_save", path)
        return path

    @property
    def evaluates(self) -> bool:
        """True if this `fit` evaluates."""
        return self._evaluated is not None

    # -- parts -------------------------------------------------------------------------------------------------

    def _find_total(self, batches: Any, epochs: int | None, first: int) -> int | None:
        """See `total_steps`; `first`: the number of the first epoch."""
        if epochs is None:
            return self._max_steps
        is_own = batches is self._own_loader
        count = batches.loader.length if is_own else len(batches) if isinstance(batches, Sized) else None
        if count is None:
            return self._max_steps
        cycle, done = self.engine.config.gradient_accumulation, batches.next_batch if is_own else 0
        left = max(0, epochs - first) * -(-count // cycle) - done // cycle
        total = self.engine.global_step + left
        return total if self._max_steps is None else min(total, self._max_steps)

    def _train_epoch(self, batches: Iterable[Any]) -> bool:
        """Train on the batches of an epoch. Returns True if all were used."""
        engine = self.engine
        engine.train()
        self._call("before_epoch")
        before, after = self._hearing("before_batch"), self._hearing("after_batch")
        count, is_complete = 0, True
        for batch in batches:
            # Checked here, so that an epoch that ends with its last batch is complete. Accumulation cycles end first.
            if self._is_over and not (count and self.result is None):
                is_complete = False
                break
            count += 1
            for hook in before:
                hook.before_batch(self, batch)
            engine.zero_grad()
            outcome = self.compute(engine, batch)
            engine.backward(outcome.loss)
            self.result = engine.step()
            self._loss.add(outcome)
            for hook in after:
                hook.after_batch(self, outcome)
            del outcome  # frees the output before the next forward
            if self.result is not None:
                self._after_step(self.result)
        if is_complete and not count and batches is not self._own_loader:
            raise InputError(
                f"epoch {self.epoch} had no batch to train on; `train` must be iterable in every epoch (a list or a "
                "DataLoader, not a generator)"
            )
        if is_complete and count and self.result is None:  # the user's batches end within an accumulation cycle
            self.result = engine.step(last=True)
            if self.result is not None:
                self._after_step(self.result)
        if is_complete:
            self._call("after_epoch")
        self._record()
        return is_complete

    def _after_step(self, result: StepResult) -> None:
        self._call("after_step", result)
        step = self.engine.global_step
        if step % self.log_every == 0:
            self._record()
        if self._eval_steps is not None and step % self._eval_steps == 0:
            self._evaluate_once()

    def _evaluate_once(self) -> None:
        """Evaluate, unless it was done since the last update (also before the run was saved and resumed)."""
        step = self.engine.global_step
        if self._evaluated is not None and self._fit_state.evaluated_at != step:
            self._evaluate(self._evaluated)
            self._fit_state.evaluated_at = step

    def _evaluate(self, loader: Iterable[Any]) -> dict[str, float]:
        engine, mean = self.engine, MeanLoss(self.engine, by_rows=True)
        heard = self._hearing("after_eval_batch")
        with evaluating(engine):
            self._call("before_eval")
            for batch in loader:
                outcome = self.compute(engine, batch)
                mean.add(outcome)
                for hook in heard:
                    hook.after_eval_batch(self, outcome)
            loss = mean.take()
            results: Record = {} if loss is None else {"eval_loss": loss}
            for hook in self._hooks:
                add_measured(results, hook, "eval_results", hook.eval_results(self))
        self._call("after_eval", results)
        self._write({"step": self.engine.global_step, "epoch": self.epoch, **results})
        return results

    def _record(self) -> None:
        """Make a record of the measurements since the last one."""
        loss = self._loss.take()
        if loss is None:  # no update since
            return
        numbers = update_record(self.engine, self.result)
        record: Record = {"step": numbers["step"], "epoch": self.epoch, "loss": loss} | numbers
        if "loss_scale" in record:
            self._warn_of_scale(record["loss_scale"])
        for hook in self._hooks:
            add_measured(record, hook, "measure", hook.measure(self))
        self._write(record)

    def _warn_of_scale(self, scale: float) -> None:
        """Warn once, until the scale is normal again."""
        problems = list(judge_scale(scale))
        if problems and not self._has_odd_scale:
            _log.warning("update %d: %s", self.engine.global_step, problems[0])
        self._has_odd_scale = bool(problems)

    def _write(self, record: Record) -> None:
        for hook in self._hooks:
            hook.write(self, record)

    @property
    def _is_over(self) -> bool:
        return self._stopped is not None or (self._max_steps is not None and self.engine.global_step >= self._max_steps)

    @property
    def _own_loader(self) -> Any:
        return self.engine.dataloader if self.engine.has_dataloader else None

    def _hearing(self, event: str) -> list[Any]:
        """The hooks that override `event`, so that the others cost nothing per batch."""
        return [hook for hook in self._hooks if getattr(type(hook), event) is not getattr(Hook, event)]

    def _call(self, event: str, *args: Any) -> None:
        for hook in self._hearing(event):
            getattr(hook, event)(self, *args)

    @contextmanager
    def _hooked(self, hooks: Sequence[HookLike]) -> Iterator[None]:
        """Use `hooks` inside, and close them at the end."""
        outside = {"_hooks": self._hooks, "error": self.error}
        self._hooks, self.error = list(map(make_hook, hooks)), None
        with ExitStack() as closed:
            closed.callback(vars(self).update, outside)
            for hook in self._hooks:
                closed.callback(hook.close, self)  # even if another hook fails
            try:
                yield
            except BaseException as error:
                self.error = error
                raise

    @contextmanager
    def _ended_by_ctrl_c(self) -> Iterator[None]:
        """A scope that Ctrl-C ends with one line and status 130, also where nothing is saved. Where one types, it is
        Python's."""
        try:
            yield
        except KeyboardInterrupt as error:
            if isinstance(error, Interrupted) or hasattr(sys, "ps1"):
                raise
            saves = self.engine.config.checkpoint is not None
            why = (
                "not saved, because it ended at once"
                if saves
                else "set the config key checkpoint, and Ctrl-C saves first"
            )
            _log.info("interrupted after update %d; %s", self.engine.global_step, why)
            raise Interrupted from None

    @contextmanager
    def _saved_with_the_engine(self) -> Iterator[None]:
        """Load the hooks' state of a resumed run, and keep their last state for the next `fit`."""
        self._fit_state = FitState(self._hooks)
        self.engine.attach("trainer", self._fit_state)
        is_over = False
        try:
            yield
            is_over = True
        finally:
            self.engine.detach("trainer", keep=is_over)
