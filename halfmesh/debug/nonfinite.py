"""Finds the first tensor of an update that holds inf or nan, for the message of `NonFiniteError`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..amp.step_result import StepResult
from ..distributed.env import list_ranks
from ..errors import NonFiniteError, bullet_list
from ..utils.engine_hook import Hooks, Progress
from ..utils.param_shard import compute_dtype
from ..utils.tensors import dtype_name, tensors_of
from .probes import CRITERION, Probes, TensorStats, Visit, is_finite, measure

if TYPE_CHECKING:
    from ..config import Config
    from ..engine.accumulation import Accumulation
    from ..parallel.mesh import ParallelContext

Kind = Literal["weight", "input", "output", "loss", "gradient"]
# The phases of a microbatch. The other kinds belong to its forward, phase 1.
_PHASES: dict[Kind, int] = {"weight": 0, "gradient": 2}
# The number of recent loss scales that the message shows.
_SHOWN = 9


@dataclass(frozen=True)
class Fault:
    """The first inf or nan of an update.

    Attributes:
        kind: the kind of the tensor. "input" is an argument of a module, "gradient" the gradient of a module's output.
        name: the name of the module or parameter.
        label: the name with the module's class, for messages.
        stats: the statistics of the tensor, with its dtype.
        key: the position in the order of computation, to compare ranks.
        inputs: for an "output" or "loss", the largest finite magnitude of its inputs.
        caller: the label of the module whose forward called that module. "" if the training loop called it.
        ranks: the ranks that have this fault.
    """

    kind: Kind
    name: str
    label: str
    stats: TensorStats
    key: tuple[int, ...]
    inputs: float | None = None
    caller: str = ""
    ranks: tuple[int, ...] = ()

    def __str__(self) -> str:
        stats = self.stats
        made = f" in the forward of {self.caller}" if self.caller else " by the loop"
        what = {
            "weight": f"the weight {self.label}, before the forward",
            "input": f"what {self.label} was given{made}",
            "output": f"the output of {self.label}",
            "loss": "the loss",
            "gradient": f"the gradient of the output of {self.label}, made by the backward of what follows it",
        }[self.kind]
        counts = [f"{count} {kind}" for count, kind in ((stats.inf, "inf"), (stats.nan, "nan")) if count]
        text = f"{what}, in {dtype_name(stats.dtype)}: {' and '.join(counts)} of {stats.count} numbers"
        if self.inputs is not None:
            text += f"; largest input magnitude {self.inputs:.3g}"
        return text + "; the maximum of float16 is 65504" * (stats.dtype == torch.float16)


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a `NonFiniteError`, as its attribute `diagnosis`. It is equal on all ranks; `str` gives the text.

    Attributes:
        scales: the loss scales of the first loss in the last updates, oldest first, each with the number of updates
            that used it. The last scale belongs to the update that failed. Empty without loss scaling.
        skipped: the number of the last `updates` that were skipped.
        updates: the number of updates that the diagnosis covers, before the one that failed.
        was_watched: True if the modules were watched in the update that failed, as under `debug="nonfinite"`.
        fault: the first inf or nan in that update. None if the modules were not watched, or all their values were
            finite.
        advice: the change to make.
        world_size: the number of ranks.
        began: the number of the first update whose loss or gradient norm was inf or nan, if later updates computed with
            the weights that it left. Else 0.
    """

    scales: tuple[tuple[float, int], ...]
    skipped: int
    updates: int
    was_watched: bool
    fault: Fault | None
    advice: str
    world_size: int = 1
    began: int = 0

    def __str__(self) -> str:
        lines = [f"{self.skipped} of the {self.updates} updates before this one were skipped"] if self.updates else []
        if self.scales:
            scales = [f"{scale:g}" + (f" ({count} updates)" if count > 1 else "") for scale, count in self.scales]
            lines.append(f"loss scale: {' -> '.join(['...'] * (len(scales) > _SHOWN) + scales[-_SHOWN:])}")
        if self.began:
            lines.append(f"the loss or the gradient norm has been inf or nan since update {self.began}, not skipped")
        if self.fault is not None:
            ranks = self.fault.ranks
            where = ", on all ranks" if len(ranks) == self.world_size else f", on {list_ranks(ranks)}"
            lines.append(f"first inf or nan of this update{where if self.world_size > 1 else ''}: {self.fault}")
        elif self.was_watched:
            lines.append("the outputs of all modules, the loss, and the gradients of both were finite in this update")
        else:
            lines.append("the modules were not watched in this update")
        return bullet_list("Diagnosis:", [*lines, f"advice: {self.advice}"])


_UNWATCHED = "set debug='nonfinite' in the config, which names the first module with inf or nan but is slow"
_SUMS = "the gradient of a parameter, or its sum over microbatches or ranks, left the dtype's range: "
_SMALLER = "look for losses that sum very many terms, and lower the learning rate"
_LOWER = "lower the loss scale (a dynamic one backs off automatically), or %s"
_RANGE = (
    "%s, which has a wider range, or make its inputs smaller (a norm before it). In mode 'torch' a layer "
    "may compute in fp32: within its forward, `with torch.autocast(x.device.type, enabled=False)` on x.float()"
)
_LOOK = "in that forward for a division by 0, a logarithm, root or exponential"
_ADVICE: dict[Kind, str] = {
    "weight": "the weights were bad before this batch; resume from an older checkpoint, with a lower learning rate",
    "input": f"look at the data, or {_LOOK}",
    "output": f"look {_LOOK}, or for numbers that grow",
    "loss": "look for a logarithm of 0, an exponential, or a division by 0; compute it in fp32, from logits",
    "gradient": "look in what follows it for a root, norm, logarithm, power or division at 0, as in sqrt(x + 1e-12)",
}


