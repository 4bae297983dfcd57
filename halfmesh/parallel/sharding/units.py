"""Which modules of a model FSDP2 shards each by itself, over which ranks, and in which formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..._torch import has_grad_hooks, outside_of_dry_run
from ...errors import shorten
from ..context import ParallelContext


@dataclass(frozen=True)
class ShardOptions:
    """How weights are held. The names are those of the config and of FSDP2.

    Attributes:
        param_dtype: weights are gathered, and the model computes, in it; None: as they are.
        cast_inputs: what each unit is called with is cast to it, too. (Not where the engine casts what the model gets.)
        output_dtype: of what the model returns; None: as it comes.
        buffer_dtype: floating-point buffers are cast to it; None: they stay.
        cpu_offload: parts, their gradients and the optimizer's state are in host memory, and are stepped there.
    """

    param_dtype: torch.dtype | None = None
    cast_inputs: bool = False
    output_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    cpu_offload: bool = False


@dataclass(frozen=True)
class Units:
    """Which modules gather their weights each for themselves.

    Attributes:
        blocks: names of the repeated ones; a rank may not have all of them.
        not_called: under a pipeline, names of the modules that stages do not call as a whole, the model itself among
            them. Whatever else has parameters is a unit then. Without one (None) the model is the unit of the rest.
    """

    blocks: Sequence[str]
    not_called: Collection[str] | None = None

    def find(self, model: nn.Module) -> list[nn.Module]:
        """The units, those that are in other units first."""
        known = dict(model.named_modules())
        blocks = [known[name] for name in self.blocks if name in known]
        if self.not_called is None:
            return [*blocks, model]
        within = {inner for block in blocks for inner in block.modules()}
        rest = [module for name, module in known.items() if module not in within and name not in self.not_called]
        return blocks + [module for module in rest if next(module.parameters(recurse=False), None) is not None]

    def left_over(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that no unit can have: of modules that are not called, or in several units."""
        seen: Counter[nn.Parameter] = Counter()
        taken: set[nn.Module] = set()
        for unit in self.find(model):
            own = {inner for inner in unit.modules() if inner not in taken}
            taken |= own
            seen.update({param for inner in own for param in inner.parameters(recurse=False)})
        return {param for param in model.parameters() if seen[param] != 1}


def can_be_sharded(param: torch.Tensor) -> bool:
    """Whether FSDP2 takes it."""
    return param.dim() > 0 and param.numel() > 0 and param.is_contiguous()


def find_problems(model: nn.Module, casts: bool) -> Iterator[str]:
    """Why FSDP2 cannot shard `model` so that it trains as it does whole.

    Args:
        casts: whether the mode gives all parameters one dtype.
    """
    dtypes = {name: param.dtype for name, param in model.named_parameters() if can_be_sharded(param)}
    first = next(iter(dtypes.items()), None)
    if first is not None and not casts and len(set(dtypes.values())) > 1:
        others = [name for name, dtype in dtypes.items() if dtype != first[1]]
        yield (
            f"parallel.data: 'fsdp' gathers weights of one dtype together, but {shorten(others)} differ from "
            f"{first[0]} ({first[1]}); give all parameters one dtype, or use data='zero1'"
        )
    scripts = [name or "the model" for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripts:
        yield f"parallel.data: {shorten(scripts)} is compiled by torch.jit, which FSDP2 cannot shard; use data='zero1'"
    hooked = [name for name, param in model.named_parameters() if has_grad_hooks(param)]
    if hooked:
        yield (
            f"parallel.data: {shorten(hooked)} has hooks on its gradient, which FSDP2 never calls (it computes with "
            "other parameters); remove them, or use data='zero1'"
        )


def make_mesh(context: ParallelContext, hybrid: int | None) -> DeviceMesh:
    """The data ranks as FSDP2 wants them: in one dim, or with `hybrid` ranks to a copy in two. All ranks together."""
    with outside_of_dry_run():  # a mesh looks itself up in a table of ranks
        return _make_mesh(context, hybrid)


def _make_mesh(context: ParallelContext, hybrid: int | None) -> DeviceMesh:
    kind = context.device.type
    if hybrid is None or hybrid == context.dp_size:
        return DeviceMesh.from_group(context.dp_group, kind, mesh_dim_names=("shard",))
    places = torch.arange(context.dp_size).view(-1, hybrid)
    copies = [context.subgroup("dp", column) for column in places.T.tolist()]
    parts = [context.subgroup("dp", row) for row in places.tolist()]
    mine = [next(group for group in groups if group is not None) for groups in (copies, parts)]
    ranks = torch.tensor(dist.get_process_group_ranks(context.dp_group)).view(-1, hybrid)
    return DeviceMesh.from_group(mine, kind, mesh=ranks, mesh_dim_names=("replicate", "shard"))
