"""Handles gradients of a model that FSDP2 shards: tells FSDP2 when to sum them, and passes them to the update."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ...errors import InputError, shorten
from ...utils.param_shard import ParamShard
from ...utils.torch_private import grad_hooks
from ..buckets import all_reduce
from ..data_strategy import UNFINISHED, WithheldGradient
from ..reducer import Buffers, Reducer
from .fsdp_wrap import add_missing_grads, watch_grads


class FSDPReducer(Reducer):
    """FSDP2 sums the gradients of the parameters that it shards. This reducer sums those of the others, averages
    running statistics, and sets the shards' gradients.

    Args:
        strategy: the `FSDP` whose reducer it is.
        withholds: summed gradients are not final, so that computing with them is rejected.
            (Changes of a DTensor cannot be detected: torch's `_foreach` functions do not count them.)

    Raises:
        InputError: a cycle ends and FSDP2 did not know which backward was its last, or a backward failed.
    """

    sums_once = True

    def __init__(self, strategy: Any, shards: Sequence[ParamShard], buffers: Buffers, withholds: bool) -> None:
        self._strategy = strategy
        self._sharded = strategy.sharded
        self._withholds = withholds
        self._given = [(shard, shard.model_param.requires_grad) for shard, _ in self._sharded]
        self._hooked = [shard.name for shard, _ in self._sharded if grad_hooks(shard.model_param)]
        self._used: set[int] = set()  # ids of shards whose parameters got a gradient on this rank
        watch_grads(strategy.units, strategy.slots, self._used)
        self._is_broken = False
        inputs = strategy.inputs
        # FSDP2 sums over the ranks that shard a parameter, which may be fewer: `Reducer.group_of`.
        ranks = [inputs.group_of(shard.model_param).size() for shard, _ in self._sharded]
        times = inputs.mean_over / inputs.reduce.loss_parts
        self._factors = [1.0 if inputs.reduce.mean else times / size for size in ranks]
        super().__init__(shards, buffers, inputs.group, inputs.reduce, inputs.group_of)

    @property
    def is_complete(self) -> bool:
        """See `Reduction`."""
        return super().is_complete and not self._used

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        super().set_params([shard for shard in shards if shard.source is None])

    def open(self, last: bool) -> None:
        if self._is_broken:
            raise InputError("gradients were dropped before the update; some ranks may have summed them; end the run")
        self._reject_lost_changes()
        self._set_gradient_sync(last)
        super().open(last)

    def expect_last(self, params: Collection[nn.Parameter], rest: bool) -> None:
        self._set_gradient_sync(True, params)
        super().expect_last(params, rest)

    def _receive(self, *asked: torch.Tensor) -> list[list[float]]:
        used = [id(shard) in self._used for shard, _ in self._sharded]
        counts = torch.tensor(used, dtype=torch.float32).to(self._strategy.inputs.context.device, non_blocking=True)
        all_reduce(counts, self.group).wait()
        found = super()._receive(*asked, *([] if all(used) else [counts]))
        self._take_grads([1.0] * len(used) if all(used) else found.pop())
        return found

    def forget(self) -> None:
        self._is_broken |= self.state == "local"
        self._used.clear()
        super().forget()

    def _reject_lost_changes(self) -> None:
        """Raise InputError for changes of the original parameters, which FSDP2 has replaced and does not notice."""
        if hooked := self._hooked + [shard.name for shard, weight in self._sharded if grad_hooks(weight)]:
            raise InputError(f"FSDP2 never calls the hooks on the gradient of {shorten(hooked)}; use data='zero1'")
        if frozen := [shard.name for shard, trained in self._given if shard.model_param.requires_grad != trained]:
            raise InputError(f"requires_grad of {shorten(frozen)} was changed; under fsdp change that of engine.model")

    def _set_gradient_sync(self, last: bool, params: Collection[nn.Parameter] | None = None) -> None:
        """Begin a backward; FSDP2 sums gradients over the ranks if it is the `last` before the update.

        Args:
            params: the parameters that get gradients in it. None: all.
        """
        for _, weight in self._sharded if self._withholds else ():
            if isinstance(weight.grad, WithheldGradient):
                weight.grad = None
        for unit in self._strategy.units_with(params):
            unit.set_requires_gradient_sync(last)
            if last:
                add_missing_grads(unit)

    @cached_property
    def _withheld(self) -> list[WithheldGradient]:
        """Placeholders for the gradients of the parameters that are sharded."""
        return [WithheldGradient.of(weight, shard.name, UNFINISHED) for shard, weight in self._sharded]

    @torch.no_grad()  # so that `to_local` makes no node of a graph
    def _take_grads(self, counts: Sequence[float]) -> None:
        """Set the shards' gradients to those that FSDP2 has summed.

        Args:
            counts: the number of ranks on which each parameter had a gradient; if it is 0 its shards get none.

        Raises:
            InputError: FSDP2 has not summed a gradient.
        """
        lost = []
        given = zip(self._sharded, self._factors, counts, strict=True)
        for index, ((shard, weight), factor, count) in enumerate(given):
            if weight.grad is not None and count:
                local, held = weight.grad.to_local(), shard.param.grad
                if factor != 1:
                    local.mul_(factor)
                if not self._withholds:  # a further backward adds to the DTensor's gradient, whose memory this is
                    shard.param.grad = local
                    continue
                shard.param.grad = local if held is None else held.add_(local)
                weight.grad = self._withheld[index]
            elif count and weight.requires_grad:
                lost.append(shard.name)
            elif shard.param.grad is None:  # zeros of FSDP2's
                weight.grad = None
        self._used.clear()
        if lost:
            self._is_broken = True
            raise InputError(
                f"FSDP2 has not summed the gradients of {shorten(lost)}. If engine.step(last=True) ended the cycle, "
                "loop over engine.dataloader. If only some ranks used them, that needs torch 2.13. If a module returns "
                "tensors inside an object, return tuples or dicts"
            )
