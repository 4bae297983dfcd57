"""Gradients of the parameters that the ranks of the tensor axis replicate."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import nn

from ...errors import InputError, shorten
from ...utils.param_shard import ParamShard
from ...utils.torch_private import all_gather
from ..reducer import SharedGradients
from .layers import TensorAxis

_LOOKS = 5  # at gradients that are zero
_SAMPLE = 256  # elements of each gradient


class TensorGradients(SharedGradients):
    """Sums the gradients of parameters that work on this rank's shard of the activations (norms under sequence
    parallelism).

    In the first updates it compares gradients of replicated parameters over the ranks: the plan is wrong if those that
    are summed are equal (except for shards of the sequence, where a mean gives equal ones), or others differ. Gradients
    of zero (before a layer that starts at zero) are compared again in the next update.

    Args:
        partial: the parameters whose gradients are summed.
        shards_sequence: ranks compute different tokens.
        try_out: called before gradients are completed.
        shards: of the parameters that are trained.
    """

    def __init__(
        self,
        axis: TensorAxis,
        partial: Collection[nn.Parameter],
        shards_sequence: bool,
        try_out: Callable[[], None],
        shards: Sequence[ParamShard],
    ) -> None:
        self._axis, self._try_out, self._shards_sequence = axis, try_out, shards_sequence
        self._looks: dict[nn.Parameter, int] = {}  # the number of comparisons of each
        super().__init__(partial, axis.group, shards)

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        super().set_params(shards)
        self._whole = [shard for shard in shards if shard.model_param not in self._axis.splits]

    def finish(self) -> None:
        self._try_out()  # before the comparison, which a wrong plan fails, too
        self._compare_whole()
        super().finish()

    @torch.no_grad()
    def _compare_whole(self) -> None:
        """Raise InputError if gradients that are to be summed are the same on all ranks, or others are not."""
        looks = self._looks
        shards = [s for s in self._whole if s.param.requires_grad and looks.get(s.param, 0) < _LOOKS]
        if not shards:
            return
        samples = torch.stack([_sample(shard.param.grad, self._axis.device) for shard in shards])
        everyone = samples.new_empty((self._axis.size, *samples.shape))
        all_gather(everyone.flatten(0, 1), samples, group=self._axis.group)
        if not bool(everyone.isfinite().all()):
            return  # an overflow cannot be compared; the next update can
        sizes = everyone.norm(dim=-1).amax(0)
        for shard, size in zip(shards, sizes.tolist(), strict=True):
            looks[shard.param] = _LOOKS if size else looks.get(shard.param, 0) + 1
        apart = ((everyone - everyone[0]).norm(dim=-1).amax(0) / sizes).tolist()  # nan where all are zero
        summed = [shard.model_param in self._params for shard in shards]
        found = list(zip(shards, apart, summed, strict=True))
        same = [shard.name for shard, share, is_summed in found if is_summed and share < 1e-4]
        if same and not self._shards_sequence:
            raise InputError(
                f"the plan sums the gradients of {shorten(same)} over the ranks of a tensor group ('partial'), but "
                "they are the same on all ranks: the activations there are whole, and the sum would be too large by "
                "the number of ranks; take these modules out of the plan"
            )
        if names := [shard.name for shard, share, is_summed in found if not is_summed and share > 1e-2]:
            raise InputError(
                f"the gradients of {shorten(names)} differ between the ranks of a tensor group, which all hold these "
                "parameters whole: they work on sharded activations, and the plan does not say so; give their modules "
                "the style 'partial', which sums the gradients, or leave the layers around them whole"
            )


def _sample(grad: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """`_SAMPLE` elements spread over the gradient. (Sums of large tensors differ too little.)"""
    sample = torch.zeros(_SAMPLE, dtype=torch.float64, device=device)
    if grad is not None:
        values = (grad.coalesce().values() if grad.is_sparse else grad).reshape(-1)
        some = values[:: max(1, values.numel() // _SAMPLE)][:_SAMPLE]
        sample[: some.numel()] = some
    return sample
