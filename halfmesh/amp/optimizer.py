"""Runs an update in every mode and layout: from a loss to gradients, and from gradients to new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from numbers import Real
from typing import Any

import torch
from torch import nn, optim

from ..errors import InputError, shorten
from ..utils.optimizer_state import saved_state
from ..utils.param_shard import ParamShard, Publisher, Ranks, clear_grads
from ..utils.torch_private import foreach_mul_
from .grad_norm import GradStats, clip_divisor, grad_stats
from .loss_scaler import LossScales, widen_grads
from .master_weights import MasterWeights, held_ids
from .recipe import HALF, Recipe, UpdateOptions
from .split_masters import SplitMasters
from .step_result import SkipCounter, StepResult
from .stepper import Grads, Stepper


class MixedPrecisionOptimizer:
    """Steps the user's optimizer from scaled gradients.

    `step` collects the gradients, measures them together with the other ranks, divides, steps or skips, publishes the
    masters to the model and moves the loss scale, in this order. With a fused SGD, Adam, AdamW or Adagrad the host
    reads nothing; with another optimizer under a loss scale it reads one number.

    A direct `step` of the user's optimizer is rejected. Its groups hold fp32 masters where the recipe keeps them, so
    schedulers built on it keep working.

    Args:
        optimizer: an optimizer over parameters of `shards` only.
        shards: every parameter that this rank holds, cast to the recipe's dtype.
        ranks: the ranks that take this update together.
        masters: the fp32 masters made before the cast. The others are made from the parameters now.
        device: the device of the norm, `found_inf` and the loss scale. By default that of the parameters.
        publisher: sends new weights to other ranks (zero1, fsdp).

    Attributes:
        found_inf: 1.0 if the last update was skipped, else 0.0 (0-dim fp32, on the device). None: it cannot be skipped.
        has_gradients: True if a backward of the next update has begun.
        is_unscaled: True if its gradients are already divided.
        widens: the half-precision gradients of several backwards are added in fp32.
        on_close: undoes the conversion of the model, in `close`.

    Raises:
        InputError: the optimizer holds parameters that are not in `shards`.
    """

    def __init__(
        self,
        optimizer: optim.Optimizer,
        shards: Sequence[ParamShard],
        recipe: Recipe,
        ranks: Ranks,
        options: UpdateOptions,
        masters: Mapping[nn.Parameter, nn.Parameter],
        device: torch.device | None,
        publisher: Publisher | None,
    ) -> None:
        self.optimizer = optimizer
        self.recipe = recipe
        self.options = options
        self.device = shards[0].param.device if device is None else device
        kind = SplitMasters if recipe.split_masters else MasterWeights
        self.master_weights = kind(optimizer, shards, recipe.master_weights, masters)
        self.stepper = Stepper(self.master_weights, self.device, allow_fused=options.fused == "auto")
        self.loss_scales = LossScales(recipe, self.device, options.name)
        self.skips_nonfinite = options.skips_nonfinite(recipe)
        self._needs_norm = options.needs_grad_norm(recipe)
        self.skip_counter = SkipCounter(options, recipe, self.device, ranks)
        self.found_inf: torch.Tensor | None = None
        self.publisher = publisher
        self.on_close: Callable[[], None] | None = None
        self.has_gradients = self.is_unscaled = False
        self.widens = recipe.wide_gradients or options.wide_gradients
        self._held_inf: torch.Tensor | None = None  # as `found_inf`, of the gradients when they were unscaled
        self._ranks = ranks
        # The largest norm of the next update, and the norm before clipping, if that is of all of its gradients.
        self._clip_once: tuple[float, torch.Tensor | None] | None = None
        self._load_hook = optimizer.register_load_state_dict_post_hook(lambda _: self._sync_groups())

    # -- gradients ---------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, divisor: float = 1.0, retain_graph: bool = False, loss_id: int = 0) -> None:
        """Run backward from a scalar `loss`, with its loss scale / `divisor` as the seed."""
        self.before_backward()
        loss, seed = self._seed(loss, divisor, loss_id)
        torch.autograd.backward(loss, seed, retain_graph=retain_graph)
        self.after_backward(loss_id)

    def scaled(self, loss: torch.Tensor, divisor: float) -> torch.Tensor:
        """`loss` (of loss_id 0) x its loss scale / `divisor`, for a backward that the caller runs."""
        loss, seed = self._seed(loss, divisor, 0)
        return loss if seed is None else loss * seed

    def _seed(self, loss: torch.Tensor, divisor: float, loss_id: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        loss = loss.float() if loss.dtype in HALF else loss  # a scaled seed does not fit into half precision
        self.skip_counter.see(loss)
        return loss, self.loss_scales.seed(loss, divisor, loss_id)

    def before_backward(self) -> None:
        """Prepare for the gradients of one loss, which come until `after_backward`.

        Raises:
            InputError: the gradients that it would add to are unscaled.
        """
        if self.is_unscaled:
            raise InputError(
                "backward was called after engine.unscale_gradients() of the same update, and would add scaled "
                "gradients; call engine.unscale_gradients() after the last backward"
            )
        if self._clip_once is not None:
            self._clip_once = self._clip_once[0], None  # the norm is no longer that of all gradients
        self.has_gradients, self.stepper.used = True, []
        receivers = self.master_weights.receivers
        if self.loss_scales.several:
            self.loss_scales.stash_grads(receivers)
        elif self.widens:
            widen_grads([shard.param for shard in receivers])

    def after_backward(self, loss_id: int = 0) -> None:
        """Take in the gradients of loss `loss_id`."""
        if self.loss_scales.several:
            self.loss_scales.merge_grads(loss_id, self.master_weights.receivers)

    def gradients(self) -> Grads:
        """The local gradients of the parameters in the optimizer's groups, which an update would use now."""
        return {s: grad for s in self.master_weights.stepped if (grad := s.param.grad) is not None}

    def zero_grad(self) -> None:
        """Clear the gradients of all parameters that the optimizer holds, or has held."""
        self.stepper.used = []
        self._forget_grads()

    def _forget_grads(self) -> None:
        self._clip_once = self._held_inf = None
        self.has_gradients = self.is_unscaled = False
        self.loss_scales.forget()
        self.skip_counter.forget()
        clear_grads(self.master_weights.grad_params)

    # -- the update --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, divisor: float | torch.Tensor = 1.0) -> torch.Tensor:
        """Clip the next update to `max_norm` instead of the options'. Returns the norm before clipping (0-dim)."""
        if not isinstance(max_norm, Real) or not max_norm > 0:
            raise InputError(f"max_norm={max_norm!r}: it must be greater than 0; to not clip, remove the call")
        grads = self.gradients()
        norm = self._measure(grads).norm
        self._clip_once = float(max_norm), norm
        _, total = self.loss_scales.grad_divisor(divisor)
        return norm if total is None or self.is_unscaled else norm / total

    @torch.no_grad()
    def unscale(self, divisor: float | torch.Tensor = 1.0) -> None:
        """Divide the gradients by the loss scale and `divisor` now, in fp32, for user code that reads or changes them.

        The update is skipped if they hold inf or nan now, which a clip by value would hide.
        """
        grads = self.gradients()
        if self._needs_norm:
            self._held_inf = self._measure(grads).found_inf
        if self._clip_once is not None:
            self._clip_once = self._clip_once[0], None  # the norm was of scaled gradients
        _, total = self.loss_scales.grad_divisor(divisor)
        self.is_unscaled = True
        widen_grads([shard.param for shard in grads])
        if total is not None:
            foreach_mul_(list(self.gradients().values()), 1 / total)

    @torch.no_grad()
    def step(self, divisor: float | torch.Tensor = 1.0) -> StepResult:
        """Take one update from the gradients collected since the last one.

        The host reads no device value and all state moves in place: on a GPU this can be captured in a CUDA graph
        (after a first update; with a fused optimizer, and a tensor as lr if that changes).

        Args:
            divisor: the gradients are divided by it (and by the loss scale).

        Raises:
            NonFiniteError: inf or nan, by the options.
        """
        self.follow_groups()
        self.sync_writes(adopt=True)
        grads = self.gradients()
        max_norm, clipped_norm = self._clip_once or (self.options.max_norm, None)
        self._clip_once = None
        buckets = self.stepper.buckets(grads, self.publisher is not None)
        wants_norm = max_norm > 0 or self._needs_norm
        measured = grads
        if {grad.layout for grad in grads.values()} - {torch.strided}:
            self.stepper.avoid_fused()
            if not wants_norm:
                measured = {shard: grad for shard, grad in grads.items() if grad.layout is torch.strided}
        stats = self._measure(measured) if wants_norm or self.skip_counter.due_for_check() else None
        if stats is not None:
            if clipped_norm is not None:  # user code may have changed gradients since: inf and nan are those of now
                stats.norm = clipped_norm
            if self._held_inf is not None:
                stats.found_inf = torch.maximum(stats.found_inf, self._held_inf)
            self.skip_counter.record(stats, measured, self.loss_scales.explain)
        self.found_inf = stats.found_inf if stats is not None and self.skips_nonfinite else None

        scale, total = self.loss_scales.grad_divisor(divisor)
        total = None if self.is_unscaled else total
        norm, num_zeros = (None, None) if stats is None else (stats.norm if wants_norm else None, stats.num_zeros)
        numbers = {"norm": norm, "divisor": total, "scale": scale, "num_zeros": num_zeros}
        result = StepResult(self.optimizer, skipped=self.found_inf, **numbers)
        if stats is not None and max_norm > 0:
            total = clip_divisor(total, stats.norm, max_norm)
        try:
            self._apply(grads, buckets, None if total is None else total.to(self.stepper.divides_in))
        finally:  # a hook of the user's may raise on one rank: the scale moves on all
            if stats is not None:
                self.loss_scales.update(stats)
            self._forget_grads()
        return result

    def _measure(self, grads: Grads) -> GradStats:
        flags = self.loss_scales.flags() if self.loss_scales.several else self.skip_counter.flags()
        norm_type, count_zeros = self.options.norm_type, self.recipe.count_zeros
        return grad_stats(grads, self._ranks, self.device, norm_type, count_zeros, flags)

    def _apply(self, grads: Grads, buckets: list[list[ParamShard]], divisor: torch.Tensor | None) -> None:
        """Divide by `divisor` (0-dim) and step, unless `found_inf` is 1. Empties `grads` to free them."""
        found_inf = self.found_inf
        if found_inf is not None and not self.stepper.fuses_unscale:
            if bool(found_inf):  # the one host read, for an optimizer whose step cannot take `found_inf`
                return
            found_inf = None
        if self.publisher is not None:
            self.publisher.begin()
        pending, bucketed = list(buckets), len(buckets) > 1
        joined = self.master_weights.joined if self.recipe.split_masters else nullcontext
        if bucketed:
            clear_grads([shard.param for shard in grads])  # each step would take all that are attached
        try:
            while pending:
                with joined(pending[0] if bucketed else None):
                    self.stepper.step(pending[0], grads, divisor, found_inf, bucketed)
                if self.publisher is not None and not bucketed and not self.stepper.can_step_in_buckets:
                    self.publisher.follow()  # it may set `param.data`: later this would undo what is loaded meanwhile
                self._publish(pending.pop(0))
        finally:  # also on an error: the other ranks wait for these masters
            for bucket in pending:
                self._publish(bucket)
            if self.publisher is not None:
                self.publisher.finish()
            self.master_weights.mark_published(shard for bucket in buckets for shard in bucket)

    def _publish(self, shards: Sequence[ParamShard]) -> None:
        """Round the masters of `shards` into the model, and begin to send them to the ranks that use them."""
        self.master_weights.publish(shards)
        if self.publisher is not None:
            self.publisher.stepped(shards)

    def sync_writes(self, adopt: bool = False, waits: bool = True) -> None:
        """Copy what user code wrote into masters, or shards of weights, since the last update to the model and the
        ranks that use them. All ranks together.

        Args:
            adopt: also copy what it wrote into the model to the masters. The next update would undo it otherwise.
            waits: return when this rank has all new weights. If False, the code that uses them must wait.

        Raises:
            InputError: different values were written into a parameter and into its master.
        """
        masters, publisher = self.master_weights, self.publisher
        if publisher is not None:
            with torch.no_grad():
                publisher.follow()
                if waits:
                    publisher.arrive()
        changed = masters.changed()
        has_moved = bool(changed) and any(masters.target(shard) in changed for shard in masters.trained)
        if has_moved or (changed and adopt):
            self._adopt(changed, has_moved)

    @torch.no_grad()
    def _adopt(self, changed: set[torch.Tensor], has_moved: bool) -> None:
        masters, publisher = self.master_weights, self.publisher
        unlike = masters.adopt(changed)
        if has_moved:
            if publisher is not None:
                unlike = publisher.join(unlike)
            if unlike:
                raise InputError(
                    f"both {shorten(unlike)} in the model and the fp32 master weights (engine.master_params()) were "
                    "written since the last update, with different values; write into only one of them"
                )
            self.send_masters()
        masters.mark_published(masters.trained)

    @torch.no_grad()
    def send_masters(self) -> None:
        """Round all masters into the model, on all ranks that use them. All ranks together."""
        self._publish(self.master_weights.trained)
        if self.publisher is not None:
            self.publisher.finish()
            self.publisher.arrive()

    def follow_groups(self, params_only: bool = False) -> None:
        """Follow the optimizer's groups, if they have changed: parameters added or removed or, unless `params_only`,
        settings that decide the implementation.

        Raises:
            InputError: parameters were added between backward and step: their gradients would not be reduced.
        """
        if self.stepper.changed(params_only):
            self._sync_groups()

    def _sync_groups(self) -> None:
        masters = self.master_weights
        if self.has_gradients and held_ids(self.optimizer) != set(map(id, masters.stepped.values())):
            raise InputError(
                "parameters were added to the optimizer, or replaced, between backward and step; do that after a step"
            )
        known = set(masters.trained)
        masters.sync()
        clear_grads([shard.param for shard in masters.trained if shard not in known])
        self.stepper.sync()

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Optimizer state, masters by parameter name, loss scalers and counters. Raises InputError if state would be
        lost that is in an optimizer inside the user's."""
        saved_state(self.optimizer)
        self.sync_writes()
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": self.master_weights.by_name(),
            "scalers": self.loss_scales.state_dict(),
            "skips": self.skip_counter.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore `state_dict`. It also copies masters into the model's parameters."""
        self.master_weights.reject_unfit(state["masters"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.master_weights.load(state["masters"])
        self.loss_scales.load_state_dict(state["scalers"])
        self.skip_counter.load_state_dict(state["skips"])

    def close(self, undo: bool = True) -> None:
        """Return model and optimizer to use without this class. Without `undo` they stay converted."""
        if self.on_close is not None and undo:
            self.on_close()
        self.on_close = None  # it refers back to this object
        self.master_weights.forget_stamps()
        self.stepper.close()
        self._load_hook.remove()
