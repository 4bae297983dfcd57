"""Guards of what may change while a run trains: gradients, writes into weights, and which parameters are trained."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from operator import is_
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..amp.optimizer import MixedPrecisionOptimizer
from ..amp.recipe import trainable_dtypes
from ..amp.step_result import is_captured
from ..distributed.env import RankNames
from ..errors import InputError, shorten
from ..parallel.comm import gather_objects, norms
from ..parallel.mesh import ParallelContext
from ..parallel.reducer import Reduction
from ..utils.engine_hook import EngineHook
from ..utils.log import get_logger
from ..utils.torch_private import versions
from .hints import tell_of_hooks

if TYPE_CHECKING:
    from ..checkpoint.state import ShardedState

_log = get_logger(__name__)

_Grads = list[torch.Tensor | None]
_Stamps = tuple[list[int], list[float]]

_ALIKE = "freeze and unfreeze the same parameters on every rank; if at random, with the same seed on all ranks"

_SCALED = "when they are still multiplied by the loss scale"
_UNDIVIDED = "when they still have to be divided (by the batches of a short cycle, or the weights of losses)"
_SHARDED = "when each rank holds only its shards of them, so a norm over them is not the model's"
_STRAY = (
    "%s already have gradients before the first engine.backward of an update, from a direct loss.backward() or another "
    "engine. %s. Call engine.zero_grad() first, and engine.backward(loss) for every loss that trains them"
)
_CHANGED = (
    "the gradients of %s were changed between engine.backward and engine.step, %s. To clip them, call "
    "engine.clip_grad_norm_(max_norm), or set clip_grad_norm in the config; to change them in another way, call "
    "engine.unscale_gradients() first. Replace any loss.backward() by engine.backward(loss)"
)
_VANISHED = (
    "the gradients of this update are gone: zero_grad() of the model or the optimizer was called between "
    "engine.backward and engine.step. Call engine.zero_grad() instead, which does nothing inside an accumulation cycle"
)
_INSTEAD = (
    "Compute with a changed copy (weight = torch.renorm(self.weight, ...)), or write after engine.step() under "
    "torch.no_grad(), as in param.copy_(...)"
)
_WRITTEN = (
    "the model's forward writes into %s, but under parallel.data='fsdp' these are gathered copies: the writes are lost"
    f". {_INSTEAD}; or use another data strategy",
    "forward, or the loop, wrote into %s through .data, which bypasses the fp32 masters: the next update overwrites "
    "it. Write under torch.no_grad() instead, as in self.weight.copy_(...)",
    "the weights %s differ between ranks that should hold the same: forward, or the loop, wrote values that depend on "
    f"a rank's batch or random numbers. {_INSTEAD}, the same on all ranks (engine.context.all_reduce(..., op='mean'))",
)
"""Of weights that are lost, lost in the masters, and unlike."""
_LOOKS = 2
"""The first updates with finite gradients, in which writes through `grad.data` are seen, too, which torch does not
count."""


class GradientGuard:
    """Gradients that somebody else than `engine.backward` made, changed or dropped: rejected, or told once, where the
    update would use them wrongly. (Where nothing scales, divides or shards them they may be changed.)

    Args:
        sharded: this rank has shards of the gradients.
        has_divisor: the step may divide gradients by something else than the loss scale.
        partial: why no `param.grad` is the whole gradient of a parameter; "" if it is.
    """

    def __init__(
        self,
        update: MixedPrecisionOptimizer,
        model: nn.Module,
        sharded: bool = False,
        has_divisor: bool = False,
        partial: str = "",
    ) -> None:
        self._masters = update.master_weights
        self._update = update
        scales = update.loss_scales
        self._is_scaled = scales.scales and not scales.several
        self._why = _SHARDED if sharded else _SCALED if self._is_scaled else _UNDIVIDED if has_divisor else None
        self._partial = partial
        self._unseen = model if scales.scales else None  # its hooks
        self._ranks = None if sharded else (0,)  # that tell of what they have
        self._looks = _LOOKS
        self._told: set[str] = set()
        self._noted: _Grads = []  # the gradients of the last backward
        self._stamps: _Stamps = [], []
        held = () if update.recipe.param_dtype is not None else self._masters.shards
        used = [(s.name, (s.source or s).param) for s in held]  # by the model, where it is frozen and unfrozen
        self._narrow = [(name, p) for name, p in used if p.dtype not in trainable_dtypes(update.recipe)]  # in half

    def before_backward(self) -> None:
        """Look for hooks on scaled gradients, for gradients of another backward, and for changes since the last one.

        Raises:
            InputError: there are gradients of another backward, which the update would divide by the loss scale; or
                those of this cycle are gone; or weights are trained in half precision without masters.
        """
        if unfrozen := [name for name, param in self._narrow if param.requires_grad]:
            raise InputError(
                f"{shorten(unfrozen)}: in half precision, and no longer frozen. Without fp32 masters, small updates "
                "are lost; build what you train in float32, or use mode='naive'"
            )
        if self._unseen is not None:
            tell_of_hooks(self._unseen, self._ranks)
            self._unseen = None
        if self._update.has_gradients:
            self.check()
        elif strays := [shard.name for shard in self._masters.receivers if shard.param.grad is not None]:
            if self._is_scaled:
                raise InputError(_STRAY % (shorten(strays), "The update would divide them by the loss scale"))
            self._tell(_STRAY, shorten(strays), "They count in this update as they are")

    def reject_partial(self) -> None:
        """Raise InputError if a rank does not have the whole gradients of its parameters."""
        if self._partial:
            raise InputError(
                f"engine.unscale_gradients(): {self._partial} each rank holds only a part of each gradient. Clip with "
                "clip_grad_norm in the config or engine.clip_grad_norm_(max_norm), or use parallel.data='replicate'"
            )

    def after_backward(self) -> None:
        """Note the gradients, after the reduction if this was the last backward."""
        self._noted = [shard.param.grad for shard in self._masters.receivers]
        self._stamps = self._stamp(self._noted)

    def forget(self) -> None:
        """Forget the gradients: they were used or cleared."""
        self._noted = []

    def check(self, divisor: float | torch.Tensor | None = None) -> None:
        """Tell of gradients that were changed since `after_backward`, and take shards of them again.

        Args:
            divisor: the step that follows divides them by it, besides the loss scale; None: a backward follows.

        Raises:
            InputError: all of them are gone.
        """
        noted, then = self._noted, self._stamps
        if not noted:
            return
        now = [shard.param.grad for shard in self._masters.receivers]
        stamps = self._stamp(now)
        if stamps != then or not all(map(is_, noted, now)):
            self._find_changes(noted, then, now, stamps, divisor)
        self._noted = []
        if divisor is not None and self._looks:
            self._looks -= all(0 <= norm < sys.float_info.max for norm in stamps[1])

    def _find_changes(
        self, noted: _Grads, then: _Stamps, now: _Grads, stamps: _Stamps, divisor: float | torch.Tensor | None
    ) -> None:
        """Look at each gradient, as something has changed between `noted` and `now`, or their stamps."""
        if all(grad is None for grad in now) and any(grad is not None for grad in noted):
            raise InputError(_VANISHED)
        names = []
        rows = zip(self._masters.trained, noted, now, zip(*then, strict=True), zip(*stamps, strict=True), strict=True)
        for shard, old, new, old_stamp, stamp in rows:
            if new is old and stamp == old_stamp:
                continue
            if new is not None:
                names.append(shard.name)
            is_reduced = shard.param.grad is not None or old is None  # else the written gradient is still to be summed
            if shard.source is not None and is_reduced and (new is not old or stamp[0] != old_stamp[0]):
                shard.rebind_grad()
        is_divided = isinstance(divisor, torch.Tensor) or divisor not in (None, 1)
        if names and self._tells and (self._why is not _UNDIVIDED or is_divided):
            self._tell(_CHANGED, shorten(names), str(self._why))

    @property
    def _tells(self) -> bool:
        return self._why is not None and not self._update.is_unscaled

    def _stamp(self, grads: _Grads) -> _Stamps:
        """The versions of `grads` and, in the first updates, their norms (for which the host waits)."""
        if self._why is None:  # they may be changed
            return [0] * len(grads), [0.0] * len(grads)
        sizes = [0.0] * len(grads)
        if self._looks and self._tells and not is_captured(self._update.device):
            given = enumerate(grads)
            plain = {i: grad for i, grad in given if type(grad) is torch.Tensor and grad.layout is torch.strided}
            for i, size in zip(plain, norms(plain.values(), self._update.device).tolist(), strict=True):
                sizes[i] = size
        return versions(grads), sizes

    def _tell(self, text: str, *details: str) -> None:
        if text not in self._told:
            self._told.add(text)
            _log.warning(text, *details, ranks=self._ranks)


@dataclass(eq=False, repr=False)
class SameTrained:
    """Follows which parameters are trained, and rejects changes of `requires_grad` that are not the same on the ranks
    of a pipeline stage, which hold the same parameters or shards of them. All ranks of `context` make this together.
    """

    _update: MixedPrecisionOptimizer
    _context: ParallelContext

    def __post_init__(self) -> None:
        self._trained: list[tuple[int, bool]] | None = self._find()
        if 1 < len(self._context.stage_ranks) < self._context.size:
            _ = self._context.stage_group  # now: later each stage compares when something has changed there

    def _find(self) -> list[tuple[int, bool]]:
        """The id of each trained shard, and True if its parameter requires gradients now."""
        masters = self._update.master_weights
        return [(id(s), r.param.requires_grad) for s, r in zip(masters.trained, masters.receivers, strict=True)]

    def follow(self, reducer: Reduction) -> None:
        """Before a backward: pass the trained parameters to `reducer`, if some were added, frozen or unfrozen.

        Raises:
            InputError: they changed differently on another rank; or not at all there, which is found when the time
                limit of collectives has passed.
        """
        trained, masters, context = self._find(), self._update.master_weights, self._context
        if trained == self._trained:
            return
        if len(context.stage_ranks) > 1:
            taking = {shard for shard, takes in trained if takes}
            flags = bytes(id(shard) in taking for shard in masters.shards)
            try:
                same_trained([s.name for s in masters.shards], flags, context.stage_group, context.rank_names)
            except RuntimeError as error:
                raise InputError(
                    f"requires_grad was changed on {context.rank_names.name(context.rank)}, but not on all ranks that "
                    f"hold the same parameters: some did not compare it ({error}); {_ALIKE}"
                ) from error
        reducer.set_params(masters.trained)
        # A parameter that is frozen within a cycle takes part until its end: the next backward covers again.
        self._trained = None if self._update.has_gradients else trained


@dataclass(eq=False, repr=False)
class ForwardWrites(EngineHook):
    """Rejects a model whose forward, or loop, writes into its weights what is lost, or what differs between ranks that
    hold the same weights and see other data. Looks before the first `engine.step`, the tenth, the hundredth ..."""

    _state: ShardedState
    _context: ParallelContext
    _steps = 0
    _next = 1  # of the steps, that is looked at

    def before_step(self) -> None:
        self._steps += 1
        data = self._state.parallel_model.data
        is_due = self._steps == self._next
        self._next *= 10 if is_due else 1
        if is_due and not is_captured(self._context.device):
            found = data.find_lost_writes(False), self._state.update.master_weights.uncounted(), self._find_unlike()
            for text, names in zip(_WRITTEN, zip(*self._context.everyone(found), strict=True), strict=True):
                if some := sorted(set().union(*names)):
                    raise InputError(text % shorten(some))
        if self._steps + 1 == self._next:
            data.find_lost_writes(True)

    def _find_unlike(self) -> set[str]:
        """Those that differ between ranks that should have the same."""
        context, data = self._context, self._state.parallel_model.data
        held, found = dict(self._state.model.named_parameters()), set[str]()
        groups: dict[Any, set[str]] = {}
        for name, param in held.items() if context.dims.grad_ranks > 1 and not data.diverged else ():
            groups.setdefault(data.inputs.group_of(param), set()).add(name)
        values = norms(held.values() if groups else (), context.device)
        for group, same in groups.items():
            ends = torch.stack([values, -values])
            dist.all_reduce(ends, dist.ReduceOp.MAX, group)
            differ = ends.sum(0) > 1e-8 * ends[0].abs()  # by more than the order of a sum
            found |= same.intersection(compress(held, differ.tolist()))
        return found


def same_trained(names: Sequence[str], trained: bytes, group: dist.ProcessGroup | None, ranks: RankNames) -> None:
    """Raise InputError if the ranks of `group` (None: all) train different parameters: gradients of different layers
    would be summed.

    Args:
        names: of the parameters.
        trained: one byte per parameter: 1 if it is trained on this rank, else 0.
    """
    of_ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
    everyone = dict(zip(of_ranks, gather_objects(trained, group), strict=True))
    unlike = [index for index, said in enumerate(zip(*everyone.values(), strict=True)) if len(set(said)) > 1]
    if not unlike:
        return
    trains = [rank for rank, flags in everyone.items() if flags[unlike[0]]]
    freezes = [rank for rank in everyone if rank not in trains]
    more = f" (the first of {len(unlike)} parameters that differ)" if len(unlike) > 1 else ""
    raise InputError(
        f"requires_grad is not the same on all ranks: {names[unlike[0]]!r} is trained on {ranks.names(trains)} and "
        f"frozen on {ranks.names(freezes)}{more}; {_ALIKE}"
    )