def _advise(fault: Fault | None, was_watched: bool, wider: str) -> str:
    """Return the advice. `wider`: how to compute in a wider format, or ""."""
    if fault is None:
        return _SUMS + (_LOWER % wider if wider else _SMALLER) if was_watched else _UNWATCHED
    if fault.stats.dtype != torch.float16 or fault.stats.nan or not wider:
        return _ADVICE[fault.kind]
    if fault.kind == "gradient":
        return f"{_LOWER % wider}. If that does not help, {_ADVICE['gradient']}"
    return _RANGE % wider


@dataclass(eq=False, repr=False, kw_only=True)
class NonFiniteProbes(Probes):
    """Watches the modules in the updates before `max_consecutive_skips` stops the run, or with `debug="nonfinite"` in
    all; a NonFiniteError then reports the source of inf or nan. Watching waits for the device at each module."""

    accumulation: Accumulation
    context: ParallelContext
    config: Config
    progress: Progress
    _first: Fault | None = None

    def watch(self, is_wanted: bool, hooks: Hooks) -> None:
        """Begin to watch, or end it. Under `debug="nonfinite"` it does not end."""
        if is_wanted and not self.attached:
            self.attach()
            hooks.add(self)
        elif self.attached and not is_wanted and self.config.debug != "nonfinite":
            self.detach()
            hooks.remove(self)

    # -- events of the loop, while it is watched ---------------------------------------------------------------

    def before_forward(self, method: str | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._model.training and not self.accumulation.update.has_gradients:
            for index, (name, param) in enumerate(self._model.named_parameters()):
                self._look("weight", param.to(compute_dtype(param)), index, name)

    def after_backward(self, loss: Any) -> None:
        for tensor in tensors_of(loss):
            self._look("loss", tensor, sys.maxsize)

    def after_step(self, result: StepResult) -> None:
        self._first = None

    def explain(self, error: NonFiniteError) -> None:
        """Add a diagnosis to the error of an update. All ranks together."""
        context, progress = self.context, self.progress
        if self.config.name is not None:
            error.add_note(f"in the engine named {self.config.name!r}")
        results, losses = list(progress.results), self.accumulation.update.loss_scales
        scales = [*(result.loss_scale for result in results), losses.current()[0]] if losses.scalers else []
        counter, fault = self.accumulation.update.skip_counter, _first_of_all(context.everyone(self._first))
        taken = counter.taken_in_a_row
        error.diagnosis = Diagnosis(
            scales=tuple((scale, len(list(same))) for scale, same in groupby(scales)),
            skipped=sum(result.skipped for result in results),
            updates=len(results),
            was_watched=self.attached,
            fault=fault,
            advice=_ADVICE["weight"] if taken > 1 and fault is None else _advise(fault, self.attached, counter.wider),
            world_size=context.size,
            began=progress.global_step + 2 - taken if taken > 1 else 0,
        )
        error.args = (f"{error}\n{error.diagnosis}",)
        self._first = None

    def close(self, error: BaseException | None) -> None:
        self.detach()

    # -- events of the modules ---------------------------------------------------------------------------------

    def entered(self, visit: Visit) -> None:
        for tensor in visit.inputs:
            self._look("input", tensor, visit.order, visit.name, visit)

    def left(self, visit: Visit, outputs: Sequence[torch.Tensor]) -> None:
        for tensor in outputs:
            self._look("loss" if visit.name == CRITERION else "output", tensor, visit.order, visit.name, visit)

    def gradient(self, visit: Visit, grad: torch.Tensor, order: int) -> None:
        self._look("gradient", grad, order, visit.name, visit)

    def _look(self, kind: Kind, tensor: torch.Tensor, order: int, name: str = "", visit: Visit | None = None) -> None:
        """Record `tensor` if it has inf or nan and was computed before the recorded one.

        Microbatches of a pipeline do not depend on each other; within one, stages follow each other, in backward in
        reverse.
        """
        microbatch, stage = (0, 0) if visit is None else (visit.microbatch, visit.stage)
        stage = -stage if kind == "gradient" else stage
        key = self.accumulation.index, _PHASES.get(kind, 1), microbatch, stage, order
        if (self._first is not None and self._first.key <= key) or is_finite(tensor):
            return
        inputs, caller = None, ""
        if visit is not None and kind in ("output", "loss"):
            inputs = max((measure(given).largest for given in visit.inputs), default=0.0)
        elif visit is not None and visit.caller is not None:
            caller = visit.caller.label
        label = repr(name) if visit is None else visit.label
        self._first = Fault(kind, name, label, measure(tensor), key, inputs, caller)


def _first_of_all(faults: Sequence[Fault | None]) -> Fault | None:
    """The first of `faults`, which are by rank, with all ranks that have it."""
    found = {rank: fault for rank, fault in enumerate(faults) if fault is not None}
    if not found:
        return None
    first = min(found.values(), key=lambda fault: fault.key)
    what = first.key, first.kind, first.name
    return replace(first, ranks=tuple(rank for rank, f in found.items() if (f.key, f.kind, f.name) == what))
