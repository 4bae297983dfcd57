"""The engine: the user's loop of forward, backward and step, in any precision and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import torch
from torch import nn, optim

from .amp.o1 import CastTable
from .amp.step_result import StepResult
from .averaged_model import AveragedModel
from .checkpoint.attached import Stateful
from .checkpoint.checkpointer import Checkpointer
from .data.loader import EngineDataLoader
from .errors import InputError, NonFiniteError
from .loop.parts import EngineHook, EngineParts
from .summary import EffectivePlan

if TYPE_CHECKING:
    from .debug.precision_report import PrecisionReport


class Engine:
    """What `halfmesh.initialize` returns. The loop is the same for every config:

        for images, labels in engine.dataloader:
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()

    Attributes:
        model: what this rank holds of the model, under the whole model's parameter names.
        context: the parallel layout.
        config: the config, as loaded.
        plan: what the config came down to, as initialize has printed it.
    """

    def __init__(
        self, parts: EngineParts, checkpointer: Checkpointer, hooks: Iterable[EngineHook], plan: EffectivePlan
    ) -> None:
        self.model = parts.model
        self.context = parts.context
        self.config = parts.config
        self.plan = plan
        self._parts = parts
        self._checkpointer = checkpointer
        self._set_hooks(hooks)
        self.optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]  # its own would miss the model's gradients

    def _set_hooks(self, hooks: Iterable[EngineHook]) -> None:
        self._hooks = tuple(hooks)
        self._before_forward = self._hooks_on("before_forward")
        self._after_backward = self._hooks_on("after_backward")
        self._before_step = self._hooks_on("before_step")
        self._after_step = self._hooks_on("after_step")
        self._on_error = self._hooks_on("on_error")
        before_fetch = self._hooks_on("before_fetch")
        if self._parts.dataloader is not None and before_fetch:
            self._parts.dataloader.before_fetch = lambda: _call(before_fetch)

    @contextmanager
    def _with_hook(self, hook: EngineHook) -> Iterator[None]:
        """A scope in which `hook` takes part in the loop, too."""
        self._set_hooks([*self._hooks, hook])
        try:
            yield
        finally:
            self._set_hooks(other for other in self._hooks if other is not hook)

    def _hooks_on(self, event: str) -> tuple[Callable[..., None], ...]:
        """The hooks' methods for `event`, of those that override it."""
        default = getattr(EngineHook, event)
        return tuple(getattr(hook, event) for hook in self._hooks if getattr(type(hook), event) is not default)

    # -- the loop ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the config's precision.

        Under a pipeline, in training and with gradients, it is a handle: for `criterion`, and after `backward`, with
        `keep_outputs`, to be used like the output. All ranks of a pipeline call this with the same inputs.
        """
        parts = self._parts
        parts.refuse_if_closed()
        for hook in self._before_forward:
            hook(args, kwargs)
        try:
            with parts.guard.own_call():
                return parts.executor.forward(*args, **kwargs)
        except RuntimeError as error:
            parts.division.explain(error)
            raise

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value for these arguments, in the config's precision.

        Of a handle it is one, too, to be used like the loss of the whole batch after `backward`, on every rank.
        """
        parts = self._parts
        if parts.criterion is None:
            raise InputError("no criterion was given to initialize; pass one, or compute the loss in the loop")
        return parts.executor.criterion(parts.criterion, *args, **kwargs)

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
        parts = self._parts
        parts.refuse_if_closed()
        loader = parts.dataloader
        is_last_batch = loader is not None and loader.at_end
        try:
            parts.accumulation.backward(
                parts.executor, loss, is_last_batch=is_last_batch, retain_graph=retain_graph, loss_id=loss_id
            )
        except RuntimeError as error:
            parts.division.explain(error)
            raise
        for hook in self._after_backward:
            hook(loss)
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
            NonFiniteError: inf or nan, as `on_nonfinite` and `max_consecutive_skips` say; with a diagnosis.
            SyncError: with `debug="sync"`, on all ranks: they differ in what they should have in common.
        """
        parts = self._parts
        parts.refuse_if_closed()
        for hook in self._before_step:
            hook()
        accumulation = parts.accumulation
        if not accumulation.has_backward and not (last and accumulation.in_progress):
            raise InputError(
                "engine.step() was called before engine.backward(loss): there is nothing to step with; call that first "
                "(loss.backward() does not count)"
            )
        updates, is_last_batch = last or accumulation.is_last_microbatch, accumulation.is_last_batch
        accumulation.count_microbatch()
        if not updates:
            return None
        try:
            parts.lr.settle()
            result = parts.update.step(accumulation.grad_divisor())
            accumulation.end_update()
        except BaseException as error:
            accumulation.clear()
            if isinstance(error, NonFiniteError):
                for on_error in self._on_error:
                    on_error(error)
            raise
        finally:
            if is_last_batch and parts.dataloader is not None:  # else the last batch is fetched already, and waits
                parts.dataloader.at_end = False
        parts.results.append(result)
        parts.global_step += 1
        if parts.average.values:
            parts.average.after_step()
        parts.lr.after(result)
        for after_step in self._after_step:
            after_step(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; does nothing inside an accumulation cycle (`step(last=True)` ends one early).

        `set_to_none` is accepted because this stands in for `optimizer.zero_grad`; gradients are always freed.
        """
        if not self._parts.accumulation.in_progress:
            self._parts.accumulation.clear()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the config's `clip_grad_norm`.

        Returns:
            The norm of the unscaled gradients over all ranks before clipping (0-dim).

        Raises:
            InputError: inside an accumulation cycle, or before backward.
        """
        accumulation = self._parts.accumulation
        if not accumulation.has_backward:
            raise InputError(
                "engine.clip_grad_norm_ was called before engine.backward(loss): there are no gradients; call it after"
            )
        if not accumulation.is_last_microbatch:
            raise InputError(
                f"engine.clip_grad_norm_ was called on microbatch {accumulation.position}, where gradients are "
                "incomplete; call it on the last one only, or set clip_grad_norm in the config"
            )
        return self._parts.update.clip_grad_norm_(max_norm, accumulation.grad_divisor())

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        self.model.train(mode)
        if not mode:
            self._parts.statistics.look()
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode. No communication: the ranks' BatchNorm statistics are already equal."""
        return self.train(False)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The scope that forward and criterion run in, for computations of your own; `enabled=False` leaves it again.

        Within a model `torch.autocast(device_type, enabled=False)` does the same.
        """
        return self._parts.precision.autocast(enabled)

    # -- what can be read --------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> optim.Optimizer:
        """The user's optimizer. It steps through the engine only."""
        return self._parts.update.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler given to initialize; who advances it is `config.lr_interval`."""
        self._parts.lr.settle()
        return self._parts.lr.scheduler

    @property
    def dataloader(self) -> EngineDataLoader:
        """The loader given, sharded over the data ranks, its batches on the device. Raises InputError without one."""
        if self._parts.dataloader is None:
            raise InputError("no dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._parts.dataloader

    @property
    def eval_dataloader(self) -> EngineDataLoader:
        """The same for evaluation, without padding: no sample is there twice. Raises InputError without one."""
        if self._parts.eval_dataloader is None:
            raise InputError("no eval_dataloader was given to initialize; pass one, or iterate a loader of your own")
        return self._parts.eval_dataloader

    @property
    def has_dataloader(self) -> bool:
        """Whether a training loader was given to initialize."""
        return self._parts.dataloader is not None

    @property
    def has_eval_dataloader(self) -> bool:
        """Whether an evaluation loader was given to initialize."""
        return self._parts.eval_dataloader is not None

    @property
    def has_criterion(self) -> bool:
        """Whether a criterion was given to initialize."""
        return self._parts.criterion is not None

    @property
    def global_step(self) -> int:
        """Optimizer steps attempted so far, skipped ones included."""
        return self._parts.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._parts.global_step = step

    @property
    def device(self) -> torch.device:
        """Where this rank trains."""
        return self.context.device

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    @property
    def casts(self) -> CastTable:
        """O1's lists of functions, to which a model's own can be added. Raises InputError outside O1."""
        if self._parts.precision.casts is None:
            raise InputError("this engine casts by no lists of its own; only mode='apex' with opt_level='O1' does")
        return self._parts.precision.casts

    @property
    def loss_scale(self) -> float:
        """The current loss scale (of loss_id 0); 1.0 without loss scaling. Reads the device."""
        return self.loss_scales[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The current loss scale of each loss. Reads the device."""
        return self._parts.update.loss_scales.current()

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far because of inf or nan. Reads the device."""
        return self._parts.update.skip_counter.skipped

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the last update (`StepResult.grad_norm`); None before the first, or if not measured."""
        return self._parts.results[-1].grad_norm if self._parts.results else None

    def master_params(self) -> Iterator[nn.Parameter]:
        """What the optimizer steps: the fp32 masters where there are any, else the model's parameters.

        Raises:
            InputError: between backward and step, where masters have no gradients yet.
        """
        if self._parts.accumulation.holds_gradients:
            raise InputError(
                "engine.master_params() was called between backward and step, where masters have no gradients yet; "
                "to clip set clip_grad_norm, or call engine.clip_grad_norm_(max_norm)"
            )
        return (param for group in self.optimizer.param_groups for param in group["params"])

    # -- reports -----------------------------------------------------------------------------------------------

    @contextmanager
    def precision_report(self) -> Iterator[PrecisionReport]:
        """What the config's precision does to the numbers of each layer, measured in a real update:

            with engine.precision_report() as report:
                loss = engine.criterion(engine(images), labels)
                engine.backward(loss)
                engine.step()
            print(report)

        All ranks together; with accumulation go through a whole cycle. Nothing of the run changes, but compiled modules
        run uncompiled in it, and each module is waited for.

        Yields:
            The report, filled at the end of the block, the same on all ranks; `report.to_dict()` gives plain values.

        Raises:
            InputError: within an accumulation cycle; or no step was taken in the block.
        """
        self._parts.before_call("engine.precision_report()")
        from .debug.precision import PrecisionSurvey

        survey = PrecisionSurvey(self._parts)
        survey.attach()
        try:
            with self._with_hook(survey):
                yield survey.report
        finally:
            survey.detach()
        survey.finish()

    @contextmanager
    def count_flops(self) -> Iterator[dict[str, int]]:
        """Floating point operations of forward, criterion and backward, a multiplication and an addition being two:

            with engine.count_flops() as flops:
                engine.backward(engine.criterion(engine(images), labels))

        Products of matrices, convolutions and attention are counted while they run; what is computed again for
        activation checkpointing, and what comes after the first `engine.step`, is not. All ranks together. Nothing of
        the run changes, but compiled modules run uncompiled in it.

        Yields:
            By dtype, {"torch.bfloat16": 12345}, of all the ranks that compute this data rank's batch; filled at the end
            of the block.

        Raises:
            InputError: within an accumulation cycle; or it cannot be counted (an operator without a formula).
        """
        self._parts.before_call("engine.count_flops()")
        from .debug.flops import FlopCounter, counted

        counter = FlopCounter()
        with self._with_hook(counter), counted(self._parts, counter) as flops:
            yield flops

    # -- saving and loading ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, for an exact resume in the same layout: of a divided model this
        rank's parts.

        The model's entry holds the fp32 masters where there are any, and the other weights in the dtype they came
        with; `engine.model.state_dict()` does, too. Tensors are not copied: save or copy them before the next step.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost.
        """
        self._parts.accumulation.refuse_unfinished("engine.state_dict()")
        return self._checkpointer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken, with the batch after the last one that was trained on."""
        self._parts.accumulation.refuse_averaged("engine.load_state_dict()")
        self._checkpointer.load_state_dict(state)

    def save(self, directory: str | Path, *, keep: int | None = None, in_background: bool = False) -> Path:
        """Write a checkpoint of everything, `directory/step-00001200`: complete, or not at all. All ranks together.

        It holds the tensors of the whole, undivided model, and can be loaded in any layout and precision.

        Args:
            directory: a folder that all ranks share; it is made if it is not there.
            keep: how many checkpoints to leave there, this one included; the oldest go. None: all.
            in_background: return as soon as the state is copied to the host, and write it while training goes on. The
                copy takes as much memory as what is saved of this rank, and is kept for the next save. The next save,
                `load`, `close`, `wait_for_save` and the end of the process wait until it is written.

        Returns:
            The checkpoint's folder. With `in_background` it is there when it is complete.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost; or state that cannot be saved.
            CheckpointError: some rank could not write; raised on all ranks. Earlier checkpoints are intact. In the
                background it is logged, and raised by the next `save`, `load`, `wait_for_save` or `close`.
        """
        self._parts.before_call("engine.save()")
        return self._checkpointer.save(Path(directory), keep, in_background)

    def wait_for_save(self) -> None:
        """Return when what `save(in_background=True)` began is complete, at once if there is nothing.

        Raises:
            CheckpointError: it failed; raised on all ranks, which call this together.
        """
        self._checkpointer.wait()

    def load(self, directory: str | Path) -> Path:
        """Go on from a checkpoint of `save`, in this engine's layout and precision. All ranks together.

        In the layout in which it was saved, training goes on exactly as it would have, with the batch after the last
        one that was trained on.

        Args:
            directory: what was given to `save`, of which the newest complete checkpoint is taken, or a checkpoint.

        Returns:
            The checkpoint's folder.

        Raises:
            CheckpointError: there is none, or it was damaged or changed since it was written.
            InputError: it is of another model or optimizer. Nothing has changed then.
        """
        self._parts.before_call("engine.load()", keeps_gradients=False)
        return self._checkpointer.load(Path(directory))

    def attach(self, name: str, holder: Stateful) -> None:
        """Save the state of `holder` with the engine's, whoever saves: counters of the loop, for example.

        `holder.state_dict()` is called on each rank by every save, and must not talk to other ranks. A load gives each
        rank its own back by `holder.load_state_dict(state)`, in another layout all ranks that of rank 0. What was
        loaded before this call is given at once.

        Args:
            name: by which it is found in a checkpoint.

        Raises:
            InputError: the name is taken.
        """
        self._parts.refuse_if_closed()
        self._checkpointer.attached.attach(name, holder)

    def detach(self, name: str, *, keep: bool = True) -> None:
        """Let go of what `attach` was given.

        Args:
            keep: its last state goes on being saved, and is given to what is attached by that name next.

        Raises:
            InputError: there is nothing of that name.
        """
        self._checkpointer.attached.detach(name, keep)

    def preempt(self) -> None:
        """Tell the run to end, as the config's `checkpoint.signals` do, on any rank: all ranks save after this step
        or one of the next two, and raise `Preempted`, which ends the process with status 75. May be called by a handler
        of signals.

        Raises:
            InputError: the config has no `checkpoint`.
        """
        self._parts.refuse_if_closed()
        self._checkpointer.preempt()

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the whole model's weights, in full precision, under the names that they have without halfmesh. All
        ranks together; rank 0 writes, and has no more than one file in memory.

        Args:
            path: the file. What is larger than `max_file_gb` goes into several, with an index, as Hugging Face names
                them: model-00001-of-00002.safetensors, model.safetensors.index.json.
            format: "torch" is what `torch.save(model.state_dict(), path)` writes.

        Raises:
            CheckpointError: it could not be written. InputError: an argument is wrong.
        """
        self._parts.refuse_if_closed()
        self.context.agree_on_call("engine.save_weights")
        self._checkpointer.save_weights(path, format, max_file_gb)

    def load_weights(self, path: str | Path) -> None:
        """Take the model's weights, and masters, from a file of `save_weights`, or of another program that has the same
        names; each rank reads its part. The optimizer's state stays as it is. All ranks together.

        Raises:
            CheckpointError: it cannot be read. InputError: names or shapes differ, or values are beyond fp16 where the
                model computes in it. Nothing has changed then.
        """
        self._parts.before_call("engine.load_weights()")
        self._checkpointer.load_weights(Path(path))

    def averaged_model(self, decay: float) -> AveragedModel:
        """Begin an exponential moving average (EMA) of the weights. All ranks call this.

        It begins with the weights as they are now; after a load of a checkpoint that has an average, with that.
        `load` and `load_weights` of what has none begin it anew, with the loaded weights.

        Args:
            decay: how much of the average each update keeps: 0.999, or 0.9999 for long runs.

        Raises:
            InputError: `decay` is not within 0 <= decay < 1, or this engine has an average.
        """
        self._parts.refuse_if_closed()
        self._parts.accumulation.refuse_averaged("engine.averaged_model()")
        average = self._parts.average
        if average.decay is not None:
            raise InputError(
                f"engine.averaged_model({decay}): this engine averages its weights already, with decay="
                f"{average.decay}; use what the first call returned, and set its decay to change that"
            )
        model = AveragedModel(self._parts, self._checkpointer, decay)
        average.begin_anew(besides=average.values)
        return model

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Give model and optimizer back as they came, with the trained weights, and free what this engine made.

        A model that was fp32 is fp32 again, with the masters' values, and whole on every rank where its layers were
        divided (all ranks call this together); the optimizer holds its parameters again.

        Raises:
            CheckpointError: what was saved in the background could not be written; the engine is closed then, too.
        """
        parts = self._parts
        parts.accumulation.refuse_averaged("engine.close()")
        if parts.division.divides and not parts.closed:  # else nothing is sent, and a rank may leave by itself
            self.context.agree_on_call("engine.close")
        try:
            self._close_hooks(None)
            self._checkpointer.wait()
        finally:
            self._give_back()
            self.context.close()

    def _close_hooks(self, error: BaseException | None) -> None:
        """End the hooks, because of `error` if there is one."""
        hooks, self._hooks = self._hooks, ()
        for hook in hooks:
            hook.close(error)

    def _give_back(self, whole: bool = True) -> None:
        """Without `whole`, divided layers stay so: other ranks may be gone."""
        parts = self._parts
        if parts.closed:
            return
        if whole:
            parts.division.follow()
        parts.accumulation.clear()
        parts.average.values.clear()
        parts.closed = True
        self.optimizer.__dict__.pop("zero_grad", None)
        parts.guard.remove()
        parts.update.close()
        if parts.accumulation.reducer is not None:
            parts.accumulation.reducer.close()
        if whole:
            parts.executor.close()
        self._checkpointer.close()
        parts.division.close(whole)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # With an error in flight the process group stays: what reports the error to the other ranks goes with it.
        if kind is None:
            self.close()
        else:
            self._close_hooks(error)
            self._give_back(whole=False)
            self.context.leave()

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "initialize returns one Engine, not Colossal-AI's tuple: write `engine = initialize(...)` and use "
            "engine.dataloader, engine.eval_dataloader and engine.lr_scheduler"
        )


def _call(hooks: tuple[Callable[[], None], ...]) -> None:
    for hook in hooks:
        hook()
