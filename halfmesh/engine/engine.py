"""The engine: the user's loop of forward, backward and step, in any precision and layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn

from ..amp.cast import Precision
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.statistics import StatisticsCheck
from ..amp.step_result import StepResult
from ..errors import InputError, NonFiniteError
from ..log import get_logger
from ..parallel.context import ParallelContext
from .attached import Attached
from .average import WeightAverage
from .checkpointing.lock import FolderLocks
from .cycle import GradientCycle, refuse_averaged
from .dataloader import EngineDataLoader, warn_of_same_inputs
from .health.health import KEPT, Health
from .health.last_batch import LastBatch
from .model_guard import guard
from .passes import Passes
from .scheduling import LRAdvance
from .step_watch import StepWatch

if TYPE_CHECKING:
    from ..config import Config
    from ..division import Division
    from ..effective_plan import EffectivePlan
    from .sync_check import SyncCheck

_log = get_logger(__name__)


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
        passes: Passes,
        division: Division,
        cycle: GradientCycle,
        lr: LRAdvance,
        config: Config,
        dataloader: EngineDataLoader | None = None,
        eval_dataloader: EngineDataLoader | None = None,
        sync: SyncCheck | None = None,
    ) -> None:
        self.model = model
        self.context = context
        self.config = config
        self._dataloader = dataloader
        self._eval_dataloader = eval_dataloader
        self.global_step = 0
        self._criterion = criterion
        self._update = update
        self._precision = precision
        self._cycle = cycle
        self._lr = lr
        self._passes = passes
        self._sync = sync
        self._division = division
        self._last: StepResult | None = None
        self._seen = LastBatch()
        self._results: list[StepResult | None] = [None] * KEPT
        self._compares_inputs = context.dp_size > 1 and dataloader is None
        self._closed = False
        self._background = None
        self._automatic = None
        self._attached = Attached()
        self._locks = FolderLocks()
        self._steps = StepWatch(length, dataloader) if (length := config.gradient_accumulation) > 1 else None
        self._statistics = StatisticsCheck(model, update.recipe, context.dp_rank == context.tp_rank == 0)
        self._average = WeightAverage(update)
        self._guards = list(guard(model, self.optimizer, cycle, update.recipe, context.device, division))
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own would miss the model's gradients

    # -- the loop ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the config's precision.

        Under a pipeline, in training and with gradients, it is a handle: for `criterion`, and after `backward`, with
        `keep_outputs`, to be used like the output. All ranks of a pipeline call this with the same inputs.
        """
        if self._closed:
            self._refuse_if_closed()
        if self._automatic is not None:
            self._automatic.before_forward()
        seen = self._seen if self.model.training else None
        if seen is not None:  # old outputs go before new ones are made
            seen.call = args, kwargs
            seen.output = seen.criterion = seen.value = seen.loss = None
        try:
            output = self._passes.forward(*args, **kwargs)
        except RuntimeError as error:
            self._division.explain(error)
            raise
        if seen is not None:
            seen.output = output
        return output

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value for these arguments, in the config's precision.

        Of a handle it is one, too, to be used like the loss of the whole batch after `backward`, on every rank.
        """
        if self._criterion is None:
            raise InputError("no criterion was given to initialize; pass one, or compute the loss in the loop")
        value = self._passes.criterion(self._criterion, *args, **kwargs)
        if self.model.training:
            seen = self._seen
            seen.takes_output = args[0] is seen.output if args else False
            seen.criterion = (args[1:] if seen.takes_output else args), kwargs
            seen.value = value
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
        if self._closed:
            self._refuse_if_closed()
        seen = self._seen
        seen.loss_id = loss_id
        if loss is not seen.value:
            seen.loss = loss
        elif seen.takes_output and not retain_graph:  # what the criterion was given is known without it
            seen.output = seen.value = None
        loader = self._dataloader
        if self._steps is not None:
            self._steps.before_backward(seen.call)
        try:
            self._cycle.add(loss, loader is not None and loader.at_end, retain_graph, loss_id)
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
        if self._closed:
            self._refuse_if_closed()
        if self._background is not None:
            self._background.before_step()
        cycle = self._cycle
        if not cycle.fresh and not (last and cycle.begun):
            raise InputError(
                "engine.step() was called before engine.backward(loss): there is nothing to step with; call that first "
                "(loss.backward() does not count)"
            )
        if self._steps is not None:
            self._steps.before_step()
        closes, at_end = last or cycle.closes, cycle.at_end
        cycle.count()
        if not closes:
            return None
        try:
            try:
                if self._lr.scheduler is not None:
                    self._lr.settle()
                result = self._update.step(cycle.divisor())
            finally:
                cycle.end()
                if at_end and self._dataloader is not None:  # else a batch may be fetched that is the last, and waits
                    self._dataloader.at_end = False
        except NonFiniteError as error:
            if self.config.name is not None:
                error.add_note(f"in the engine named {self.config.name!r}")
            self._explain(error)
            raise
        self._last = self._results[self.global_step % KEPT] = result
        self.global_step += 1
        if self._average.values:
            self._average.after_step()
        if self._lr.scheduler is not None:
            self._lr.after(result)
        if self._compares_inputs:
            self._compares_inputs = False
            warn_of_same_inputs(self._seen.call, self.context)
        if self._sync is not None:
            self._sync.after_step(self.global_step, result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing inside an accumulation cycle (`step(last=True)` ends one early).

        `set_to_none` is accepted because this stands in for `optimizer.zero_grad`; gradients are always freed.
        """
        if not self._cycle.begun:
            self._cycle.clear()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the config's `clip_grad_norm`.

        Returns:
            The norm of the unscaled gradients over all ranks before clipping (0-dim).

        Raises:
            InputError: inside an accumulation cycle, or before backward.
        """
        if not self._cycle.fresh:
            raise InputError(
                "engine.clip_grad_norm_ was called before engine.backward(loss): there are no gradients; call it after"
            )
        if not self._cycle.closes:
            raise InputError(
                f"engine.clip_grad_norm_ was called on microbatch {self._cycle.position}, where gradients are "
                "incomplete; call it on the last one only, or set clip_grad_norm in the config"
            )
        return self._update.clip_grad_norm_(max_norm, self._cycle.divisor())

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.model.train(mode)
        if not mode:
            self._seen.let_go()
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

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give model and optimizer back as they came, with the trained weights, and free what this engine made.

        A model that was fp32 is fp32 again, with the masters' values, and whole on every rank where its layers were
        divided (all ranks call this together); the optimizer holds its parameters again.

        Raises:
            CheckpointError: what was saved in the background could not be written; the engine is closed then, too.
        """
        refuse_averaged(self._cycle, "engine.close()")
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
        self._cycle.clear()
        self._average.values.clear()
        self._seen.forget()
        self._closed = True
        self.optimizer.__dict__.pop("zero_grad", None)
        for remove in self._guards:
            remove()
        self._update.close()
        if self._cycle.reducer is not None:
            self._cycle.reducer.close()
        if whole:
            self._passes.close()
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
