"""Gradient accumulation: from the losses of a cycle's microbatches to the complete gradients of one update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.precision import Precision
from ..amp.step_result import StepResult
from ..errors import InputError
from ..parallel.mesh import ParallelContext
from ..parallel.reducer import Reduction
from .guards import GradientGuard, SameTrained

if TYPE_CHECKING:
    from .pipeline_executor import PipelineExecutor

LossReduction = Literal["mean", "sum", "weighted"]


@dataclass(eq=False, repr=False)
class Accumulation:
    """Cycles of `length` microbatches, each with one update at its end.

    Every backward is seeded with 1/`length` (mean) or 1 (sum, weighted), so that gradients stay in the range of one
    microbatch. `grad_divisor` corrects this for a short cycle, and divides weighted losses by their total weight, which
    is known only at the end. On the last microbatch the gradients are reduced over the data ranks while backward runs.

    Attributes:
        update: takes the update of a cycle.
        precision: of forward, loss and backward.
        _guard: of the gradients between backward and step.
        _context: the mesh, over whose data ranks the weights of weighted losses are summed; None: one process.
        reducer: completes the gradients; None: they are complete after backward.
        _trained: passes the trained parameters to `reducer`.
        index: finished microbatches of this cycle.
        seed_divisor: each loss is divided by it in backward.
        has_backward: a backward ran in the current microbatch.
        is_last_microbatch: the microbatch of the last backward is the last of the cycle.
        is_last_batch: no batch follows it.
        averaged: the model holds averaged weights, which are not to be trained or saved as its own.
    """

    update: MixedPrecisionOptimizer
    precision: Precision
    _guard: GradientGuard
    length: int = 1
    reduction: LossReduction = "mean"
    _context: ParallelContext | None = None
    reducer: Reduction | None = None
    _trained: SameTrained | None = None

    def __post_init__(self) -> None:
        self.seed_divisor = float(self.length) if self.reduction == "mean" else 1.0
        self.averaged = False
        self._weight: torch.Tensor | None = None
        self.clear()  # gradients older than the engine

    @property
    def position(self) -> str:
        """The current microbatch, for messages: "2 of 4"."""
        return f"{self.index + self.has_backward} of {self.length}"

    # -- one microbatch ----------------------------------------------------------------------------------------

    def backward(
        self,
        loss: Any,
        is_last_batch: bool,
        retain_graph: bool = False,
        loss_id: int = 0,
        pipeline: PipelineExecutor | None = None,
    ) -> None:
        """Add the gradients of `loss`. Those of the last microbatch are reduced while backward runs, unless there are
        several losses: these are unscaled after backward, and another loss may follow.

        Args:
            pipeline: computes forward and backward of all microbatches now; None: run backward from the loss.

        Raises:
            InputError: `loss` is not a scalar tensor, or `loss_id` is unknown.
        """
        if self.averaged:
            self.reject_averaged("engine.backward()")
        update, reducer = self.update, self.reducer
        update.loss_scales.check_id(loss_id)
        if pipeline is None:
            loss, weight = self.check_loss(loss)
            if weight is not None:
                self.add_weight(weight)
        else:
            loss = pipeline.check(loss)
        update.follow_groups(params_only=True)
        self._guard.before_backward()
        self.is_last_batch = is_last_batch
        self.is_last_microbatch = is_last_batch or self._ends_here or self.index + 1 >= self.length
        reduces = self.is_last_microbatch and not update.loss_scales.several
        if reducer is not None:
            if self._trained is not None:
                self._trained.follow(reducer)
            reducer.open(reduces and pipeline is None)
            if reduces and pipeline is None:
                reducer.skip_unused([loss])
        try:
            with self.precision.backward():
                if pipeline is None:
                    update.backward(loss, self.seed_divisor, retain_graph, loss_id)
                else:
                    pipeline.backward(loss, loss_id, reducer, reduces)
            self.precision.clear_weight_cache()
            self.has_backward = True
            if reduces and reducer is not None:
                reducer.finish()
            self._guard.after_backward()
        except BaseException:
            self.clear()  # a partial gradient is worse than none: the next backward begins a new cycle
            raise

    def check_loss(self, loss: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The scalar to run backward from, and the weight (0-dim, float64) of a weighted (sum, weight).

        Raises:
            InputError: it is something else, or a static loss scale is too large for it.
        """
        weight = None
        if self.reduction == "weighted":
            if not isinstance(loss, (tuple, list)) or len(loss) != 2:
                raise InputError(
                    "loss_reduction='weighted' takes (sum, weight) from the criterion, but got a "
                    f"{type(loss).__name__}; return the summed loss and the number to divide it by"
                )
            loss, weight = loss
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError(
                f"backward takes a scalar loss tensor, but got {given}; let the criterion reduce it "
                "(reduction='mean'); if it returns (sum, weight), set loss_reduction='weighted'"
            )
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().to(loss.device, torch.float64, non_blocking=True)
        elif weight is not None:  # filled there: a copy from the host would be waited for
            weight = torch.full((), float(weight), dtype=torch.float64, device=loss.device)
        return loss, weight

    def add_weight(self, weight: torch.Tensor) -> None:
        """Count the weight of a weighted loss."""
        self._weight = weight if self._weight is None else self._weight + weight

    # -- the update --------------------------------------------------------------------------------------------

    def step(self) -> StepResult:
        """Take the update from the gradients of this cycle, which ends. After an error, too."""
        try:
            divisor = self.grad_divisor()
            self._guard.check(divisor)
            result = self.update.step(divisor)
        except BaseException:
            self.clear()
            raise
        self.end_update()
        return result

    def grad_divisor(self) -> float | torch.Tensor:
        """Complete the gradients, and return their remaining divisor. Weighted: one all-reduce."""
        if self.averaged:
            self.reject_averaged("engine.step()")
        divisor: float | torch.Tensor = 1.0
        if self.reduction == "mean":
            divisor = (self.index + self.has_backward) / self.length
        elif self._weight is not None:
            total = self._weight.clone()
            if self._context is not None:
                self._context.all_reduce(total, "dp")
            divisor = torch.where(total == 0, 1.0, total)  # nothing counted: the gradients are zero anyway
        if self.reducer is not None and not self.reducer.is_complete:
            self._guard.check(divisor)
            self.reducer.finish()
        return divisor

    def unscale(self, last: bool) -> None:
        """`Engine.unscale_gradients`."""
        self._guard.reject_partial()
        self.reject_incomplete("engine.unscale_gradients()", last)
        if not self.update.is_unscaled:
            divisor = self.grad_divisor()
            self._guard.check(divisor)
            self.update.unscale(divisor)
            self._guard.after_backward()

    def clear(self) -> None:
        """Forget the gradients and begin a new cycle."""
        self.update.zero_grad()
        self.end_update()

    def end_update(self) -> None:
        """Begin a new cycle, after the update has used its gradients."""
        self._guard.forget()
        self.precision.clear_weight_cache()  # the weights may have changed
        if self.reducer is not None:
            self.reducer.forget()
        self.index = 0
        self._weight = None
        self.has_backward = self.is_last_microbatch = self.is_last_batch = self._ends_here = False

    # -- calls that a cycle does not allow --------------------------------------------------------------------

    def reject_incomplete(self, call: str, last: bool) -> None:
        """Raise InputError if `call` needs the gradients of an update before its last backward. With `last` the cycle
        ends here, if it has begun."""
        if last and self.update.has_gradients:
            self._ends_here = self.is_last_microbatch = True
        if not self.is_last_microbatch:
            raise InputError(
                f"{call} was called before the last engine.backward(loss) of a cycle (after microbatch "
                f"{self.position}), when gradients are incomplete. Call it after that, or with last=True to end the "
                "cycle here"
            )

    def reject_unfinished(self, call: str) -> None:
        """Raise InputError if `call` would lose gradients, or take averaged weights for the model's own."""
        self.reject_averaged(call)
        if self.update.has_gradients:
            raise InputError(
                f"{call} was called in the middle of a cycle, after microbatch {self.position}, and would lose its "
                "gradients. Call it after a step that returned a StepResult, or after engine.step(last=True)"
            )

    def reject_averaged(self, call: str) -> None:
        """Raise InputError if the model holds averaged weights."""
        if self.averaged:
            raise InputError(
                f"{call} was called inside `with average.applied():`, where the model holds the averaged weights; call "
                "it after that block"
            )


