"""Steps the user's optimizer: chooses its implementation, and the gradients of each call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import optimizer as all_optimizers
from torch.utils.hooks import RemovableHandle

from ..errors import InputError
from ..utils.param_shard import ParamShard, clear_grads
from ..utils.tensors import bucket_bytes, by_bytes
from ..utils.torch_private import foreach_copy_, foreach_mul_
from . import fused
from .master_weights import MasterWeights

Grads = dict[ParamShard, torch.Tensor]


class Stepper:
    """Calls `optimizer.step()`; a call from elsewhere is refused.

    Args:
        device: where updates are decided.
        allow_fused: use torch's fused implementation where the user left the choice open and it is exact.

    Attributes:
        takes_grad_scale: its step can unscale the gradients and skip by itself.
        switched: the indices of the groups that were made fused here.
        divides_in: the dtype of the divisor: fp32, all that fused kernels take; float64 if parameters are in float64,
            and then gradients are divided before the kernel.
    """

    def __init__(self, masters: MasterWeights, device: torch.device, allow_fused: bool) -> None:
        self.optimizer = masters.optimizer
        self.allow_fused = allow_fused
        self._masters = masters
        self._device = device
        # On a CPU used gradients stay in memory until the next `zero_grad` or backward, as in a loop by hand: freed at
        # once, malloc returns them to the system and takes them again page by page (a tenth of a small ViT's step).
        self._used: list[torch.Tensor] = []
        self.switched: set[int] = set()
        self.takes_grad_scale = self._is_elementwise = False
        self.divides_in = torch.float32
        self._stepping = False
        self._settings: list[Any] = []
        self.guard = self.optimizer.register_step_pre_hook(self._refuse_calls_from_outside)

    def changed(self) -> bool:
        """Return True if the groups hold other parameters or settings than at the last `sync`."""
        return self._settings != fused.group_settings(self.optimizer)

    def sync(self) -> None:
        """Choose the implementation again."""
        fused.switch_back(self.optimizer, self.switched)  # it may not be exact any more
        self.switched = fused.switch_to_fused(self.optimizer) if self.allow_fused else set()
        fused.place_step_counters(self.optimizer)
        self.takes_grad_scale = fused.takes_grad_scale(self.optimizer)
        self._is_elementwise = fused.is_elementwise(self.optimizer)
        self._settings = fused.group_settings(self.optimizer)
        dtypes = {target.dtype for target in self._masters.stepped.values()}
        self.divides_in = torch.float64 if torch.float64 in dtypes else torch.float32

    def avoid_fused(self) -> None:
        """Leave the choice to torch from now on: gradients are sparse, which fused kernels cannot take."""
        if self.allow_fused:
            self.allow_fused = False
            self.sync()

    @property
    def fuses_unscale(self) -> bool:
        """True if the optimizer's kernels unscale and skip themselves. (Not with user hooks before its step: these
        expect unscaled gradients, and no call in an update that is skipped.)"""
        return self.takes_grad_scale and not _has_step_pre_hooks(self.optimizer, self.guard)

    @property
    def can_step_in_buckets(self) -> bool:
        """True if `step` may be called with some of the gradients at a time."""
        return self._is_elementwise and not _has_step_hooks(self.optimizer, self.guard)  # hooks expect one call

    def buckets(self, grads: Grads, publishes: bool) -> list[list[ParamShard]]:
        """The shards to step together: several buckets where gradients are copied to fp32 (few copies then exist at a
        time), or new weights are published to other ranks (which overlaps the rest of the update).

        With one bucket the copies are made now: norms are faster in fp32 than in half precision.
        """
        masters = bool(self._masters.masters)
        buckets = [list(grads)]  # also without gradients: the optimizer's hooks run then, too
        if grads and (masters or publishes) and self.can_step_in_buckets:
            numel = sum(grad.numel() for grad in grads.values())
            limit = bucket_bytes(self._device, numel)
            if 4 * numel > limit:
                buckets = by_bytes(grads, limit, lambda shard: shard.param.numel())
        if masters and len(buckets) == 1:
            self._fit(grads, grads)
        return buckets

    def _fit(self, shards: Iterable[ParamShard], grads: Grads) -> None:
        """Convert the gradients of `shards` to the dtype and strides of the tensors in the optimizer, as its kernels
        need, and free the old ones."""
        converted, sources, copies = [], [], []
        for shard in shards:
            grad, target = grads[shard], self._masters.stepped[shard]
            if grad.layout is not torch.strided:
                grads[shard] = grad.to(target.dtype)  # these have no strides, and no fused kernels
            elif grad.dtype != target.dtype or grad.stride() != target.stride():
                grads[shard] = copy = torch.empty_like(target)
                sources.append(grad)
                copies.append(copy)
            else:
                continue
            converted.append(shard.param)
        clear_grads(converted)
        if copies:
            foreach_copy_(copies, sources)

    def step(
        self,
        shards: Sequence[ParamShard],
        grads: Grads,
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        bucketed: bool = False,
    ) -> None:
        """Step with the gradients of `shards`, which are used up and taken out of `grads`.

        Args:
            divisor: the gradients are divided by it (0-dim, in `divides_in`); None for 1.
            found_inf: 1.0 to skip (0-dim fp32), where the optimizer `fuses_unscale`; None to step.
            bucketed: `shards` are some of many buckets: show the optimizer only their parameters, so that it does not
                go through all of them for each bucket.
        """
        if bucketed or not self._masters.masters:  # else they fit already
            self._fit(shards, grads)
        targets, fitting = [self._masters.stepped[shard] for shard in shards], [grads.pop(shard) for shard in shards]
        self._used = fitting if self._device.type == "cpu" else []
        self._step(targets, fitting, divisor, found_inf, bucketed)

    def _step(
        self,
        targets: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        bucketed: bool,
    ) -> None:
        for target, grad in zip(targets, grads, strict=True):
            if target.grad is not grad:
                target.grad = grad
        attributes, groups = vars(self.optimizer), self.optimizer.param_groups
        fuses_unscale = self.fuses_unscale
        if divisor is not None and (divisor.dtype == torch.float64 or not fuses_unscale):
            _multiply(grads, 1 / divisor)
            divisor = None
        if fuses_unscale:
            attributes.update(grad_scale=divisor, found_inf=found_inf)
            fused.seed_momentum(self.optimizer, targets)
        whole = [group["params"] for group in groups] if bucketed else []
        if bucketed:
            ids = set(map(id, targets))
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) in ids]
        refused = [group for group in groups if group.get("fused") and group.get("capturable") is False]
        if not (refused and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            refused = []  # in a capture torch refuses them, though their kernels can
        for group in refused:
            group["capturable"] = True
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            for group in refused:  # kept, torch would warn of it in each ordinary step
                group["capturable"] = False
            attributes.pop("grad_scale", None)
            attributes.pop("found_inf", None)
            for group, params in zip(groups, whole, strict=False):
                group["params"] = params
            for target in targets:
                target.grad = None

    def free_used(self) -> None:
        """Free the gradients of the last update."""
        self._used = []

    def close(self) -> None:
        """Restore the optimizer's original implementation."""
        fused.switch_back(self.optimizer, self.switched)
        fused.place_step_counters(self.optimizer)
        self.guard.remove()

    def _refuse_calls_from_outside(self, *_: Any) -> None:
        if not self._stepping:
            raise InputError(
                "optimizer.step() was called outside the engine, where gradients may be scaled, incomplete or not "
                "checked; call engine.step(), or step() of the optimizer that convert_to_amp returned"
            )


def _multiply(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply `grads` in place by the 0-dim `factor`, which may be on another device."""
    for device in {grad.device for grad in grads}:
        foreach_mul_([grad for grad in grads if grad.device == device], factor.to(device))


def is_stepped(optimizer: torch.optim.Optimizer) -> bool:
    """Return True if `optimizer` belongs to an engine, or to `convert_to_amp`, which steps it."""
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values()]
    return any(isinstance(owner, Stepper) for owner in owners)


def _has_step_pre_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle) -> bool:
    """Return True if hooks other than `besides` run before `optimizer.step()`, those for all optimizers included."""
    return bool(optimizer._optimizer_step_pre_hooks.keys() - {besides.id} or all_optimizers._global_optimizer_pre_hooks)


def _has_step_hooks(optimizer: torch.optim.Optimizer, besides: RemovableHandle) -> bool:
    """Return True if hooks run before or after `optimizer.step()`, as `_has_step_pre_hooks` counts them."""
    after = optimizer._optimizer_step_post_hooks or all_optimizers._global_optimizer_post_hooks
    return bool(after) or _has_step_pre_hooks(optimizer, besides)
