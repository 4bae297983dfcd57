"""From complete gradients and the verdict on them to new weights: the last part of an update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard, Publisher
from .direct_step import DirectStep
from .holdings import Holdings
from .master_weights import STREAM_BYTES, by_bytes
from .staging import Staging

Grads = list[tuple[ParamShard, torch.Tensor]]


class Stepper:
    """Steps the optimizer of `holdings`, and lets nobody else do so."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self._optimizer = holdings.optimizer
        self._stepping = False
        self._guard = holdings.guard = self._optimizer.register_step_pre_hook(self._refuse_other_steps)
        self._direct = DirectStep(self._optimizer, self._guard)
        self._staging = Staging()
        self.publisher: Publisher | None = None
        """Takes new weights to other ranks."""

    def take(self, grads: Grads, fits: bool, total: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Divide by `total` and step, unless `found_inf` is set. Empties `grads`, to free them as it goes.

        Args:
            fits: whether `grads` are the parameters' own, and fit them.
            total: 0-dim fp32, or None for 1.
            found_inf: 0-dim fp32, 1.0 to skip; None: take the step.
        """
        holdings = self.holdings
        if found_inf is not None and not holdings.folds:
            if bool(found_inf):  # the one host read of an optimizer that cannot take the verdict along
                return
            found_inf = None
        if self.publisher is not None:
            self.publisher.begin()
        parts = [grads] if fits and self.publisher is None else self._parts(grads)
        everything = [shard for part in parts for shard, _ in part]
        if fits and len(parts) == 1:
            try:
                self.step_part(everything, total, found_inf)
            except Exception:
                self._give_up(everything)
                raise
            self._publish(everything)
            self._end()
            return
        for part in parts if len(parts) > 1 else ():  # each steps all that have a gradient
            for shard, _ in part:
                if holdings.target(shard) is shard.param:
                    shard.param.grad = None
        for number, part in enumerate(parts):
            shards = [shard for shard, _ in part]
            self._attach(part, self._staging if self.holdings.streams else None, number)
            try:
                self.step_part(shards, total, found_inf)
            except Exception:
                self._give_up(everything)
                raise
            self._publish(shards)
            for shard in shards:
                holdings.target(shard).grad = None
        self._end()

    def step_part(
        self, shards: Sequence[ParamShard], total: torch.Tensor | None, found_inf: torch.Tensor | None
    ) -> None:
        """Step what has gradients, which are those of `shards`, attached to what the optimizer holds."""
        folds = self.holdings.folds
        if self._direct.take(folds, total, found_inf):
            return
        attributes: dict[str, torch.Tensor] = {}
        if folds:
            named = {"grad_scale": total, "found_inf": found_inf}
            attributes = {name: value for name, value in named.items() if value is not None}
        elif total is not None and shards:
            _multiply([self.holdings.target(shard).grad for shard in shards], 1 / total)
        self._stepping = True
        try:
            self._optimizer.__dict__.update(attributes)
            self._optimizer.step()
        finally:
            self._stepping = False
            for name in attributes:
                delattr(self._optimizer, name)

    def close(self) -> None:
        """The optimizer may step by itself again."""
        self._guard.remove()

    def _publish(self, shards: Sequence[ParamShard]) -> None:
        """The targets of `shards` are new."""
        if self.holdings.masters:
            self.holdings.publish(shards)
        if self.publisher is not None:
            self.publisher.stepped(shards)

    def _give_up(self, everything: Sequence[ParamShard]) -> None:
        """A hook of the user's has failed in a part. The model gets what its masters are all the same, and the others,
        who wait for it, what this rank has of `everything` that the update steps."""
        for shard in everything:
            if self.holdings.target(shard) is not shard.param:
                self.holdings.target(shard).grad = None
        self._publish(everything)
        self._end()

    def _end(self) -> None:
        if self.publisher is not None:
            self.publisher.finish()
        self.holdings.note_published()

    def _parts(self, grads: Grads) -> list[Grads]:
        """The gradients in the parts that are stepped one after another: several where fp32 copies are made of them,
        or where new weights are taken to other ranks.

        Empties `grads`.
        """
        targets = self.holdings.targets
        pairs = {(grad.dtype, targets[id(shard)].dtype) for shard, grad in grads}
        converts = any(source != target for source, target in pairs)
        held = {id(shard): grad for shard, grad in grads}
        sends = self.publisher is not None  # then what is stepped can be on its way while the rest is stepped
        limit = STREAM_BYTES if (converts or sends) and self.holdings.streams else math.inf
        buckets = by_bytes([shard for shard, _ in grads], limit) or [[]]  # without gradients, too, hooks run
        grads.clear()
        return [[(shard, held.pop(id(shard))) for shard in bucket] for bucket in buckets]

    def _attach(self, part: Grads, staging: Staging | None, number: int) -> None:
        """Give each target its gradient, in its own dtype and strides, and drop the one it is made from.

        Empties `part`, the `number`th of the update; what is made lies in `staging`, if that is given.
        """
        targets = self.holdings.targets
        given, sources = [], []
        for shard, grad in part:
            target = targets[id(shard)]
            # Fused kernels need both alike. (Sparse gradients have no strides, and no such kernels.)
            fits = grad.layout == torch.strided and grad.dtype == target.dtype and grad.stride() == target.stride()
            if target is not shard.param:
                shard.param.grad = shard.main_grad = None
            if fits or grad.layout != torch.strided:
                target.grad = grad.to(target.dtype)
            else:
                given.append(target)
                sources.append(grad)
        part.clear()
        if given:
            alike = len({(target.dtype, target.device) for target in given}) == 1
            made = staging.views(given, number) if staging is not None and alike else [*map(torch.empty_like, given)]
            torch_private.foreach_copy_(made, sources)
            for target, grad in zip(given, made, strict=True):
                target.grad = grad

    def _refuse_other_steps(self, *_: Any) -> None:
        if not self._stepping:
            raise InputError(
                "optimizer.step() was called outside the engine, where gradients may be scaled, incomplete or not "
                "checked; call engine.step(), or step() of the optimizer that convert_to_amp returned"
            )


def _multiply(grads: Sequence[torch.Tensor | None], factor: torch.Tensor) -> None:
    """Multiply in place by the 0-dim `factor`, which need not be where they are."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for grad in grads:
        if grad is not None:
            by_device.setdefault(grad.device, []).append(grad)
    for device, held in by_device.items():
        torch_private.foreach_mul_(held, factor.to(device))
