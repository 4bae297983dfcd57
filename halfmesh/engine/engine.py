"""The engine: the user's loop of forward, backward and step, in any precision and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import optim

from ..amp.o1 import CastTable
from ..amp.step_result import StepResult
from ..checkpoint import export
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.rank_state import Stateful
from ..data.loader import EngineDataLoader
from ..errors import InputError, NonFiniteError, counted, reject_closure
from ..utils.engine_hook import Hooks, Progress
from .accumulation import Accumulation, MixedPrecisionState
from .ema import AveragedModel
from .executor import DirectExecutor, ModelGuard
from .pipeline_handles import sequences_of
from .summary import EffectivePlan

if TYPE_CHECKING:
    from ..checkpoint.preemption import PreemptionHook
    from ..checkpoint.state import ShardedState
    from ..config import Config
    from ..debug.nonfinite import NonFiniteProbes
    from ..debug.precision import PrecisionReport
    from ..debug.probes import Criterion
    from ..parallel.mesh import ParallelContext
    from .lr_scheduler import LRAdvance
    from .pipeline_executor import PipelineExecutor


@dataclass(eq=False, repr=False, kw_only=True)
class Engine(MixedPrecisionState):
    """The engine that `halfmesh.initialize` returns. The loop is the same for every precision and layout:

        for images, labels in engine.dataloader:
            engine.zero_grad()
            output = engine(images)
            loss = engine.criterion(output, labels)
            engine.backward(loss)
            engine.step()

    Attributes:
        model: this rank's stage and shards of the model, under the full model's parameter names.
        context: the parallel layout.
        config: the config, as loaded.
        plan: the effective plan that initialize prints.
    """

    context: ParallelContext
    config: Config
    plan: EffectivePlan
    _state: ShardedState
    _progress: Progress
    _criterion: Criterion
    _accumulation: Accumulation
    _executor: DirectExecutor | PipelineExecutor
    _guard: ModelGuard
    _lr: LRAdvance
    _dataloader: EngineDataLoader | None
    _eval_dataloader: EngineDataLoader | None
    _hooks: Hooks
    _probes: NonFiniteProbes
    _checkpointer: Checkpointer
    _preemption: PreemptionHook | None
    _ends: ExitStack

    def __post_init__(self) -> None:
        self.model = self._state.model
        self._update = self._state.update
        self._parallel = self._state.parallel_model
        self._average = self._state.average
        self._precision = self._accumulation.precision
        self._pipeline = None if isinstance(self._executor, DirectExecutor) else self._executor
        self._forward = self._parallel.full_call(self.model, self._executor.forward)
        self._closed = False

    def __repr__(self) -> str:
        """The configuration, as `initialize` prints it, and the updates that were made."""
        model = type(self.model).__name__
        return f"Engine of {model}, after {counted(self.global_step, 'update')}\n{str(self.plan).partition(chr(10))[2]}"

    # -- the loop ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for these inputs, in the config's precision.

        Under a pipeline, in training, a handle for `criterion`; with `keep_outputs` it is the output after `backward`.
        """
        return self._run(None, self._forward, args, kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the model than forward, in the same way as `engine(...)`.

            images = engine.call("decode", z)
            tokens = engine.call("generate", input_ids, max_new_tokens=20)

        Inputs and outputs are cast in the config's precision, and fsdp gathers the weights. Under fsdp and expert the
        ranks compute together: each must call the same number of layers (in Hugging Face's `generate`,
        `synced_gpus=True`). Tensor ranks must pass the same arguments and draw the same random numbers.

        Raises:
            InputError: under a pipeline; or, with `parallel.context`, if gradients are on.
        """
        return self._run(method, self._executor.method(method), args, kwargs)

    def _run(
        self, method: str | None, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self._closed:
            self._reject_if_closed()
        self._progress.calls += 1
        self._update.sync_writes(waits=False)
        for told in self._hooks.calls["before_forward"]:
            told(method, args, kwargs)
        try:
            with self._guard:
                return function(*args, **kwargs)
        except RuntimeError as error:
            self._explain(error)
            raise

    def criterion(self, *args: Any, **kwargs: Any) -> Any:
        """The criterion's value for these arguments, in the config's precision.

        Under a pipeline it takes the handle of the output and returns a handle of the loss, whose value (of the full
        batch, on every rank) is there after `backward`.
        """
        if self._criterion.function is None:
            raise InputError("no criterion was given to initialize; pass one, or compute the loss in the loop")
        try:
            function: Any = self._criterion.function
            if (axis := self._parallel.sequences) is not None:
                function, args, kwargs = axis.criterion_call(function, args, kwargs, sequences_of((args, kwargs)))
            return self._executor.criterion(function, *args, **kwargs)
        except RuntimeError as error:
            self._explain(error)
            raise

    def backward(self, loss: Any, loss_id: int = 0, *, retain_graph: bool = False) -> None:
        """Add the gradients of `loss`, a scalar tensor (or (sum, weight) with `loss_reduction="weighted"`).

        At the end of a cycle the gradients are reduced over the data ranks while backward runs. Under a pipeline,
        forward and backward of all microbatches run here.

        Args:
            loss_id: the index of the loss, below `num_losses` (mode APEX); each loss has its own loss scale.

        Raises:
            InputError: `loss` is not a scalar tensor, or `loss_id` is unknown.
        """
        if self._closed:
            self._reject_if_closed()
        for told in self._hooks.calls["before_backward"]:
            told(loss)
        sequences = self._parallel.sequences
        if sequences is not None:
            sequences.check_loss(loss)
        loader = self._dataloader
        is_last_batch = loader is not None and loader.at_end
        try:
            with nullcontext() if sequences is None else sequences.mode:
                self._accumulation.backward(loss, is_last_batch, retain_graph, loss_id, self._pipeline)
        except RuntimeError as error:
            self._explain(error)
            raise
        for told in self._hooks.calls["after_backward"]:
            told(loss)
        if loader is not None:
            loader.note_training()

    def step(self, closure: None = None, *, last: bool = False) -> StepResult | None:
        """Count one microbatch; at the end of an accumulation cycle take one optimizer step.

        Args:
            closure: must be None; it is there for code written for torch's optimizers.
            last: end the cycle here, even without a new backward: after the last batch of your own loader, or after a
                `break`. (`engine.dataloader` knows its end.)

        Returns:
            The step's result, or None inside an accumulation cycle.

        Raises:
            InputError: no backward since the last step, or a closure.
            NonFiniteError: inf or nan under `on_nonfinite="raise"`, or in `max_consecutive_skips` updates in a row; it
                has a diagnosis.
            SyncError: under `debug="sync"`, values that should be equal on all ranks differ.
        """
        if closure is not None:
            reject_closure("engine.step", closure)
        if self._closed:
            self._reject_if_closed()
        accumulation, progress = self._accumulation, self._progress
        lr = None if self._lr.scheduler is None else self._lr
        if lr is not None:
            lr.check()
        for told in self._hooks.calls["before_step"]:
            told()
        if not accumulation.has_backward and not (last and accumulation.index):
            raise InputError("engine.step() was called before engine.backward(loss), which replaces loss.backward()")
        updates, is_last_batch = last or accumulation.is_last_microbatch, accumulation.is_last_batch
        if updates and lr is not None:
            lr.settle()
        accumulation.index += accumulation.has_backward
        accumulation.has_backward = False
        if not updates:
            return None
        try:
            result = accumulation.step()
        except torch.OutOfMemoryError as error:
            self._explain(error)
            raise
        except NonFiniteError as error:
            self._probes.explain(error)
            raise
        finally:
            if is_last_batch and self._dataloader is not None:  # else the last batch is fetched already, and waits
                self._dataloader.at_end = False
        progress.results.append(result)
        progress.global_step += 1
        progress.calls = 0
        if self._average.values:
            self._average.after_step(progress.global_step)
        if lr is not None:
            lr.after(result)
        if (nears_limit := self._update.skip_counter.nears_limit) != self._probes.attached:
            self._probes.watch(nears_limit, self._hooks)
        for told in self._hooks.calls["after_step"]:
            told(result)
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Free the gradients; does nothing inside an accumulation cycle. `set_to_none` is ignored."""
        if not self._accumulation.index:
            self._accumulation.clear()

    def clip_grad_norm_(self, max_norm: float, *, last: bool = False) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the config's `clip_grad_norm`.

        Returns the norm of the unscaled gradients over all ranks before clipping (0-dim). `last=True` ends the cycle
        here, as in `step`. Raises InputError inside an accumulation cycle, or before backward.
        """
        self._accumulation.reject_incomplete("engine.clip_grad_norm_", last)
        return self._update.clip_grad_norm_(max_norm, self._accumulation.grad_divisor())

    def unscale_gradients(self, *, last: bool = False) -> None:
        """Make each `param.grad` what it is in fp32 in one process, so that you can read or change it before `step`.

            engine.backward(loss)
            engine.unscale_gradients()
            torch.nn.utils.clip_grad_value_(engine.model.parameters(), 0.1)
            engine.step()

        The gradients of half-precision parameters become fp32. If one holds inf or nan now, `step` still skips the
        update. Call it after the last backward of an update, on all ranks. `last=True` ends the cycle here, as in
        `step`.

        Raises:
            InputError: called before that backward; or this rank holds only shards of the gradients (zero1, tensor,
                expert, and fsdp under a loss scale).
        """
        self._accumulation.unscale(last)

    def train(self, mode: bool = True) -> Engine:
        """Put the model into training mode."""
        if not self._closed:  # here too: of an evaluation loader a rank may have no batch
            self._update.sync_writes()
        self.model.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the model into evaluation mode."""
        return self.train(False)

    def autocast(self, enabled: bool = True) -> AbstractContextManager[Any]:
        """The autocast scope of forward and criterion, for your own computations; `enabled=False` turns it off."""
        return self._precision.autocast(enabled)

    # -- properties --------------------------------------------------------------------------------------------

    @property
    def optimizer(self) -> optim.Optimizer:
        """Your optimizer. Of several, one over all of their groups, which has them as `parts`. Only the engine may step
        it."""
        return self._update.optimizer

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler given to initialize, or a list of several; the engine advances it by `config.lr_interval`."""
        self._lr.settle()
        return self._lr.scheduler

    @property
    def dataloader(self) -> EngineDataLoader:
        """The training loader, sharded over the data ranks; batches arrive on the device. Raises InputError if none was
        given."""
        return _required(self._dataloader, "dataloader")

    @property
    def eval_dataloader(self) -> EngineDataLoader:
        """The evaluation loader, sharded without padding: each sample once. Raises InputError if none was given.

        Under fsdp and expert every forward needs all data ranks. There a rank with fewer batches repeats its last calls
        of the engine when its loop ends (not after a `break`), and drops their results.
        """
        return _required(self._eval_dataloader, "eval_dataloader")

    @property
    def has_dataloader(self) -> bool:
        """True if a training loader was given to initialize."""
        return self._dataloader is not None

    @property
    def has_eval_dataloader(self) -> bool:
        """True if an evaluation loader was given to initialize."""
        return self._eval_dataloader is not None

    @property
    def has_criterion(self) -> bool:
        """True if a criterion was given to initialize."""
        return self._criterion.function is not None

    @property
    def global_step(self) -> int:
        """Optimizer steps attempted so far, skipped ones included."""
        return self._progress.global_step

    @global_step.setter
    def global_step(self, step: int) -> None:
        self._progress.global_step = step

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return self.context.device

    @property
    def training(self) -> bool:
        """True if the model is in training mode."""
        return self.model.training

    @property
    def casts(self) -> CastTable:
        """O1's cast lists, where you can register your model's functions. Raises InputError outside O1."""
        if self._precision.casts is None:
            raise InputError("this engine has no cast lists; only mode='apex' with opt_level='O1' has")
        return self._precision.casts

    @property
    def grad_norm(self) -> float | None:
        """Gradient norm of the last update (`StepResult.grad_norm`); None before the first, or if not measured."""
        results = self._progress.results
        return results[-1].grad_norm if results else None

    # -- reports -----------------------------------------------------------------------------------------------

    @contextmanager
    def precision_report(self) -> Iterator[PrecisionReport]:
        """Measure in a real update what the precision does to the numbers of each layer. Call it on all ranks.

            with engine.precision_report() as report:
                loss = engine.criterion(engine(images), labels)
                engine.backward(loss)
                engine.step()
            print(report)

        The report is filled at the end of the block, the same on all ranks; `report.to_dict()` returns plain values.
        Compiled modules run uncompiled inside. Raises InputError inside an accumulation cycle, or without a step.
        """
        self._before_call("engine.precision_report()")
        from ..debug.precision import PrecisionSurvey

        survey = PrecisionSurvey(self._state, self._executor.stages, self._progress)
        survey.attach()
        try:
            with self._hooks.added(survey):
                yield survey.report
        finally:
            survey.detach()
        survey.finish(self.context)

    # -- saving and loading ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of everything that the next step depends on, for an exact resume in the same layout.

        Weights are the fp32 masters where there are any. Tensors are not copied: save or copy them before the next
        step. Raises InputError inside an accumulation cycle, whose gradients would be lost.
        """
        self._accumulation.reject_unfinished("engine.state_dict()")
        return self._checkpointer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, keep: Sequence[str] = ()) -> None:
        """Restore a `state_dict`: the next step is the one that would have followed it. `keep` is as in `load`."""
        self._accumulation.reject_averaged("engine.load_state_dict()")
        self._checkpointer.reject_unfit(state, keep)
        self._accumulation.clear()
        self._checkpointer.load_state_dict(state, keep)
        self._hooks.run("after_load")

    def save(self, directory: str | Path, *, keep: int | None = None, in_background: bool = False) -> Path:
        """Write a complete checkpoint, `directory/step-00001200`, or none at all. Call it on all ranks.

        You can load it in any layout and precision. Returns its folder.

        Args:
            directory: a folder that all ranks share; it is created if missing.
            keep: the number of checkpoints to keep there, this one included; the oldest are deleted. None: all.
            in_background: copy the state to the host (its size once more, kept for the next save), return, and write it
                while training continues. The next `save`, `load`, `wait_for_save` or `close` waits for it. An error is
                logged at once, and raised on all ranks by the call that waits.

        Raises:
            InputError: inside an accumulation cycle, whose gradients would be lost; or for state that cannot be saved.
            CheckpointError: some rank could not write; raised on all ranks. Earlier checkpoints are intact.
        """
        self._before_call("engine.save()")
        return self._checkpointer.save(Path(directory), keep, in_background)

    def wait_for_save(self) -> None:
        """Wait until `save(in_background=True)` is complete. Call it on all ranks. Raises CheckpointError if the save
        failed."""
        self._checkpointer.wait()

    def load(self, directory: str | Path, *, keep: Sequence[str] = ()) -> Path:
        """Resume from a checkpoint of `save`, in this engine's layout and precision. Call it on all ranks.

        `directory` is a checkpoint, or a folder of checkpoints, of which the newest complete one is loaded. Returns the
        checkpoint's folder. In the layout that saved it, training resumes exactly, with the next batch.

        Args:
            keep: what stays as this run gave it. "lr_scheduler": the schedule, which may be of another class, the
                learning rates and a momentum that it cycles. It is advanced to the step of the saved one, so one that
                counts no steps (ReduceLROnPlateau) is rejected. "optimizer_settings": the weight decay and other
                settings that differ between the two runs; without a scheduler the learning rates as well.

        Raises:
            CheckpointError: there is none, or it is damaged.
            InputError: it is of another model or optimizer, or `keep` is not possible. Nothing has changed then.
        """
        self._before_call("engine.load()", keeps_gradients=False)
        stored = self._checkpointer.find(Path(directory), keep)
        self._accumulation.clear()
        self._checkpointer.load(stored, keep)
        self._hooks.run("after_load")
        return stored.folder

    def attach(self, name: str, holder: Stateful | dict[str, Any]) -> None:
        """Save the state of `holder` together with the engine's, under `name`: counters of your loop, for example.

            best = {"accuracy": 0.0}
            engine.attach("best", best)  # engine.load updates it in place

        `holder` is a dict, or an object with `load_state_dict(state)` and `state_dict()`, which every save calls and
        which must not communicate. A load restores each rank's state, or in another layout rank 0's; a state loaded
        before this call is restored at once. Raises InputError if the name is taken.
        """
        self._reject_if_closed()
        self._checkpointer.attached.attach(name, holder)

    def detach(self, name: str, *, keep: bool = True) -> None:
        """Undo `attach`. With `keep`, checkpoints still hold the last state, for the next holder of that name."""
        self._checkpointer.attached.detach(name, keep)

    def preempt(self) -> None:
        """End the run as the config's `checkpoint.signals` do. You can call it on one rank, or in a signal handler.

        All ranks save after this step or one of the next two, and raise `Preempted`, which ends the process with
        status 75; if the save fails, they raise CheckpointError. After the last batch `close` saves, and the program
        ends normally. Raises InputError if the config has no `checkpoint`.
        """
        self._reject_if_closed()
        if self._preemption is None:
            raise InputError("engine.preempt(): the config has no folder to save to; set checkpoint='checkpoints'")
        self._preemption.request_stop()

    def save_weights(
        self, path: str | Path, *, format: Literal["safetensors", "torch"] = "safetensors", max_file_gb: float = 5.0
    ) -> None:
        """Write the full model's weights, unsharded and in full precision, on rank 0. Call it on all ranks.

        Weights larger than `max_file_gb` go into several files with an index, named as in Hugging Face. Format "torch"
        is that of `torch.save(model.state_dict(), path)`. Raises InputError if `path` is a folder, and CheckpointError
        if it cannot be written.
        """
        self._reject_if_closed()
        self.context.agree_on_call("engine.save_weights")
        with self._guard:
            export.save_weights(self._state, self.context, path, format, max_file_gb)

    def full_state_dict(self, *, optimizer: bool = False, rank0_only: bool = True) -> dict[str, Any]:
        """The full model's state dict, unsharded and in full precision, on the CPU. Call it on all ranks.

            weights = engine.full_state_dict()  # {} on other ranks than 0
            if engine.context.rank == 0:
                plain_model.load_state_dict(weights)

        It has copies of the parameters (fp32 masters where there are any) and persistent buffers, under the names of
        the model that you gave initialize. One tensor is gathered at a time.

        Args:
            optimizer: return `{"model": ..., "optimizer": ...}`. The optimizer's state is keyed by parameter names, as
                of torch's `get_optimizer_state_dict` with `full_state_dict=True`, and is loaded with its
                `set_optimizer_state_dict`.
            rank0_only: the other ranks get {}, and need no memory. If False, each rank gets all of it.

        Raises:
            InputError: the optimizer has state whose position in the full model is unknown.
        """
        self._reject_if_closed()
        self.context.agree_on_call(f"engine.full_state_dict({optimizer=}, {rank0_only=})")
        with self._guard:
            return export.full_state_dict(self._state, self.context, optimizer, rank0_only)

    def save_pretrained(self, folder: str | Path, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        """Write a Hugging Face model to a folder for `from_pretrained`, or only the adapters of a PEFT model. Call it
        on all ranks.

        It calls the model's `save_pretrained` on rank 0 with the full weights, from any layout. Of a model with
        adapters, only these are gathered.

        Args:
            dtype: of the floating-point weights; None: full precision, as in `full_state_dict`.
            options: passed to the model's `save_pretrained`, such as `max_shard_size` and `push_to_hub` (which
                PEFT ignores).

        Raises:
            InputError: the model has no `save_pretrained` that takes a state dict.
            CheckpointError: it failed.
        """
        self._reject_if_closed()
        self.context.agree_on_call(f"engine.save_pretrained({dtype=})")
        with self._guard:
            export.save_pretrained(self._state, self.context, folder, dtype, options)

    def load_weights(self, path: str | Path) -> None:
        """Load the weights of the model, and its masters, from a file with the same names. Call it on all ranks.

        The optimizer's state is not changed. Raises CheckpointError if the file cannot be read, and InputError if
        names or shapes do not fit; nothing has changed then.
        """
        self._before_call("engine.load_weights()")
        with self._guard, self._update.master_weights.joined():
            export.load_weights(self._state, self.context, Path(path))

    def averaged_model(self, decay: float, *, every: int = 1, buffers: bool = False) -> AveragedModel:
        """Start an exponential moving average (EMA) of the weights; each update keeps the fraction `decay` of it.

        It starts from the current weights, or from the average in the checkpoint that was loaded; loading a checkpoint
        without one restarts it. Call it on all ranks.

        Args:
            every: update the average only after every `every` steps (of `global_step`); `decay` counts once each time.
            buffers: also average floating-point buffers, such as BatchNorm's statistics; otherwise the model's are
                used. (Buffers that are not in the state dict are always the model's.)

        Raises:
            InputError: `decay` is not between 0 and 1, or there already is an average.
        """
        self._reject_if_closed()
        if self._average.decay is not None:
            raise InputError(f"there is an average already, with decay={self._average.decay}; set the decay of that")
        with self._guard:
            return AveragedModel(self, decay, every, buffers)

    # -- the end -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End training: release hooks, locks, buckets and, if the engine made it, the process group.

        A model that is not sharded gets its original dtype back, with the trained weights, and the optimizer holds its
        parameters again. A sharded model stays sharded and can no longer be trained or saved: call `save`,
        `save_weights` or `full_state_dict` first.

        Raises:
            CheckpointError: if a save in the background failed. The engine is closed then.
        """
        self._accumulation.reject_averaged("engine.close()")
        try:
            self._hooks.close(None)
            self._checkpointer.wait()
            if not self._closed:
                self._update.sync_writes()
        finally:
            if self._closed:  # by an error, with which the groups stayed
                self._ends.callback(self.context.close)
            self._closed = True
            self._ends.__exit__(None, None, None)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        # With an error in flight the process group stays: it is needed to report the error to the other ranks.
        if kind is None:
            self.close()
        else:
            self._closed = True
            self._ends.__exit__(kind, error, None)

    # -- checks ------------------------------------------------------------------------------------------------

    def _reject_if_closed(self) -> None:
        if self._closed:
            raise InputError("this engine is closed; call the model itself, or make a new engine with initialize")

    def _before_call(self, call: str, keeps_gradients: bool = True) -> None:
        """Before a `call` ("engine.save()") that all ranks make together.

        Raises InputError if the engine is closed or has averaged weights or, with `keeps_gradients`, within an
        accumulation cycle.
        """
        self._reject_if_closed()
        if keeps_gradients:
            self._accumulation.reject_unfinished(call)
        else:
            self._accumulation.reject_averaged(call)
        self.context.agree_on_call(call.removesuffix("()"))

    def _explain(self, error: RuntimeError) -> None:
        """Add to what a known error of torch says, or raise InputError for it."""
        if isinstance(error, torch.OutOfMemoryError):
            error.add_note(
                f"This engine needs {self.plan.rows['memory']}. `halfmesh plan` finds the simplest changes of the "
                "config that need less, without a GPU"
            )
        else:
            self._parallel.explain(error)
            self._precision.explain(self.model, error)


def _required(loader: EngineDataLoader | None, name: str) -> EngineDataLoader:
    if loader is None:
        raise InputError(f"no {name} was given to initialize; pass one, or iterate your own loader")
    return loader
