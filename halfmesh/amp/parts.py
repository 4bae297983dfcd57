"""The gradients of an update in parts that are stepped one after another, and where each gradient goes.

How they are cut is the same from one update to the next as a rule, and is remembered: finding it out anew takes a dozen
calls of Python for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .. import torch_private
from ..shard import ParamShard, clear_grads
from .collected import Gradients, Layout, forms
from .holdings import Holdings
from .master_weights import by_bytes, publish
from .staging import Staging


class Part:
    """Shards that are stepped together.

    Attributes:
        shards: whose gradients these are.
        targets: what the optimizer holds for each of them.
    """

    def __init__(self, holdings: Holdings, pairs: Sequence[tuple[ParamShard, torch.Tensor]]) -> None:
        self.shards = [shard for shard, _ in pairs]
        self.targets = [holdings.target(shard) for shard in self.shards]
        self._replaced = [s for s, target in zip(self.shards, self.targets, strict=True) if target is not s.param]
        self._masters = [(shard.param, holdings.target(shard)) for shard in self._replaced]
        self._sparse = [place for place, (_, grad) in enumerate(pairs) if grad.layout != torch.strided]
        # Fused kernels need both alike. (Sparse gradients have no strides, and no such kernels.)
        self._converted = [
            place
            for place, ((_, grad), target) in enumerate(zip(pairs, self.targets, strict=True))
            if grad.layout == torch.strided and (grad.dtype, grad.stride()) != (target.dtype, target.stride())
        ]
        self.receiving = [self.targets[place] for place in self._converted]
        """The targets whose gradients are made in their own dtype and strides."""
        self.is_exact = all(
            torch.promote_types(g.dtype, t.dtype) == t.dtype for (_, g), t in zip(pairs, self.targets, strict=True)
        )
        """Whether nothing is lost in that."""
        self.memory: list[torch.Tensor] | None = None
        """For the gradients of `receiving`; None: new memory each time."""

    def hide(self) -> None:
        """Take their gradients from parameters that the optimizer holds itself: each part steps all that have one."""
        for shard, target in zip(self.shards, self.targets, strict=True):
            if target is shard.param:
                shard.param.grad = None

    def convert(self, grads: list[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients in the dtypes and strides of their targets."""
        converted = list(grads)
        if self.receiving:
            made = list(map(torch.empty_like, self.receiving)) if self.memory is None else self.memory
            torch_private.foreach_copy_(made, [grads[place] for place in self._converted])
            for place, grad in zip(self._converted, made, strict=True):
                converted[place] = grad
        for place in self._sparse:
            converted[place] = converted[place].to(self.targets[place].dtype)
        return converted

    def attach(self, converted: list[torch.Tensor]) -> None:
        """Give each target its gradient, and drop the one it is made from."""
        clear_grads([shard.param for shard in self.shards])
        for target, grad in zip(self.targets, converted, strict=True):
            target.grad = grad

    def detach(self) -> None:
        """The gradients are used."""
        for target in self.targets:
            target.grad = None

    def detach_masters(self) -> None:
        """The gradients of masters are of no use."""
        for _, master in self._masters:
            master.grad = None

    def publish(self) -> None:
        """Round the masters into the model."""
        if self._masters:
            publish(self._masters)


class Parts:
    """Cuts the gradients of one update after another.

    Several parts are made where fp32 copies are made of gradients, so that few exist at a time, or where new weights
    are taken to other ranks.

    Attributes:
        at_once: whether the last ones are a single part of no more than the limit: so few copies that the gradients
            they are made of need not go before the update does.
    """

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings
        self.at_once = False
        self._staging = Staging()
        self._known: object = None
        self._converted: Layout | None = None  # of gradients that are converted
        self._parts: list[Part] = []

    def of(self, grads: Gradients, sends: bool, limit: int) -> list[Part]:
        """The parts of an update with these gradients, in this order.

        Args:
            sends: what is stepped can be on its way to others while the rest is stepped.
            limit: bytes of fp32 gradients in a part.
        """
        if self.has_converted(grads):
            return self._parts
        holdings = self._holdings
        streams = holdings.streams
        now = (grads.layout, sends, streams)  # another layout after each refresh
        if now == self._known:
            return self._parts
        converts = any(grad.dtype != holdings.target(shard).dtype for shard, grad in grads)
        buckets = by_bytes(grads.layout.shards, limit if (converts or sends) and streams else math.inf)
        rest = iter(grads)
        self._parts = [Part(holdings, [next(rest) for _ in bucket]) for bucket in buckets or [[]]]  # hooks run anyway
        if streams:
            self._give_memory()
        self.at_once = len(self._parts) == 1 and 4 * sum(grad.numel() for _, grad in grads) <= limit
        self._known, self._converted = now, None
        return self._parts

    def convert(self, grads: Gradients, limit: int) -> Gradients:
        """These gradients as they will be stepped, where that is done in one part, takes copies and loses nothing; else
        they themselves."""
        parts = self.of(grads, False, limit)
        if len(parts) > 1 or not parts[0].receiving or not parts[0].is_exact:
            return grads
        held = grads.take()
        tensors = parts[0].convert(held)
        if not self.at_once:
            held.clear()
        if self._converted is None:
            self._converted = Layout(parts[0].shards, forms(tensors), False)
        return Gradients(self._converted, tensors)

    def has_converted(self, grads: Gradients) -> bool:
        """Whether these are gradients that `convert` has made."""
        return grads.layout is self._converted

    def _give_memory(self) -> None:
        """One part is stepped after the other, in the same memory."""
        sizes = {part: sum(target.numel() for target in part.receiving) for part in self._parts if part.receiving}
        for part in sorted(sizes, key=sizes.__getitem__, reverse=True):  # so that there is enough for the next one, too
            if len({(target.dtype, target.device) for target in part.receiving}) == 1:
                part.memory = self._staging.views(part.receiving)
