"""The engine: the user's loop of forward, backward and step, in any precision and layout."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn, optim

from ..amp.o1 import CastTable
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..amp.statistics import StatisticsCheck
from ..amp.step_result import StepResult
from ..checkpoint.attached import Attached
from ..checkpoint.lock import FolderLocks
from ..data.dataloader import EngineDataLoader, warn_of_same_inputs
from ..debug.health import KEPT, Health
from ..debug.last_batch import LastBatch
from ..errors import InputError, NonFiniteError
from ..parallel.context import ParallelContext
from .accumulation import Accumulation, StepWatch
from .average import WeightAverage
from .executor import Executor
from .model_guard import ModelGuard
from .scheduling import LRAdvance

if TYPE_CHECKING:
    from ..config import Config
    from ..debug.sync_check import SyncCheck
    from ..division import Division
    from ..effective_plan import EffectivePlan


class Engine(Health):
    """What `halfmesh.initialize` returns. The loop is the same for every config:

        for images, labels in engine.dataloader:
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()

    Attributes:
        model: what this rank holds of the model, under the whole model's parameter names.
        optimizer: the user's optimizer. It steps through the engine only.
        dataloader: the loader given, sharded over the data ranks, its batches on the device.
        eval_dataloader: the same for evaluation, without padding: no sample is there twice.
        lr_scheduler: the scheduler given; who advances it is `config.lr_interval`.
        context: the parallel layout.
        config: the config, as loaded.
        global_step: optimizer steps attempted so far, skipped ones included.
        plan: what the config came down to, as initialize has printed it.
    """

    plan: EffectivePlan

    def __init__(
        self,
        *,
        model: nn.Module,
        criterion: Callable[..., Any] | None,
        update: MixedPrecisionOptimizer,
        precision: Precision,
        context: ParallelContext,
        executor: Executor,
        division: Division,
        accumulation: Accumulation,
        lr: LRAdvance,
        config: Config,
        dataloader: EngineDataLoader | None = None,
        eval_dataloader: EngineDataLoader | None = None,
        sync: SyncCheck | None = None,
    ) -> None:
        self.model = model
        self.context = context
        self.config = config
        self.global_step = 0
        self._criterion = criterion
        self._update = update
        self._precision = precision
        self._accumulation = accumulation
        self._executor = executor
        self._division = division
        self._lr = lr
        self._dataloader = dataloader
        self._eval_dataloader = eval_dataloader
        self._sync = sync
        self._results: deque[StepResult] = deque(maxlen=KEPT)
        self._last_batch = LastBatch()
        self._compares_inputs = context.dp_size > 1 and dataloader is None
        self._closed = False
        self._background = None
        self._automatic = None
        self._attached = Attached()
        self._locks = FolderLocks()
        self._step_watch = StepWatch(accumulation.length, dataloader) if accumulation.length > 1 else None
        self._statistics = StatisticsCheck(model, update.recipe, context.dp_rank == context.tp_rank == 0)
        self._average = WeightAverage(update)
        self._guard = ModelGuard(model, self.optimizer, accumulation, update.recipe, context.device, division)
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own would miss the model's gradients

    # -- the loop ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the config's precision.

        Under a pipeline, in training and with gradients, it is a handle: for `criterion`, and after `backward`, with
        `keep_outputs`, to be used like the output. All ranks of a pipeline call this with the same inputs.
        """
        self._refuse_if_closed()
        if self._automatic is not None:
            self._automatic.before_forward()
        is_training = self.model.training
        if is_training:
            self._last_batch.note_forward(args, kwargs)
        try:
            with self._guard.own_call():
                output = self._executor.forward(*args, **kwargs)
        except RuntimeError as error:
            self._division.explain(error)
            raise
        if is_training:
            self._last_batch.output = output
        return output

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value for these arguments, in the config's precision.

        Of a handle it is one, too, to be used like the loss of the whole batch after `backward`, on every rank.
        """
        if self._criterion is None:
            raise InputError("no criterion was given to initialize; pass one, or compute the loss in the loop")
        value = self._executor.criterion(self._criterion, *args, **kwargs)
        if self.model.training:
            self._last_batch.note_criterion(args, kwargs, value)
        return value

    def backward(self, loss: Any, loss_id: int = 0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, a scalar tensor (or (sum, weight) with `loss_reduction="weighted"`).

        `step` frees the gradients that it uses, so a forgotten `zero_grad` does no harm. On the last microbatch of a
        cycle the gradients are reduced over the data ranks while backward runs. Under a pipeline all microbatches go
        forward and backward here.

        Args:
            loss_id: which of the `num_losses` losses this is (mode APEX); each has a loss scale of its own.

        Raises:
            InputError: not a scalar with a graph, or an unknown `loss_id`.
        """
        self._refuse_if_closed()
        self._last_batch.note_loss(loss, loss_id, retain_graph)
        if self._step_watch is not None:
            self._step_watch.before_backward(self._last_batch.call)
        loader = self._dataloader
        is_last_batch = loader is not None and loader.at_end
        try:
            self._accumulation.backward(
                self._executor, loss, is_last_batch=is_last_batch, retain_graph=retain_graph, loss_id=loss_id
            )
        except RuntimeError as error:
            self._division.explain(error)
            raise
        if loader is not None:
            loader.note_training()

    def step(self, last: bool = False) -> StepResult | None:
        """Count one microbatch, and at the end of a cycle take one optimizer step.

        Args:
            last: end the cycle here, also without a new backward (leftover batches of a loader of your own, or an
                epoch that was left early; `engine.dataloader` knows its end).

        Returns:
            The step's result, or None inside an accumulation cycle.

        Raises:
            InputError: no backward since the last step.
            NonFiniteError: inf or nan, as `on_nonfinite` and `max_consecutive_skips` say; with a diagnosis, for
                which the last batch is computed once more.
            SyncError: with `debug="sync"`, on all ranks: they differ in what they should have in common.
            CheckpointError: a save in the background has failed. No step was taken: call this again to go on.
        """
        self._refuse_if_closed()
        if self._background is not None:
            self._background.before_step()
        accumulation = self._accumulation
        if not accumulation.has_backward and not (last and accumulation.in_progress):
            raise InputError(
                "engine.step() was called before engine.backward(loss): there is nothing to step with; call that first "
                "(loss.backward() does not count)"
            )
        if self._step_watch is not None:
            self._step_watch.before_step()
        updates, is_last_batch = last or accumulation.is_last_microbatch, accumulation.is_last_batch
        accumulation.count_microbatch()
        if not updates:
            return None
        try:
            try:
                self._lr.settle()
                result = self._update.step(accumulation.grad_divisor())
                accumulation.end_update()
            except BaseException:
                accumulation.clear()
                raise
            finally:
                if is_last_batch and self._dataloader is not None:  # else the last batch is fetched already, and waits
                    self._dataloader.at_end = False
        except NonFiniteError as error:
            self._explain(error)
            raise
        self._results.append(result)
        self.global_step += 1
        if self._average.values:
            self._average.after_step()
        self._lr.after(result)
        if self._compares_inputs:
            self._compares_inputs = False
            warn_of_same_inputs(self._last_batch.call, self.context)
        if self._sync is not None:
            self._sync.after_step(self.global_step, result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing inside an accumulation cycle (`step(last=True)` ends one early).

        `set_to_none` is accepted because this stands in for `optimizer.zero_grad`; gradients are always freed.
        """
        if not self._accumulation.in_progress:
            self._accumulation.clear()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the config's `clip_grad_norm`.

        Returns:
            The norm of the unscaled gradients over all ranks before clipping (0-dim).

        Raises:
            InputError: inside an accumulation cycle, or before backward.
        """
        if not self._accumulation.has_backward:
            raise InputError(
                "engine.clip_grad_norm_ was called before engine.backward(loss): there are no gradients; call it after"
            )
        if not self._accumulation.is_last_microbatch:
            raise InputError(
                f"engine.clip_grad_norm_ was called on microbatch {self._accumulation.position}, where gradients are "
                "incomplete; call it on the last one only, or set clip_grad_norm in the config"
            )
        return self._update.clip_grad_norm_(max_norm, self._accumulation.grad_divisor())

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.model.train(mode)
        if not mode:
            self._last_batch.let_go()
            self._statistics.look()
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode, and free what is left of the last training forward's graph.

        No communication: the ranks' BatchNorm statistics are already equal.
        """
        return self.train(False)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in, for computations of your own; `enabled=False` leaves it again.

        Within a model `torch.autocast(device_type, enabled=False)` does the same.
        """
        return self._precision.autocast(enabled)

    # -- what can be read --------------------------------------------------------------------------------------

    @property
    def dataloader(self) -> EngineDataLoader:
        """The training loader. Raises InputError if none was given to initialize."""
        if self._dataloader is None:
            raise InputError("no dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._dataloader

    @property
    def eval_dataloader(self) -> EngineDataLoader:
        """The evaluation loader. Raises InputError if none was given to initialize."""
        if self._eval_dataloader is None:
            raise InputError("no eval_dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._eval_dataloader

    @property
    def has_dataloader(self) -> bool:
        """Whether a training loader was given to initialize."""
        return self._dataloader is not None

    @property
    def has_eval_dataloader(self) -> bool:
        """Whether an evaluation loader was given to initialize."""
        return self._eval_dataloader is not None

    @property
    def has_criterion(self) -> bool:
        """Whether a criterion was given to initialize."""
        return self._criterion is not None

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.context.device

    @property
    def optimizer(self) -> optim.Optimizer:
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> Any:
        self._lr.settle()
        return self._lr.scheduler

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def casts(self) -> CastTable:
        """O1's lists of functions, to which a model's own can be added. Raises InputError outside O1."""
        if self._precision.casts is None:
            raise InputError("this engine casts by no lists of its own; only mode='apex' with opt_level='O1' does")
        return self._precision.casts

    def master_params(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps: the fp32 masters where there are any, else the model's parameters.

        Raises:
            InputError: between backward and step, where masters have no gradients yet.
        """
        if self._accumulation.holds_gradients:
            raise InputError(
                "engine.master_params() was called between backward and step, where masters have no gradients yet; "
                "to clip set clip_grad_norm, or call engine.clip_grad_norm_(max_norm)"
            )
        return (param for group in self.optimizer.param_groups for param in group["params"])

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give model and optimizer back as they came, with the trained weights, and free what this engine made.

        A model that was fp32 is fp32 again, with the masters' values, and whole on every rank where its layers were
        divided (all ranks call this together); the optimizer holds its parameters again.

        Raises:
            CheckpointError: what was saved in the background could not be written; the engine is closed then, too.
        """
        self._accumulation.refuse_averaged("engine.close()")
        if self._division.divides and not self._closed:  # else nothing is sent, and a rank may leave by itself
            self.context.agree_on_call("engine.close")
        try:
            self._end_automatic_saves()
            self.wait_for_save()
        finally:
            self._give_back()
            self.context.close()
            self._background = None

    def _give_back(self, whole: bool = True) -> None:
        """Without `whole`, divided layers stay so: other ranks may be gone."""
        if self._closed:
            return
        if whole:
            self._division.follow()
        self._accumulation.clear()
        self._average.values.clear()
        self._last_batch.forget()
        self._closed = True
        self.optimizer.__dict__.pop("zero_grad", None)
        self._guard.remove()
        self._update.close()
        if self._accumulation.reducer is not None:
            self._accumulation.reducer.close()
        if whole:
            self._executor.close()
        self._locks.release()
        self._division.close(whole)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        # With an error in flight the process group stays: what reports the error to the other ranks goes with it.
        if kind is None:
            self.close()
        else:
            self._end_automatic_saves(failed=True)
            self._give_back(whole=False)
            self.context.leave()

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "initialize returns one Engine, not Colossal-AI's tuple: write `engine = initialize(...)` and use "
            "engine.dataloader, engine.eval_dataloader and engine.lr_scheduler"
        )
