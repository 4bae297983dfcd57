"""The loop under a pipeline: forward and criterion give handles, backward runs the schedule and fills them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from .._torch import BATCH_NORMS, edit_stamp
from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..errors import InputError
from ..log import get_logger
from ..parallel.context import ParallelContext
from ..parallel.gradients import Reduction
from ..parallel.objects import is_alone
from ..parallel.pipeline.microbatches import Splitter, choose_count
from ..parallel.pipeline.pieces import Call
from ..parallel.pipeline.runner import Known, Pipeline, refuse_own_loss
from ..parallel.same_calls import SameCalls, is_looked_at
from ..tensors import map_tensors, tensors_of
from .accumulation import Accumulation
from .handles import LastStageOutput, PipelineLoss, PipelineOutput, find_handles, replace
from .last_stage import CriterionCalls, LastStage
from .whole_batch import WholeBatch, refuse_other_loss

_log = get_logger(__name__)


@dataclass
class _Forward:
    """A batch that waits for its backward: the model's calls of its microbatches."""

    calls: Sequence[Call]
    rows: int
    known: Known
    stamps: Sequence[tuple[int, int]]
    """Of the tensors in `calls`, which may not change before the backward; nor may the model's modes."""
    whole: Any = None
    """What the model returns for the whole batch, without memory, if its loss is compared with the microbatches'."""


@dataclass(frozen=True)
class PipelineOptions:
    """What `parallel.pipeline` says of the loop."""

    microbatches: int
    non_split: Collection[str] = ()
    keep_outputs: bool = False
    outputs_everywhere: bool = True
    """Whether all ranks get the outputs of evaluation, or those of the last stage."""


