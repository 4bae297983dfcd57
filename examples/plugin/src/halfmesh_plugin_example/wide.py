"""An axis of the mesh: each rank computes some of the output features of every linear layer, and all of them get all.

It is the simplest form of tensor parallelism: no layer hands its shard on, so each one gathers its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from halfmesh import Options
from halfmesh.options import PositiveInt
from halfmesh.parallel.axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from halfmesh.parallel.shard_spec import Split


class WideOptions(Options):
    """`parallel = dict(wide=2)`, or `dict(wide=dict(size=2, least=64))`."""

    size: PositiveInt = 1
    least: PositiveInt = 1
    """Layers with fewer output features stay whole."""


class Wide(Axis):
    """`parallel.wide`."""

    dim = "wd"
    options = WideOptions
    modes = ("torch", "naive")

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        for other in ("tensor", "pipeline"):
            if config.parallel.sizes[other] > 1:
                yield f"parallel.{other}", "wide has not been tried with it; leave one of the two out"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[list[str], list[str]]:
        """The names of the layers."""
        size, least = inputs.options.size, inputs.options.least
        uses = Counter(id(param) for _, param in inputs.model.named_parameters(remove_duplicate=False))
        found = [
            name
            for name, module in inputs.model.named_modules()
            if isinstance(module, nn.Linear) and module.out_features >= least and module.out_features % size == 0
            if all(uses[id(param)] == 1 for param in module.parameters())
        ]
        problem = f"parallel.wide: no linear layer has {least} or more output features that {size} divides; take wide=1"
        return found, [] if found else [problem]

    @staticmethod
    def apply(inputs: AxisInputs) -> WideLayers:
        return WideLayers(inputs, Wide.dim)


class WideLayers(AppliedAxis):
    """The layers, sharded."""

    def __init__(self, inputs: AxisInputs, dim: str) -> None:
        super().__init__(inputs.context, dim, "wide group")
        group, self._layers = inputs.context.group(dim), len(inputs.plan)
        for name in inputs.plan:
            layer = inputs.model.get_submodule(name)
            for param in layer.parameters():
                self.split(inputs.optimizer, param, Split(dim=0))
            layer.register_forward_pre_hook(lambda _, args: (_SumGradient.apply(args[0], group),))
            layer.register_forward_hook(lambda _, args, output: _Gather.apply(output, group))
        self.take_whole_states(inputs.model, inputs.optimizer)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        return {"layout": f"1/{self.size} of {self._layers} linear layers"}


class _SumGradient(torch.autograd.Function):
    """Each rank's shard of the layer gives a part of its input's gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = grad.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Gather(torch.autograd.Function):
    """All ranks get all features, and compute the same with them: each one's gradient is what its shard gets of it."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad.chunk(ctx.group.size(), dim=-1)[ctx.group.rank()], None
