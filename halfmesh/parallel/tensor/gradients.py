"""Gradients of parameters that every rank of a tensor group has whole."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from ...errors import InputError, shorten
from ...shard import ParamShard
from ..gradient_sums import SharedGradients
from .layers import TensorAxis

_LOOKS = 5  # at gradients that are zero
_SAMPLE = 256  # elements of each gradient


class TensorGradients(SharedGradients):
    """Sums the gradients of parameters that work on a part of the activations on each rank of a tensor group (norms
    under sequence parallelism).

    Before the first updates it compares the gradients of the other whole parameters, which have to be equal: where they
    are not, the plan is wrong. A gradient of zero (before a layer that starts at zero) is looked at again.

    Args:
        partial: the parameters whose gradients are summed.
        split: those of which a rank holds a part.
        try_out: is called before gradients are completed.
        shards: of the parameters that are trained.
    """

    def __init__(
        self,
        axis: TensorAxis,
        partial: Collection[nn.Parameter],
        split: Collection[nn.Parameter],
        try_out: Callable[[], None],
        shards: Sequence[ParamShard],
    ) -> None:
        self._axis, self._split, self._try_out = axis, split, try_out
        self._looks: dict[nn.Parameter, int] = {}  # how often each was compared
        super().__init__(partial, axis.group, shards)

    def cover(self, shards: Sequence[ParamShard]) -> None:
        super().cover(shards)
        self._whole = [s for s in shards if s.model_param not in self._params and s.model_param not in self._split]

    def finish(self) -> None:
        self._try_out()  # before gradients are compared, which a wrong plan makes differ, too
        super().finish()
        self._compare_whole()

    @torch.no_grad()
    def _compare_whole(self) -> None:
        """Raise InputError if gradients that have to be equal on all ranks of the group are not."""
        looks = self._looks
        shards = [s for s in self._whole if s.param.requires_grad and looks.get(s.param, 0) < _LOOKS]
        if not shards:
            return
        samples = torch.stack([_sample(shard.param.grad, self._axis.device) for shard in shards])
        everyone = torch.stack(self._axis.gathered(samples))
        if not bool(everyone.isfinite().all()):
            return  # an overflow is not comparable; the next update is
        sizes = everyone.norm(dim=-1).amax(0)
        for shard, size in zip(shards, sizes.tolist(), strict=True):
            looks[shard.param] = _LOOKS if size else looks.get(shard.param, 0) + 1
        apart = (everyone - everyone[0]).norm(dim=-1).amax(0) > 1e-2 * sizes  # far above what rounding does
        names = [shard.name for shard, differs in zip(shards, apart.tolist(), strict=True) if differs]
        if names:
            raise InputError(
                f"the gradients of {shorten(names)} differ between the ranks of a tensor group, each of which has "
                "these parameters whole: they work on activations that are divided, and the plan does not say so; give "
                "their modules the style 'partial', which sums the gradients, or leave the layers around them whole"
            )


def _sample(grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`_SAMPLE` of the gradient's elements, from all over it. (Sums would not do: those of large tensors are alike.)"""
    sample = torch.zeros(_SAMPLE, dtype=torch.float64, device=device)
    if grad is not None:
        values = (grad.coalesce().values() if grad.is_sparse else grad).reshape(-1)
        some = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE]
        sample[: some.numel()] = some
    return sample
