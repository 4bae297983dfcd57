"""The one path from complete local gradients to new weights, for every mode and layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim

from .. import torch_private
from ..errors import InputError
from ..shard import OneRank, ParamShard, Ranks
from .edit_watch import IN_PARTS, EditWatch
from .holdings import Holdings
from .loss_scaler import LossScaler
from .loss_scales import LossScales
from .master_weights import STREAM_BYTES, by_bytes
from .recipe import HALF, Recipe
from .result import StepResult
from .rules import UpdateRules
from .skips import SkipWatch
from .verdict import Verdict, measure

_Grads = list[tuple[ParamShard, torch.Tensor]]


class MixedPrecisionOptimizer:
    """Steps the user's optimizer from scaled gradients.

    The user's optimizer stays the one that steps: its groups are re-pointed in place to fp32 masters where the
    recipe keeps them, so schedulers built on it keep working. It refuses to step outside `step` below.

    One `step`: gradients -> one pass for norm and verdict -> one all-reduce of it -> unscale and clip as one divisor
    -> step or skip -> masters published to the model -> loss scale updated. With a fused SGD, Adam, AdamW or Adagrad
    nothing in it is read on the host; another optimizer under a dynamic scale reads one number.

    Args:
        optimizer: over parameters of `shards` only.
        shards: every parameter that this rank holds, cast to the recipe's dtype.
        recipe: the precision mode.
        ranks: the ranks that take this update together.
        rules: clipping and what to do about inf and nan.
        masters: fp32 masters made before the cast; others are made from the parameters as they are.
        device: this rank's, which may have no parameters; by default theirs.

    Raises:
        InputError: the optimizer holds parameters that are not in `shards`.
    """

    waits = False
    """Whether every step waits for the device, whatever the optimizer."""

    def __init__(
        self,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        ranks: Ranks | None = None,
        rules: UpdateRules | None = None,
        masters: Mapping[nn.Parameter, nn.Parameter] | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.recipe = recipe
        self.rules = rules or UpdateRules()
        self.holdings = Holdings(optimizer, shards, recipe, self.rules, masters)
        self.device = shards[0].param.device if device is None else device
        self.losses = LossScales(recipe, self.device, self.rules.wide_gradients)
        self.watch = SkipWatch(self.rules.max_consecutive_skips, self.device)
        self.skips = recipe.skips if self.rules.on_nonfinite == "auto" else self.rules.on_nonfinite == "skip"
        """Whether an update with inf or nan is skipped."""
        self._ranks = ranks or OneRank()
        self._clip_once: tuple[float, Verdict | None] | None = None
        self._stepping = False
        self._begun = False  # an update has gradients
        self._edits = EditWatch()
        self.on_close: Callable[[], None] | None = None
        """Undoes what was done to make this, in `close`."""
        self._guard = optimizer.register_step_pre_hook(self._refuse_other_steps)

    @property
    def scaler(self) -> LossScaler | None:
        """The loss scaler of loss 0, if gradients are scaled."""
        return self.losses.first

    def backward(self, loss: torch.Tensor, divisor: float = 1.0, retain_graph: bool = False, loss_id: int = 0) -> None:
        """Run backward from a scalar `loss`, with its loss scale / `divisor` as the seed."""
        with self.collecting(loss_id):
            if loss.dtype in HALF:
                loss = loss.float()  # a scaled seed does not fit into half precision
            loss.backward(gradient=self.losses.seed(loss, loss_id, divisor), retain_graph=retain_graph)

    def scaled(self, loss: torch.Tensor, divisor: float = 1.0) -> torch.Tensor:
        """`loss` (of loss_id 0) x its loss scale / `divisor`, for a backward that others run, within `collecting`."""
        loss = loss.float() if loss.dtype in HALF else loss
        return loss * self.losses.seed(loss.detach(), 0, divisor)

    @contextmanager
    def collecting(self, loss_id: int = 0) -> Iterator[None]:
        """A scope in which backward runs; what it leaves in the parameters are gradients of `loss_id`."""
        self._begin()
        yield
        self.losses.collect(loss_id, self.holdings.trained)
        self.watch_edits()

    def tell_of_parts(self) -> None:
        """The gradients of this rank are a part of the model's."""
        self._edits.why = IN_PARTS

    def watch_edits(self) -> None:
        """What others change of the gradients from now on is told, where they are scaled or a part of the model's."""
        if self.losses.scale is not None or self._edits.why is IN_PARTS:
            self._edits.note(self.holdings.trained)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, divisor: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the rules' own. Returns the norm before clipping (0-dim)."""
        if not isinstance(max_norm, (int, float)) or not max_norm > 0:
            raise InputError(f"max_norm must be greater than 0, but {max_norm!r} was given; omit the call to not clip")
        verdict = self._measure(self._gradients())
        self._clip_once = (float(max_norm), verdict)
        total = self._scale(divisor)
        return verdict.norm if total is None else verdict.norm / total

    @torch.no_grad()
    def step(self, divisor: float | torch.Tensor = 1.0) -> StepResult:
        """Take one update from the gradients collected since the last one.

        Args:
            divisor: the gradients are divided by it (and by the loss scale).

        Raises:
            NonFiniteError: inf or nan, as `rules` say.
        """
        self._edits.warn(self.holdings.trained)
        self.take_in_new()
        if self.holdings.changed():
            self.holdings.refresh()
        self.holdings.take_edits()
        grads = self._gradients()
        self.holdings.unfuse_for_sparse(grads)
        max_norm, verdict = self._clip_once or (self.rules.max_norm, None)
        self._clip_once = None
        asked_for = max_norm > 0 or self._wants_verdict
        if verdict is None and (asked_for or (not self.holdings.sparse and self.watch.wants_a_look())):
            verdict = self._measure(grads)
        if verdict is not None:
            self.watch.judge(verdict, grads, self.skips, self.rules.on_nonfinite == "raise", self.losses.scalers)
        total = self._scale(divisor)
        norm = None if verdict is None else verdict.norm if total is None else verdict.norm / total
        found_inf = verdict.found_inf if verdict is not None and self.skips else None
        result = StepResult(
            lr=_first_lr(self.optimizer),
            skipped=found_inf,
            norm=norm if asked_for else None,
            scale=None if self.scaler is None else self.scaler.scale,
            num_zeros=None if verdict is None else verdict.num_zeros,
        )
        if norm is not None and max_norm > 0:
            coefficient = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
            total = 1 / coefficient if total is None else total / coefficient
        self._apply(grads, None if total is None else total.float(), found_inf)
        if verdict is not None:
            self.losses.update(verdict)
        self._begun = False
        return result

    def zero_grad(self) -> None:
        """Forget the gradients of all parameters that the optimizer holds."""
        self._clip_once = None
        self.losses.forget()
        self._begun = False
        self.take_in_new()
        for shard in self.holdings.trained:
            shard.clear_grad()

    def take_in_new(self) -> None:
        """Take in parameters that were put into the optimizer. What earlier backwards left in them does not count.

        Raises:
            InputError: gradients of this update are there already; theirs would be scaled otherwise, or not reduced.
        """
        if not self.holdings.regrouped:
            return
        if self._begun:
            raise InputError(
                "parameters were added to the optimizer, or exchanged, between backward and step, where gradients are "
                "only half done; do that before the first backward of an update, or after its step"
            )
        known = {id(shard) for shard in self.holdings.trained}
        self.holdings.refresh()
        for shard in self.holdings.trained:
            if id(shard) not in known:
                shard.clear_grad()

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state, masters by parameter name, loss scalers and counters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": self.holdings.masters_by_name(),
            "scalers": self.losses.state_dict(),
            "skips": self.watch.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue exactly where `state_dict` was taken. Copies masters into the model's parameters too."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.holdings.adopt(state["masters"])
        self.losses.load_state_dict(state["scalers"])
        self.watch.load_state_dict(state["skips"])

    def close(self) -> None:
        """Give model and optimizer back: the optimizer may step by itself again."""
        if self.on_close is not None:
            self.on_close()
        self._guard.remove()
        self.holdings.close()

    # -- parts of a step ---------------------------------------------------------------------------------------

    @property
    def _wants_verdict(self) -> bool:
        rules = self.rules
        return self.recipe.skips or rules.track_grad_norm or rules.on_nonfinite != "auto" or self.recipe.count_zeros

    def _begin(self) -> None:
        """Before a backward."""
        if self._clip_once is not None:
            self._clip_once = (self._clip_once[0], None)  # what was measured is no longer all
        self.take_in_new()
        self.losses.set_aside(self.holdings.trained)
        self._begun = True

    def _gradients(self) -> _Grads:
        taken = ((shard, shard.take_grad()) for shard in self.holdings.trained)
        return [(shard, grad) for shard, grad in taken if grad is not None]

    def _measure(self, grads: _Grads) -> Verdict:
        by_loss = self.losses.by_loss()
        return measure(grads, self._ranks, self.device, self.rules.norm_type, self.recipe.count_zeros, by_loss)

    def _scale(self, divisor: float | torch.Tensor) -> torch.Tensor | None:
        """What the gradients are too large by (0-dim float64), or None if they are right as they are."""
        if self.losses.scale is not None:
            return self.losses.scale.double() * divisor
        if isinstance(divisor, torch.Tensor):
            return divisor.double()
        return None if divisor == 1 else torch.full((), divisor, dtype=torch.float64, device=self.device)

    def _apply(self, grads: _Grads, total: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Divide by `total` and step, unless `found_inf` is set. Empties `grads`, to free them as it goes."""
        if found_inf is not None and not self.holdings.folds:
            if bool(found_inf):  # the one host read of an optimizer that cannot take the verdict along
                return
            found_inf = None
        for part in self._parts(grads):
            shards = [shard for shard, _ in part]
            self._attach(part)
            self._step_part(shards, total, found_inf)
            self.holdings.publish(shards)
            for shard in shards:
                if shard.param in self.holdings.masters:
                    self.holdings.masters[shard.param].grad = None

    def _parts(self, grads: _Grads) -> list[_Grads]:
        """The gradients in the parts that are stepped one after another: several where fp32 copies are made of them."""
        held = {id(shard): (shard, grad) for shard, grad in grads}
        grads.clear()
        converts = any(grad.dtype != self.holdings.target(shard).dtype for shard, grad in held.values())
        if not (converts and self.holdings.streams):
            return [list(held.values())]
        buckets = by_bytes([shard for shard, _ in held.values()], STREAM_BYTES)
        return [[held.pop(id(shard)) for shard in bucket] for bucket in buckets]

    def _attach(self, part: _Grads) -> None:
        """Give each target of `part` its gradient in its own dtype, and drop the narrower one. Empties `part`."""
        while part:
            shard, grad = part.pop()
            target = self.holdings.target(shard)
            if target is not shard.param:
                shard.clear_grad()
            if grad.layout == torch.strided and grad.stride() != target.stride():  # fused kernels need both alike
                grad = torch.empty_like(target).copy_(grad)
            target.grad = grad.to(target.dtype)

    def _step_part(
        self, shards: Sequence[ParamShard], total: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        attributes: dict[str, torch.Tensor] = {}
        if self.holdings.folds and (total is not None or found_inf is not None):
            attributes["grad_scale"] = torch.ones((), device=self.device) if total is None else total
            attributes["found_inf"] = torch.zeros((), device=self.device) if found_inf is None else found_inf
        elif total is not None and shards:
            grads = [self.holdings.target(shard).grad for shard in shards]
            torch_private.foreach_mul_([grad for grad in grads if grad is not None], 1 / total)
        self._stepping = True
        try:
            self.optimizer.__dict__.update(attributes)
            self.optimizer.step()
        finally:
            self._stepping = False
            for name in attributes:
                delattr(self.optimizer, name)

    def _refuse_other_steps(self, *_: Any) -> None:
        if not self._stepping:
            raise InputError(
                "optimizer.step() was called outside the engine, where gradients may be scaled, incomplete or not "
                "checked; call engine.step(), or step() of the optimizer that convert_to_amp returned"
            )


def _first_lr(optimizer: optim.Optimizer) -> float | torch.Tensor:
    lr = optimizer.param_groups[0].get("lr", float("nan"))  # a third party's optimizer may have none
    return lr.clone() if isinstance(lr, torch.Tensor) else lr
