"""The loop under a pipeline: forward and criterion give handles, backward runs the schedule and fills them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..amp.loss_scaler import widen_grads
from ..amp.precision import cast_model
from ..amp.recipe import HALF
from ..errors import InputError
from ..parallel.comm import SameCalls, gather_objects, is_checked
from ..parallel.mesh import ParallelContext
from ..parallel.pipeline.axis import StageParameters
from ..parallel.pipeline.partition import Call
from ..parallel.pipeline.runner import CallMetadata, Pipeline
from ..parallel.pipeline.schedules import SplitCall
from ..parallel.pipeline.stage import ForwardContext
from ..parallel.reducer import Reduction
from ..parallel.registries import SCHEDULES
from ..utils.tensors import leaves_of, map_tensors, parameter_names, tensors_of
from ..utils.torch_private import BATCH_NORMS
from .accumulation import Accumulation
from .executor import random_numbers
from .microbatches import BatchLoss, batch_dims, join, needs_whole, reject_mixed_rows, reject_other_loss
from .parallelize import ParallelModel
from .pipeline_handles import LastStageOutput, PipelineLoss, PipelineOutput

if TYPE_CHECKING:
    from ..config.schema import PipelineConfig


@dataclass
class _Forward:
    """A batch that waits for its backward: the model's call of each microbatch.

    Attributes:
        given: the call that was split, whose tensors may not change before backward; nor may the model's modes.
        full: the model's output for the full batch, without memory, if the criterion is compared on it.
    """

    calls: Sequence[Call]
    known: CallMetadata
    given: SplitCall
    full: Any


@dataclass(eq=False, repr=False)
class PipelineExecutor:
    """The executor of a rank that holds some stages of the model.

    Attributes:
        _meets_in_forward: data ranks wait for each other in forward.
    """

    _parallel_model: ParallelModel
    _model: nn.Module
    _accumulation: Accumulation
    _context: ParallelContext
    _options: PipelineConfig
    _meets_in_forward: bool

    def __post_init__(self) -> None:
        parallel_model, model, options = self._parallel_model, self._model, self._options
        params = parallel_model.axes["pipeline"]
        assert isinstance(params, StageParameters)
        self._precision, self._update = self._accumulation.precision, self._accumulation.update
        self._widen = widen_grads if self._update.widens else None
        recipe = self._update.recipe
        cast_model(params.meta_model, recipe)
        sent = recipe.compute_dtype if recipe.autocast and options.send_dtype == "compute" else None
        forward = ForwardContext(self._precision.autocast, parallel_model.settles, parallel_model.saving(model), sent)
        self._schedule = SCHEDULES.get(options.schedule)
        self._pipeline = Pipeline(model, params, self._schedule, forward)
        self.stages = self._pipeline.stages
        self._scope = partial(random_numbers, parallel_model, model)
        self._group = self._context.group("pp")
        self._data = parallel_model.data
        self._same, self._sequences = parallel_model.same, parallel_model.sequences
        self._computing = [SameCalls(self._group, "pipeline"), *self._same]  # ranks that compute one batch
        self._given = partial(SplitCall, parameter_names(model), non_split=options.non_split, name="engine(...)")
        self._has_run, self._split_batches = False, 0  # so far
        self._has_tried = options.microbatches in (None, 1)  # if the model mixes rows
        # Of evaluation. None: not known yet. Data ranks, whose batches may have other rows, make equally many calls.
        self._needs_whole = self._meets_in_forward or (None if params.tries else False)
        self._is_half = recipe.compute_dtype in HALF
        self._has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in model.modules())

    def method(self, name: str) -> NoReturn:
        """Refuse to call the method `name` of the model."""
        raise InputError(
            f"engine.call({name!r}): under parallel.pipeline this rank holds one stage, and only forward is split; "
            "call it on a whole model that loads engine.full_state_dict(), or train without a pipeline"
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A handle in training; in evaluation, or without gradients, the output."""
        self._compare_inputs("inputs", args, kwargs)
        call = Call(*self._precision.cast_inputs(self._model, args, kwargs))
        if self._model.training and torch.is_grad_enabled():
            return PipelineOutput(self._split(call))
        with self._scope():
            outputs = self._pipeline.evaluate(self._split_evaluation(call))
        output = join(outputs) if len(outputs) > 1 else next(iter(outputs), None)
        if self._pipeline.has_last:
            self._compare_output(output)
        if self._options.eval_outputs == "all":
            output = self._share(output, self._pipeline.look_up(call).stages[-1])
        elif not self._pipeline.has_last:
            return LastStageOutput()
        return self._precision.cast_output(output)

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A handle of the loss where an output is a handle, else the criterion's value."""
        output = next((handle for handle in leaves_of((args, kwargs), PipelineOutput) if not handle.is_ready), None)
        if output is None:
            return self._precision.criterion(criterion, *args, **kwargs)
        forward: _Forward | None = output.batch
        if forward is None:
            return output.value()  # raises
        self._compare_inputs("targets", args, kwargs)
        names, non_split = parameter_names(criterion), self._options.non_split
        given = SplitCall(names, Call(args, kwargs), non_split, "engine.criterion(...)")
        count = len(forward.calls)
        calls = given.split([forward.given.rows // count] * count)
        compares, kept = forward.full is not None and self._pipeline.has_last, self._options.keep_outputs
        whole = Call(*map_tensors(torch.clone, (args, kwargs))) if compares else None  # it may write into its targets
        loss = BatchLoss(self._accumulation, criterion, output, calls, given, whole, forward.full, kept)
        return PipelineLoss(output, loss)

    def check(self, loss: Any) -> PipelineLoss:
        """Reject anything but an unused loss of this pipeline."""
        if not isinstance(loss, PipelineLoss):
            raise InputError(
                f"under a pipeline backward takes the loss of engine.criterion(...), not a {type(loss).__name__}; "
                "compute the loss in the criterion, from the output of engine(...) in training mode"
            )
        if loss.is_ready or loss.output.batch is None:
            raise InputError("engine.backward(loss) was called twice for one output; call engine(...) again first")
        return loss

    def backward(self, loss: PipelineLoss, loss_id: int, reducer: Reduction | None, reduces: bool) -> None:
        """Run the schedule."""
        forward: _Forward = loss.output.batch
        last: BatchLoss = loss.call
        self._reject_changes(forward, last)
        self._split_batches += len(forward.calls) > 1
        tries = self._pipeline.params.tries and not self._has_tried
        if tries and all(gather_objects(len(forward.calls) > 1)):  # the first batch that is split on all ranks
            self._has_tried = True
            joined = forward.given.first(2 * forward.given.rows // len(forward.calls))
            reject_mixed_rows(self._model, self._pipeline, joined, forward.calls[:2], self._is_half)
        last.params = () if self._has_run else tuple(self._model.parameters())
        self._has_run = True

        def finish(output: Any, index: int) -> torch.Tensor:
            self._compare_output(output)
            return last.finish(output, index)

        def on_last(params: Any, rest: bool) -> None:
            if self._data.shards_model:
                self._data.keep_gathered(False, params)
            if reducer is not None and reduces:
                reducer.expect_last(params, rest)

        self._update.before_backward()
        if self._data.shards_model:
            self._data.keep_gathered(True)
        with self._scope():
            self._pipeline.train(forward.calls, forward.known, finish, on_last, self._widen)
        self._update.after_backward(loss_id)
        self._send_loss(loss, last, forward)
        if last.keeps_outputs:
            self._send_output(loss.output, last, forward)
        else:
            loss.output.drop()

    # -- evaluation --------------------------------------------------------------------------------------------

    def _split_evaluation(self, call: Call) -> Sequence[Call]:
        """The microbatches of a batch to evaluate, of which the last one may be smaller; or the batch itself, if they
        could change its output."""
        given = self._given(call=call)
        rows = given.rows or 1
        most = -(-rows // (self._options.microbatches or 1))
        sizes = [min(most, rows - begin) for begin in range(0, rows, most)]
        if self._needs_whole or len(sizes) == 1:
            return [call]
        try:
            calls = given.split(sizes)
        except InputError:  # an argument has no batch dim
            return [call]
        if any(self._pipeline.on_any_rank(any(module.training for module in self._model.modules()))):
            return [call]
        if not (self._pipeline.can_run(calls[0]) and self._pipeline.can_run(calls[-1])):
            return [call]
        full, *parts = (self._pipeline.look_up(each).stages[-1] for each in (call, *calls))
        dims = batch_dims(parts, full)
        if dims is None or any(dims):
            return [call]
        if self._needs_whole is None:
            joined = given.first(sum(sizes[:2]))
            self._needs_whole = needs_whole(self._model, self._pipeline, joined, calls[:2], self._is_half)
        return calls if self._needs_whole is False else [call]

    # -- before backward ---------------------------------------------------------------------------------------

    def _compare_output(self, output: Any) -> None:
        """On the last stage: reject an output that is still sharded over the tensor ranks."""
        for ranks in self._same:
            ranks.compare_outputs(self._model.training, output)

    def _compare_inputs(self, of: str, args: Any, kwargs: Any) -> None:
        """Compare the call over the ranks that compute one batch."""
        for ranks in self._computing:
            ranks.compare_inputs(self._model.training, args, kwargs, of)

    def _reject_changes(self, forward: _Forward, criterion: BatchLoss) -> None:
        is_same = forward.known.modes == self._pipeline.modes()
        if not is_same or forward.given.was_changed() or criterion.given.was_changed():
            what = "an input or a target was changed in place" if is_same else "the model's mode or attributes changed"
            raise InputError(
                f"{what} between engine(...) and engine.backward(loss), which also runs forward under a pipeline; call "
                "backward first (or change a copy)"
            )

    def _split(self, call: Call) -> _Forward:
        """The microbatches of a batch.

        Raises:
            InputError: it cannot be split, or the model returns a loss.
        """
        given = self._given(call=call)
        if any(tensor.requires_grad for tensor in given.tensors):
            raise InputError("an input of engine(...) requires gradients, which a pipeline does not compute; detach it")
        if not given.rows:
            raise InputError("engine(...) got no tensor with a batch dim to split into microbatches")
        count = self._count(given.rows)
        calls = given.split([given.rows // count] * count)
        known = self._pipeline.look_up(calls[0])
        output = known.stages[-1]
        if isinstance(output, torch.Tensor) and output.dim() == 0:
            raise InputError(
                "the model returns its own loss, but a pipeline computes that of each microbatch on its last stage; "
                "return the outputs, give initialize a criterion, and write loss = engine.criterion(output, target)"
            )
        compares = count > 1 and self._pipeline.params.tries and is_checked(self._split_batches + 1)
        full = self._pipeline.look_up(call).stages[-1] if compares and self._pipeline.can_run(call) else None
        return _Forward(calls, known, given, full)

    def _count(self, rows: int) -> int:
        """The number of microbatches of a batch: the config's, except for a last batch that it does not divide."""
        wanted = self._options.microbatches or 1
        if rows % wanted == 0:
            return wanted
        least = 2 if self._model.training and self._has_batch_norm else 1
        find_problems = partial(self._schedule.find_problems, self._context.pp_size, self._options.chunks)
        counts = [n for n in range(1, rows // least + 1) if rows % n == 0 and not any(find_problems(n))]
        count = min((n for n in counts if n >= wanted), default=max(counts, default=None))
        if count is None:
            of_two = " with 2 samples or more in each, which BatchNorm needs" if least == 2 else ""
            raise InputError(
                f"a batch of {rows} samples cannot be split into {wanted} microbatches, or another number that the "
                f"schedule allows{of_two}; give the loader drop_last=True"
            )
        return count

    # -- after backward ----------------------------------------------------------------------------------------

    def _broadcast(self, *tensors: torch.Tensor) -> None:
        """Send from the last stage to the others."""
        for tensor in tensors:
            dist.broadcast(tensor, group_src=self._context.last_stage, group=self._group)

    def _send_loss(self, loss: PipelineLoss, last: BatchLoss, forward: _Forward) -> None:
        compares, reduction = forward.full is not None, self._accumulation.reduction
        if self._pipeline.has_last:
            figures = last.figures(self._context.device)
            if self._sequences is not None:
                figures[:2] = self._sequences.average(figures[:2])
        else:
            figures = torch.empty(3 if compares else 2, dtype=torch.float64, device=self._context.device)
        self._broadcast(figures)
        loss.call = None  # so that a reference to the loss does not keep the batch
        if compares:
            made, weight, full = figures.tolist()
            made = made / (weight or 1.0) if reduction == "weighted" else made
            reject_other_loss(made, full, len(forward.calls), reduction)
        # Every rank knows the structure of the model's output, and only the last stage the loss.
        wide = any(tensor.dtype == torch.float64 for tensor in tensors_of(forward.known.stages[-1]))
        total, weights = figures[:2].to(torch.float64 if wide else torch.float32)
        if reduction == "weighted":
            self._accumulation.add_weight(figures[1])
        loss.resolve((total, weights) if reduction == "weighted" else total)

    def _send_output(self, handle: PipelineOutput, last: BatchLoss, forward: _Forward) -> None:
        tree = join([self._precision.cast_output(forward.known.stages[-1])] * len(forward.calls))
        output = self._share(join(last.outputs) if self._pipeline.has_last else None, tree)
        handle.batch = None
        handle.resolve(output)

    def _share(self, output: Any, tree: Any) -> Any:
        """The last stage's `output` on all ranks, which know its `tree` of tensors."""
        if not self._pipeline.has_last:
            device = self._context.device
            output = map_tensors(lambda meta: torch.empty(meta.shape, dtype=meta.dtype, device=device), tree)
        self._broadcast(*(t.reshape(-1).view(torch.uint8) for t in tensors_of(output) if t.numel()))
        return output