class MixedPrecisionState:
    """The state of the update that an engine and the optimizer of `convert_to_amp` show."""

    _update: MixedPrecisionOptimizer

    @property
    def loss_scale(self) -> float:
        """The current loss scale (of loss_id 0); 1.0 without loss scaling. Reads the device."""
        return self.loss_scales[0]

    @property
    def loss_scales(self) -> tuple[float, ...]:
        """The current loss scale of each loss. Reads the device."""
        return self._update.loss_scales.current()

    @property
    def skipped_steps(self) -> int:
        """Updates skipped so far because of inf or nan. Reads the device."""
        return self._update.skip_counter.skipped

    def master_params(self) -> Iterator[nn.Parameter]:
        """The parameters that the optimizer steps: fp32 masters where there are any, else the model's parameters.

        You can write into masters between updates, and so can the optimizer (`eval()` of a schedule-free one). The
        model has these values from the next `engine(...)`, `engine.eval()`, save or `close` on; the masters have what
        you write into the model from the next step on. Different values in both are an error. Under zero1 and fsdp
        masters are this rank's shards: write on every rank, also where they are empty.

        Raises:
            InputError: between backward and step, where masters have no gradients yet, and with masters="split".
        """
        self._update.master_weights.reject_split("master_params()")
        if self._update.has_gradients:  # apex's clip_grad_norm_(amp.master_params(optimizer)) would clip nothing
            raise InputError(
                "master_params() was called between backward and step, when masters have no gradients yet; to clip, "
                "call engine.clip_grad_norm_(max_norm), or clip_grad_norm of convert_to_amp's optimizer"
            )
        return (param for group in self._update.optimizer.param_groups for param in group["params"])
