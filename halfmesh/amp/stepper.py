"""From complete gradients and the verdict on them to new weights: the last part of an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import torch_private
from ..errors import InputError
from ..shard import ParamShard, Publisher
from .collected import Gradients
from .direct_step import DirectStep
from .holdings import Holdings
from .master_weights import STREAM_BYTES
from .parts import Part, Parts


class Stepper:
    """Steps the optimizer of `holdings`, and lets nobody else do so."""

    def __init__(self, holdings: Holdings) -> None:
        self.holdings = holdings
        self._optimizer = holdings.optimizer
        self._stepping = False
        self._guard = holdings.guard = self._optimizer.register_step_pre_hook(self._refuse_other_steps)
        self._direct = DirectStep(holdings)
        self._parts = Parts(holdings)
        self.publisher: Publisher | None = None
        """Takes new weights to other ranks."""

    def convert(self, grads: Gradients) -> Gradients:
        """These gradients as they will be stepped, where that is done at once, in fp32 copies; else they themselves.

        The copies have to be made, and on a CPU their norm takes less than half the time of one in half precision.
        """
        return grads if self.publisher is not None else self._parts.convert(grads, STREAM_BYTES)

    def take(self, grads: Gradients, total: torch.Tensor | None, found_inf: torch.Tensor | None) -> None:
        """Divide by `total` and step, unless `found_inf` is set. Empties `grads`, to free them as it goes.

        Args:
            total: 0-dim fp32, or None for 1.
            found_inf: 0-dim fp32, 1.0 to skip; None: take the step.
        """
        folds = self.folds
        if found_inf is not None and not folds:
            if bool(found_inf):  # the one host read of an optimizer that cannot take the verdict along
                return
            found_inf = None
        layout = grads.layout
        if layout.fits and self.publisher is None:
            self.step_part(layout.shards, folds, total, found_inf, grads.tensors)
            return
        if self.publisher is not None:
            self.publisher.begin()
        parts = self._parts.of(grads, self.publisher is not None, STREAM_BYTES)
        converted, held = self._parts.has_converted(grads), grads.take()
        attached = layout.fits and len(parts) == 1
        for part in parts if len(parts) > 1 else ():
            part.hide()
        for part in parts:
            if not attached:
                own = held[: len(part.shards)]
                if not self._parts.at_once:
                    del held[: len(part.shards)]
                part.attach(own if converted else part.convert(own))
                del own
            try:
                self.step_part(part.shards, folds, total, found_inf)
            except Exception:
                self._give_up(parts)
                raise
            self._publish(part)
            if not attached:
                part.detach()
        self._end()

    def step_part(
        self,
        shards: Sequence[ParamShard],
        folds: bool,
        total: torch.Tensor | None,
        found_inf: torch.Tensor | None,
        all_grads: list[torch.Tensor] | None = None,
    ) -> None:
        """Step what has gradients, which are those of `shards`, attached to what the optimizer holds. Where that is all
        that it holds, `all_grads` are they, so that nobody has to look."""
        if self._direct.take(folds, total, found_inf, all_grads):
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

    @property
    def folds(self) -> bool:
        """Whether the optimizer takes the divisor and the verdict along. (Hooks of the user's before its step want
        gradients as they are used, and none in an update that is skipped.)"""
        return self.holdings.folds and not torch_private.has_step_pre_hooks(self._optimizer, self._guard)

    def _publish(self, part: Part) -> None:
        """The targets of `part` are new."""
        part.publish()
        if self.publisher is not None:
            self.publisher.stepped(part.shards)

    def _give_up(self, parts: list[Part]) -> None:
        """A hook of the user's has failed in a part. The model gets what its masters are all the same, and the others,
        who wait for it, what this rank has of all that the update steps."""
        for part in parts:
            part.detach_masters()
            self._publish(part)
        self._end()

    def _end(self) -> None:
        if self.publisher is not None:
            self.publisher.finish()
        self.holdings.note_published()

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
