"""A data strategy: each parameter is stepped by one data rank, which holds its optimizer state and sends the result.

It needs less memory than `replicate`, and is simpler than `zero1`, which cuts parameters so that all ranks step equally
much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from halfmesh import Options
from halfmesh.parallel.data_strategy import DataStrategy, StrategyInputs
from halfmesh.parallel.reducer import Reducer
from halfmesh.parallel.shard_spec import Placement
from halfmesh.utils.param_shard import ParamShard, set_grad


class OwnedOptions(Options):
    """What may stand in `parallel.data` beside `strategy="owned"`."""

    owner: Literal["next", "lightest"] = "next"
    """Who gets a parameter: each rank in turn, or the one that has the fewest numbers so far."""


class Owned(DataStrategy):
    """What the optimizer holds for a parameter is all of it on the rank that owns it, and nothing on the others."""

    options = OwnedOptions
    modes = ("torch", "naive")
    shards_state = True

    def __init__(self, inputs: StrategyInputs) -> None:
        super().__init__(inputs)
        size, rank = inputs.context.dp_size, inputs.context.dp_rank
        self.owners: dict[ParamShard, int] = {}
        parts: dict[nn.Parameter, ParamShard] = {}
        held = [0] * size
        for index, shard in enumerate(inputs.shards):
            whole = shard.param
            owner = index % size if inputs.options.owner == "next" else held.index(min(held))
            held[owner] += whole.numel()
            own = whole.data.view(-1) if owner == rank else whole.data.new_empty(0)
            # The norm adds up over all ranks, of which one has it now: a weight of its own.
            part = ParamShard(shard.name, nn.Parameter(own), shard.weight * size, source=shard)
            part.param.requires_grad_(whole.requires_grad)
            parts[whole], self.owners[part] = part, owner
        for group in inputs.optimizer.param_groups:
            group["params"][:] = [parts[param].param for param in group["params"]]
        self.shards = list(self.owners)
        self.publisher = self

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> OwnedReducer:
        return OwnedReducer(shards, buffers, self.inputs.context.dp_group, self.inputs.reduce)

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        whole = _whole(shard)
        return source.run(whole.shape, whole.stride(), 0, shard.param.numel())

    # -- the publisher -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """An update begins."""

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """These are new, here."""

    def finish(self) -> None:
        """Each owner sends what it has stepped."""
        for part, owner in self.owners.items():
            dist.broadcast(_whole(part).data, group_src=owner, group=self.inputs.context.dp_group)


class OwnedReducer(Reducer):
    """Averages the gradients of whole parameters, and hands them to the parts."""

    def set_params(self, shards: Sequence[ParamShard]) -> None:
        self._parts = list(shards)
        super().set_params([part.source or part for part in shards])

    def finish(self) -> None:
        super().finish()
        for part in self._parts:
            grad = _whole(part).grad
            if grad is not None:
                set_grad(part.param, grad.reshape(-1)[: part.param.numel()])  # sums in fp32 of parameters in fp16, too


def _whole(part: ParamShard) -> nn.Parameter:
    """The model's parameter."""
    assert part.source is not None
    return part.source.param
