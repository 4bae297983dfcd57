"""Steps the user's optimizer, with torch's fused implementation where that is exact."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import optim
from torch.optim import optimizer as all_optimizers

from ..errors import InputError
from ..utils.optimizer_state import parts_of
from ..utils.param_shard import ParamShard, clear_grads
from ..utils.tensors import bucket_bytes, by_bytes, is_dense, same_strides
from ..utils.torch_private import foreach_copy_, foreach_mul_, in_shapes_only
from .master_weights import MasterWeights
from .recipe import HALF
from .step_result import is_captured

Grads = dict[ParamShard, torch.Tensor]

# When fused, these read the attributes `grad_scale` and `found_inf` of the optimizer. Every other optimizer of torch
# ignores them, and a subclass may override `step`: exact types only.
_TAKES_GRAD_SCALE = (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad)

# These update each parameter from its own gradient and state alone, so a step may be taken in buckets.
_ELEMENTWISE = (
    *_TAKES_GRAD_SCALE,
    *(optim.RMSprop, optim.Adadelta, optim.NAdam, optim.RAdam, optim.Adamax, optim.ASGD, optim.Rprop),
)

_SETTINGS = ("fused", "foreach", "momentum", "dampening", "differentiable")


class Stepper:
    """Calls `optimizer.step()`; a call from elsewhere is rejected.

    Args:
        device: where updates are decided.
        allow_fused: use torch's fused implementation where the user left the choice open and it is exact.

    Attributes:
        parts: the optimizers that are stepped, each in its implementation: one, or those that were joined.
        takes_grad_scale: their step can unscale the gradients and skip by itself.
        switched: the groups that were made fused here, each as an optimizer of `parts` and its number there.
        divides_in: the dtype of the divisor: fp32, all that fused kernels take; float64 if parameters are in float64,
            and then gradients are divided before the kernel.
        scope: a scope around each call of an optimizer's step.
        used: on a CPU the gradients of the last update, until the next backward. (Freed at once, malloc returns them
            to the system and takes them again page by page: a tenth of a small ViT's step.)
    """

    def __init__(self, masters: MasterWeights, device: torch.device, allow_fused: bool) -> None:
        self.optimizer = masters.optimizer
        self.parts = parts_of(masters.optimizer)
        self.scope: Callable[[], AbstractContextManager[None]] = nullcontext
        self.used: list[torch.Tensor] = []
        self.switched: set[tuple[optim.Optimizer, int]] = set()
        self._allow_fused = allow_fused
        self._masters = masters
        self._device = device
        self._buckets_as = torch.device("cuda") if in_shapes_only() else device  # a dry run simulates GPUs
        self._stepping = False
        self._guards = [part.register_step_pre_hook(self._reject_calls_from_outside) for part in self.parts]
        self.sync()

    # -- the implementation ------------------------------------------------------------------------------------

    def changed(self, params_only: bool = False) -> bool:
        """Return True if the groups hold other parameters than at the last `sync` or, unless `params_only`, others on
        which the choice of an implementation depends."""
        return self._params != self._find_params() if params_only else self._settings != self._find_settings()

    def _find_params(self) -> list[int]:
        found: list[int] = []
        for group in self.optimizer.param_groups:
            found += map(id, group["params"])
        return found

    def _find_settings(self) -> list[Any]:
        settings: list[Any] = [vars(part).get("step") for part in self.parts]
        for group in self.optimizer.param_groups:
            settings += map(id, group["params"])
            settings += map(torch.Tensor.stride, group["params"])
            settings += map(bool, map(group.get, _SETTINGS))
        return settings

    def sync(self) -> None:
        """Choose the implementation again: fused in the groups where the user left the choice to torch and it is
        exact."""
        groups = {(part, number): group for part in self.parts for number, group in enumerate(part.param_groups)}
        for place, group in groups.items():  # the choice made here may not be exact any more
            if place in self.switched and group["fused"] is True and group["foreach"] is False:
                group["fused"] = group["foreach"] = None
        known = {part: type(part) in _TAKES_GRAD_SCALE and _has_own_step(part) for part in self.parts}
        exact = {place: known[place[0]] and self._is_exact(group, place[0]) for place, group in groups.items()}
        self.switched = set()
        for place, group in groups.items() if self._allow_fused else ():
            # In half precision the kernel rounds once where the plain optimizer rounds after each operation.
            half = any(param.dtype in HALF for param in group["params"])
            if exact[place] and not half and group.get("fused") is None and group.get("foreach") is None:
                group["fused"], group["foreach"] = True, False
                self.switched.add(place)
        for part in self.parts:
            _place_step_counters(part)
        self.takes_grad_scale = all(
            (*known.values(), *exact.values(), *(group.get("fused") for group in groups.values()))
        )
        self._params, self._settings = self._find_params(), self._find_settings()
        dtypes = {target.dtype for target in self._masters.stepped.values()}
        self.divides_in = torch.float64 if torch.float64 in dtypes else torch.float32

    def _is_exact(self, group: dict[str, Any], optimizer: optim.Optimizer) -> bool:
        """Return True if the fused kernel does the same as the plain one for this group. The CPU's ignore strides: they
        need dense parameters, and state with the same strides."""
        dampened = group.get("momentum", 0) != 0 and group.get("dampening", 0) != 0  # the first step is special then
        kinds = {(p.device, p.dtype) for p in group["params"]}
        has_kernel = all(device.type in ("cpu", "cuda") and dtype.is_floating_point for device, dtype in kinds)
        laid_out = all(
            is_dense(layout := self._masters.layouts.get(param, param))
            and all(
                same_strides(value, layout)
                for value in optimizer.state.get(param, {}).values()
                if isinstance(value, torch.Tensor) and value.shape == param.shape
            )
            for param in group["params"]
        )
        return not dampened and not group.get("differentiable") and has_kernel and len(kinds) <= 1 and laid_out

    def avoid_fused(self) -> None:
        """Leave the choice to torch from now on: gradients are sparse, which fused kernels cannot take."""
        if self._allow_fused:
            self._allow_fused = False
            self.sync()

    def close(self) -> None:
        """Restore the optimizer's original implementation."""
        self.avoid_fused()
        for guard in self._guards:
            guard.remove()

    @property
    def fuses_unscale(self) -> bool:
        """True if the optimizer's kernels unscale and skip themselves. (Not with user hooks before its step: these
        expect unscaled gradients, and no call in an update that is skipped.)"""
        hooks = any(len(part._optimizer_step_pre_hooks) > 1 for part in self.parts)  # in addition to the guard
        return self.takes_grad_scale and not hooks and not all_optimizers._global_optimizer_pre_hooks

    @property
    def can_step_in_buckets(self) -> bool:
        """True if `step` may be called with some of the gradients at a time: the optimizer is elementwise, and has no
        hooks, which expect one call."""
        hooks = any(len(p._optimizer_step_pre_hooks) > 1 or p._optimizer_step_post_hooks for p in self.parts)
        of_all = all_optimizers._global_optimizer_pre_hooks or all_optimizers._global_optimizer_post_hooks
        return all(map(is_elementwise, self.parts)) and not hooks and not of_all

    # -- the step ----------------------------------------------------------------------------------------------

    def buckets(self, grads: Grads, publishes: bool) -> list[list[ParamShard]]:
        """The shards to step together: several buckets where gradients are copied to fp32 (few copies then exist at a
        time), or new weights are published to other ranks (which overlaps the rest of the update).

        With one bucket the copies are made now: norms are faster in fp32 than in half precision.
        """
        masters = bool(self._masters.masters)
        buckets = [list(grads)]  # also without gradients: the optimizer's hooks run then
        if grads and (masters or publishes) and self.can_step_in_buckets:
            numel = sum(grad.numel() for grad in grads.values())
            limit = bucket_bytes(self._buckets_as, numel if publishes else 0)
            if 4 * numel > limit:
                buckets = by_bytes(grads, limit, lambda shard: 4 * shard.param.numel())
        if masters and len(buckets) == 1:
            self._fit(grads, grads)
        return buckets

    def _fit(self, shards: Iterable[ParamShard], grads: Grads) -> None:
        """Convert the gradients of `shards` to the dtype and strides of the tensors in the optimizer, as its kernels
        need, and free the old ones."""
        converted, sources, copies = [], [], []
        layouts = self._masters.layouts  # of a few tensors, or none: the hash of a tensor is computed in Python
        for shard in shards:
            grad, target = grads[shard], self._masters.stepped[shard]
            layout = layouts.get(target, target) if layouts else target
            if grad.layout is not torch.strided:
                grads[shard] = grad.to(target.dtype)  # these have no strides, and no fused kernels
            elif grad.dtype != target.dtype or (grad.stride() != layout.stride() and not same_strides(grad, layout)):
                grads[shard] = copy = torch.empty_like(layout, dtype=target.dtype)
                sources.append(grad)
                copies.append(copy)
            else:
                continue
            converted.append(shard.param)
        if converted:
            clear_grads(converted)
        if copies:
            foreach_copy_(copies, sources)

    def step(
        self,
        shards: Sequence[ParamShard],
        all_grads: Grads,
        divisor: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        bucketed: bool,
    ) -> None:
        """Step with the gradients of `shards`, which are used up and taken out of `all_grads`.

        Args:
            divisor: the gradients are divided by it (0-dim, in `divides_in`); None for 1.
            found_inf: 1.0 to skip (0-dim fp32), where the optimizer `fuses_unscale`; None to step.
            bucketed: `shards` are some of many buckets: show the optimizer only their parameters, so that it does not
                go through all of them for each bucket.
        """
        if bucketed or not self._masters.masters:  # else they fit already
            self._fit(shards, all_grads)
        targets, grads = [self._masters.stepped[s] for s in shards], [all_grads.pop(s) for s in shards]
        self.used = grads if self._device.type == "cpu" else []
        for target, grad in zip(targets, grads, strict=True):
            if target.grad is not grad:
                target.grad = grad
        groups, fuses_unscale = self.optimizer.param_groups, self.fuses_unscale
        is_in_graph = is_captured(self._device)
        if divisor is not None and (divisor.dtype == torch.float64 or not fuses_unscale):
            foreach_mul_(grads, 1 / divisor)
            divisor = None
        before: list[dict[str, Any]] = [
            {key: group[key] for key in ("params", "capturable") if key in group}
            for group in (groups if bucketed or is_in_graph else ())
        ]
        if bucketed:
            ids = set(map(id, targets))
            for group in groups:
                group["params"] = [param for param in group["params"] if id(param) in ids]
        if is_in_graph:  # torch refuses fused groups in a capture, though their kernels can; and if they
            for group in groups:  # kept the setting, it would warn in each ordinary step
                if group.get("fused") and "capturable" in group:
                    group["capturable"] = True
        told = self.parts if fuses_unscale and not (divisor is None and found_inf is None) else []
        self._stepping = True
        try:
            for part in told:
                vars(part).update(grad_scale=divisor, found_inf=found_inf)
            for part in self.parts if fuses_unscale else ():
                _seed_momentum(part)
            with self.scope():
                self.optimizer.step()
        finally:
            self._stepping = False
            for part in told:
                del vars(part)["grad_scale"], vars(part)["found_inf"]
            for group, settings in zip(groups, before, strict=False):
                group.update(settings)
            for target in targets:
                target.grad = None

    def _reject_calls_from_outside(self, *_: Any) -> None:
        if not self._stepping:
            raise InputError(
                "optimizer.step() was called outside the engine, which may have scaled its gradients; call "
                "engine.step(), or step() of the optimizer that convert_to_amp returned"
            )


def is_stepped(optimizer: optim.Optimizer) -> bool:
    """Return True if `optimizer` belongs to an engine, or to `convert_to_amp`, which steps it."""
    hooks = [hook for part in parts_of(optimizer) for hook in part._optimizer_step_pre_hooks.values()]
    return any(isinstance(getattr(hook, "__self__", None), Stepper) for hook in hooks)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Return True if several calls of `step`, each with some of the gradients, do the same as one call with all."""
    is_elementwise = type(optimizer) in _ELEMENTWISE and getattr(optimizer, "unit", "element") == "element"
    return is_elementwise and _has_own_step(optimizer)


def _has_own_step(optimizer: optim.Optimizer) -> bool:
    """Return True if `optimizer.step` is its class's, below the wrappers of torch and its LR schedulers."""
    return inspect.unwrap(optimizer.step) is inspect.unwrap(type(optimizer).step)


def _seed_momentum(optimizer: optim.Optimizer) -> None:
    """Give the parameters with a gradient a momentum of zeros where fused SGD steps them for the first time.

    torch leaves it uninitialised where that step is skipped, and uses it in the next; and it fails where only some have
    one. Zeros are exact if `dampening` is 0.
    """
    if type(optimizer) is optim.SGD and any(group["momentum"] != 0 for group in optimizer.param_groups):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            if param.grad is not None and optimizer.state[param].get("momentum_buffer") is None:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param)


def _place_step_counters(optimizer: optim.Optimizer) -> None:
    """Move the `step` counters to the device that the implementation expects: for fused groups the parameter's, in
    fp32; the CPU where `step` reads them on the host."""
    for group in optimizer.param_groups if type(optimizer) in _TAKES_GRAD_SCALE else ():
        read = not group.get("fused") and not group.get("capturable")
        for param in group["params"]:
            step = optimizer.state[param].get("step") if param in optimizer.state else None
            if isinstance(step, torch.Tensor) and (read or group.get("fused")):
                optimizer.state[param]["step"] = step.cpu() if read else step.to(param.device, torch.float32)