class PipelineExecutor:
    """`halfmesh.loop.executor.Executor` of a rank that has some stages of the model.

    Args:
        model: the user's, of which the training mode counts.
        over_tensor: compares calls over this rank's tensor group, if it has one.
    """

    is_single = False

    def __init__(
        self,
        model: nn.Module,
        pipeline: Pipeline,
        options: PipelineOptions,
        context: ParallelContext,
        precision: Precision,
        update: MixedPrecisionOptimizer,
        accumulation: Accumulation,
        over_tensor: SameCalls | None,
    ) -> None:
        self._model = model
        self._pipeline = pipeline
        self.stages = pipeline.stages
        self._options = options
        self._context = context
        self._precision = precision
        self._update = update
        self._accumulation = accumulation
        self._over_pipeline = SameCalls(context.group("pp"), "pipeline")
        self._over_tensor = over_tensor
        self._splitter = Splitter(model, options.non_split, "engine(...)")
        self._told: set[int] = set()
        self._rows = 0  # of the largest microbatch so far
        self._batches = 0  # of several microbatches, so far
        self._sent: list[dist.Work | None] = []
        self._has_run = False
        self._has_batch_norm = any(isinstance(module, BATCH_NORMS) for module in model.modules())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A handle in training; in evaluation, or without gradients, the output."""
        training = self._model.training
        for handle in find_handles((args, kwargs)):
            handle.value()
        self._compare_inputs("inputs", args, kwargs)
        call = Call(self._precision.cast_inputs(args), self._precision.cast_inputs(kwargs))
        if training and torch.is_grad_enabled():
            return PipelineOutput(self._split(call))
        everywhere = self._options.outputs_everywhere
        output = self._pipeline.evaluate(call, self._compare, everywhere)
        if not everywhere and not self._pipeline.has_last:
            return LastStageOutput()
        return self._precision.cast_output(output)

    def criterion(self, criterion: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A handle of the loss where an output is a handle, else the criterion's value."""
        pending = [handle for handle in find_handles((args, kwargs)) if not handle.is_ready]
        outputs = list(dict.fromkeys(handle for handle in pending if isinstance(handle, PipelineOutput)))
        if not outputs:
            return self._precision.criterion(criterion, *args, **kwargs)
        if len(outputs) > 1 or len(outputs) < len({id(handle) for handle in pending}):
            raise InputError(
                "engine.criterion was given several outputs of engine(...), but under a pipeline each backward runs "
                "one forward; join the inputs in one batch, or give the model both inputs at once"
            )
        (output,) = outputs
        if output.was_used:
            output.value()  # raises
        forward: _Forward = output.batch
        others = replace((args, kwargs), output, None)
        self._compare_inputs("targets", *others)
        splitter = Splitter(criterion, self._options.non_split, "engine.criterion(...)")
        call = Call(args, kwargs)
        calls = splitter.split(call, len(forward.calls), forward.rows)
        compares = forward.whole is not None and self._pipeline.has_last
        whole = WholeBatch(criterion, call, output, forward.whole) if compares else None
        return PipelineLoss(output, CriterionCalls(criterion, calls, _stamps(calls), whole))

    def check(self, loss: Any) -> PipelineLoss:
        """Refuse what is no loss of this pipeline's, or has been used."""
        if not isinstance(loss, PipelineLoss):
            _refuse_loss(loss)
        if loss.is_ready or loss.output.was_used:
            raise InputError("engine.backward(loss) was called twice for one output; call engine(...) again before")
        return loss

    def backward(
        self, loss: PipelineLoss, loss_id: int, retain_graph: bool, reducer: Reduction | None, reduces: bool
    ) -> None:
        """Run the schedule."""
        if retain_graph:
            raise InputError("retain_graph=True has no meaning under a pipeline, whose graphs are freed as it runs")
        forward: _Forward = loss.output.batch
        self._refuse_changes(forward, loss.call)
        self._batches += len(forward.calls) > 1
        params = None if self._has_run else list(self._model.parameters())
        keeps, self._has_run = self._options.keep_outputs, True
        last = LastStage(self._precision, self._update, self._accumulation, loss, keeps, params)

        def finish(output: Any, index: int) -> torch.Tensor:
            self._compare(output)
            return last.finish(output, index)

        def on_last(params: Any, rest: bool) -> None:
            if reducer is not None and reduces:
                reducer.expect_last(params)
                if rest:
                    reducer.expect_rest(params)

        self._update.before_backward()
        self._pipeline.train(forward.calls, forward.known, finish, on_last)
        self._update.after_backward(loss_id)
        self._send_results(loss, last, forward)

    def close(self) -> None:
        """Wait for what is still on its way: nothing may be, when a process ends."""
        _after(self._sent, lambda: None)
        self._sent = []

    # -- parts -------------------------------------------------------------------------------------------------

    def _compare(self, output: Any) -> None:
        """On the last stage: an output that is divided over the tensor group is not the model's."""
        if self._over_tensor is not None:
            self._over_tensor.compare_outputs(self._model.training, output)

    def _compare_inputs(self, of: str, args: Any, kwargs: Any) -> None:
        """Of the ranks that compute one batch."""
        self._over_pipeline.compare_inputs(self._model.training, args, kwargs, of)
        if self._over_tensor is not None:
            self._over_tensor.compare_inputs(self._model.training, args, kwargs, of)

    def _refuse_changes(self, forward: _Forward, criterion: CriterionCalls) -> None:
        """What is computed now was called before."""
        if forward.known.modes != self._pipeline.modes():
            raise InputError(
                "the model was changed (engine.eval(), engine.train(), an attribute) between engine(...) and "
                "engine.backward(loss), which computes the forward, too, under a pipeline; call backward first"
            )
        if forward.stamps != _stamps(forward.calls) or criterion.stamps != _stamps(criterion.calls):
            raise InputError(
                "an input or a target was changed in place between engine(...) and engine.backward(loss), which "
                "computes the forward, too, under a pipeline; change a copy, or call backward first"
            )

    def _split(self, call: Call) -> _Forward:
        """The microbatches of a batch.

        Raises:
            InputError: it cannot be split, or the model returns a loss.
        """
        if any(tensor.requires_grad for tensor in tensors_of((call.args, dict(call.kwargs)))):
            raise InputError(
                "an input of engine(...) requires gradients, which only the first stage could give it under a "
                "pipeline; detach it"
            )
        rows = self._splitter.batch_size(call)
        if not rows:
            raise InputError(
                "engine(...) was given no tensor with a batch dim, so there is nothing to split into microbatches; "
                "give the model its batch as a tensor"
            )
        count = self._count(rows)
        calls = self._splitter.split(call, count, rows)
        known = self._pipeline.look_up(calls[0])
        refuse_own_loss(known.crossings[-1])
        return _Forward(calls, rows, known, _stamps(calls), self._whole(call, count))

    def _whole(self, call: Call, count: int) -> Any:
        """What the model returns for a batch that is not split, without memory; None: its loss is not compared."""
        if count == 1 or is_alone(self._context.group("pp")):
            return None
        if not is_looked_at(self._batches + 1):
            return None
        try:
            return self._pipeline.look_up(call).crossings[-1].tree
        except InputError:  # a model for microbatches of this size only
            return None

    def _count(self, rows: int) -> int:
        """Into how many microbatches a batch is split: the config's, but for a last batch that this does not divide."""
        wanted = self._options.microbatches
        if rows % wanted == 0:
            self._rows = max(self._rows, rows // wanted)
            return wanted
        needed = 2 if self._model.training and self._has_batch_norm else 1
        count = choose_count(
            rows, max(self._rows, rows / wanted), lambda n: self._pipeline.takes(n) and rows // n >= needed
        )
        if count is None:
            of_two = " with 2 samples or more in each, which BatchNorm needs" if needed == 2 else ""
            raise InputError(
                f"a batch of {rows} samples cannot be split into {wanted} microbatches, nor into another number that "
                f"parallel.pipeline.schedule takes{of_two}; give the loader drop_last=True"
            )
        if rows not in self._told:
            self._told.add(rows)
            _log.info(
                "a batch of %d samples is run as %d microbatches of %d: %d do not divide it",
                *(rows, count, rows // count, wanted),
            )
        return count

    def _send_results(self, loss: PipelineLoss, last: LastStage, forward: _Forward) -> None:
        """Send the loss (and the outputs) to the other stages, without waiting."""
        device, group, source = self._context.device, self._context.group("pp"), self._pipeline.last_rank
        size = 2 if forward.whole is None else 3
        figures = last.figures(device) if self._pipeline.has_last else _empty(size, device)
        work = dist.broadcast(figures, group_src=source, group=group, async_op=True)
        self._sent = [work]
        loss.call = None  # who keeps the loss does not keep the batch
        reduction = self._accumulation.reduction
        if forward.whole is not None:
            made, weight, whole = _after([work], figures.tolist)
            made = made / (weight or 1.0) if reduction == "weighted" else made
            refuse_other_loss(made, whole, len(forward.calls), reduction)
        if reduction == "weighted":
            _after([work], lambda: None)
            self._accumulation.add_weight(figures[1])
            loss.resolve(lambda: (figures[0].float(), figures[1].float()))
        else:
            loss.resolve(lambda: _after([work], figures[0].float))
        if not self._options.keep_outputs:
            loss.output.drop()
            return
        if self._pipeline.has_last:
            output = last.output()
        else:
            shape = self._precision.cast_output(forward.known.crossings[-1].tree)
            output = map_tensors(lambda t: _joined_empty(t, len(forward.calls), device), shape)
        works = [
            dist.broadcast(t.reshape(-1).view(torch.uint8), group_src=source, group=group, async_op=True)
            for t in tensors_of(output)
            if t.numel()
        ]
        self._sent += works
        loss.output.batch, loss.output.was_used = None, True
        loss.output.resolve(lambda: _after(works, lambda: output))


def _stamps(calls: Sequence[Call]) -> list[tuple[int, int]]:
    tensors = (tensor for call in calls for tensor in tensors_of((call.args, dict(call.kwargs))))
    return [edit_stamp(tensor) for tensor in tensors]


def _joined_empty(meta: torch.Tensor, count: int, device: torch.device) -> torch.Tensor:
    shape = (count,) if meta.dim() == 0 else (count * meta.shape[0], *meta.shape[1:])
    return torch.empty(shape, dtype=meta.dtype, device=device)


def _empty(size: int, device: torch.device) -> torch.Tensor:
    return torch.empty(size, dtype=torch.float64, device=device)


def _after(works: Sequence[dist.Work | None], get: Callable[[], Any]) -> Any:
    """What `get` gives after what was sent has arrived."""
    for work in works:
        if work is not None:
            work.wait()
    return get()


def _refuse_loss(loss: Any) -> NoReturn:
    kind = type(loss).__name__
    raise InputError(
        f"backward under a pipeline takes what engine.criterion(output, ...) returned, but a {kind} was given; compute "
        "the loss in the criterion, from the output of engine(...) in training mode"
    )
