"""Applies torch's `fully_shard` to a model's blocks, and undoes it, for which torch has no function."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor

from ..._torch import has_grad_hooks, outside_of_dry_run
from ...errors import shorten
from ...shard import ParamShard
from ..context import ParallelContext
from ..reducer import ReduceOptions

_FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")


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
    """The modules that gather their weights separately.

    Attributes:
        blocks: names of the repeated ones; a rank may not have all of them.
        not_called: under a pipeline, names of the modules that stages do not call as a whole, the model itself among
            them. Whatever else has parameters is a unit then. Without one (None) the model is the unit of the rest.
    """

    blocks: Sequence[str]
    not_called: Collection[str] | None = None

    def find(self, model: nn.Module) -> list[nn.Module]:
        """The units, inner ones first."""
        known = dict(model.named_modules())
        blocks = [known[name] for name in self.blocks if name in known]
        if self.not_called is None:
            return [*blocks, model]
        within = {inner for block in blocks for inner in block.modules()}
        rest = [module for name, module in known.items() if module not in within and name not in self.not_called]
        return blocks + [module for module in rest if next(module.parameters(recurse=False), None) is not None]

    def left_over(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters that belong to no unit: of modules that are not called, or shared by several units."""
        seen: Counter[nn.Parameter] = Counter()
        taken: set[nn.Module] = set()
        for unit in self.find(model):
            own = {inner for inner in unit.modules() if inner not in taken}
            taken |= own
            seen.update({param for inner in own for param in inner.parameters(recurse=False)})
        return {param for param in model.parameters() if seen[param] != 1}


def can_be_sharded(param: torch.Tensor) -> bool:
    """Whether FSDP2 can shard it."""
    return param.dim() > 0 and param.numel() > 0 and param.is_contiguous()


def find_problems(model: nn.Module, casts: bool) -> Iterator[str]:
    """Why FSDP2 cannot shard `model` with the same result as whole.

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


def wrap(
    unit: nn.Module,
    mesh: DeviceMesh,
    options: ShardOptions,
    reduce: ReduceOptions,
    kept: set[nn.Parameter],
    is_root: bool,
) -> FSDPModule:
    """Shard the parameters of `unit`, in place, but for those that other units within have, and those that are `kept`.

    Args:
        is_root: whether it is the model.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=options.param_dtype,
        reduce_dtype=reduce.dtype,
        output_dtype=options.output_dtype if is_root else None,
        cast_forward_inputs=options.cast_inputs,
    )
    is_pinned = mesh.device_type == "cuda"
    sharded = fully_shard(
        unit,
        mesh=mesh,
        reshard_after_forward=options.reshard_after_forward,
        mp_policy=policy,
        offload_policy=CPUOffloadPolicy(pin_memory=is_pinned) if options.cpu_offload else OffloadPolicy(),
        ignored_params=kept,
    )
    if not reduce.mean:
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # not every backend multiplies as it sums
    if hasattr(sharded, "set_reduce_scatter_unused_params"):  # since torch 2.13
        sharded.set_reduce_scatter_unused_params(True)  # a rank may not use what another does
    return sharded


def add_missing_grads(unit: FSDPModule) -> None:
    """Before the last of several backwards: where FSDP2 holds gradients of `unit` in a wider dtype than its parameters
    have, let it hold zeros of that dtype for the parameters that had none.

    torch 2.13 and 2.14 make these zeros in the parameters' dtype, and then refuse the mixture. Older torch makes none;
    newer torch, where the gradient is a property, makes them right.
    """
    groups: Any = getattr(unit._get_fsdp_state(), "_fsdp_param_groups", ())
    params = [param for group in groups for param in group.fsdp_params if hasattr(param, "_unsharded_param")]
    if hasattr(FSDPParam, "unsharded_accumulated_grad") or all(p.unsharded_accumulated_grad is None for p in params):
        return
    for param in params:
        if param.unsharded_accumulated_grad is None and param._unsharded_param.requires_grad:
            param.unsharded_accumulated_grad = torch.zeros_like(param._unsharded_param, dtype=param.reduce_dtype)


def prefetch(units: Sequence[FSDPModule], count: int) -> None:
    """Let each unit prefetch the weights of the next `count` units. (FSDP2 prefetches 1 by default.)"""
    if count == 1:
        return
    for place, unit in enumerate(units):
        unit.set_modules_to_forward_prefetch(list(units[place + 1 : place + 1 + count]))
        unit.set_modules_to_backward_prefetch(list(reversed(units[max(0, place - count) : place])))


class UsageWatch:
    """Notes which parameters get gradients on this rank. FSDP2 itself gives zeros to those that do not.

    It looks at the parameters that FSDP2 computes with, which it gathers for that; all ranks make this together.

    Args:
        parts: this rank's part of each parameter, by module and name.

    Attributes:
        seen: ids of the parts whose parameters had a gradient.
    """

    def __init__(self, units: Sequence[FSDPModule], parts: Mapping[tuple[nn.Module, str], ParamShard]) -> None:
        self.seen: set[int] = set()
        for unit in units:
            unit.unshard()
            held: Any = unit
            for module in held.modules():
                for name, param in module.named_parameters(recurse=False):
                    part = parts.get((module, name))
                    if part is not None and not isinstance(param, DTensor) and not has_grad_hooks(param):
                        self._watch(param, part)
            unit.reshard()

    def _watch(self, param: nn.Parameter, part: ParamShard) -> None:
        trained = param.requires_grad
        param.requires_grad_(True)  # for those that are unfrozen later, too
        param.register_post_accumulate_grad_hook(partial(self._note, id(part)))
        param.requires_grad_(trained)

    def _note(self, part: int, _: torch.Tensor) -> None:
        self.seen.add(part)


class FSDPUndo:
    """The state of a model before `fully_shard`, without its parameters' values, and how to restore it."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = {module: (type(module), set(vars(module))) for module in model.modules()}
        self._dtypes: dict[torch.Tensor, torch.dtype] = {}

    def cast_buffers(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Cast floating-point buffers of `model` to `dtype`."""
        for buffer in model.buffers():
            if buffer.is_floating_point() and buffer.dtype != dtype:
                self._dtypes[buffer] = buffer.dtype
                buffer.data = buffer.data.to(dtype)

    def restore_buffers(self) -> None:
        """Give buffers that were cast their dtypes back."""
        for buffer, dtype in self._dtypes.items():
            buffer.data = buffer.data.to(dtype)

    def unwrap(self) -> None:
        """Restore the modules' classes and attributes, and remove FSDP2's hooks."""
        for module, (kind, attributes) in self._modules.items():
            if isinstance(module, FSDPModule):
                module.__class__ = kind  # type: ignore[assignment]
                _composable_state._module_state_mapping.pop(module, None)  # or a second fully_shard is refused
            tables = [table for name, table in vars(module).items() if name.endswith("_hooks")]
            for hooks in [table for table in tables if isinstance(table, dict)]:  # transformers keeps a list of its own
                for key in [key for key, hook in hooks.items() if _is_of_fsdp(hook)]:
                    del hooks[key]
                    for flags in _FLAGS:
                        getattr(module, flags).pop(key, None)
            for name in set(vars(module)) - attributes:
                if "fsdp" in name or name.startswith("__composable"):
                    delattr(module, name)


def _is_of_fsdp(hook: Any) -> bool:
    owner = getattr(hook, "__self__", hook)
    return any(
        str(getattr(o, "__module__", "")).startswith("torch.distributed.fsdp") for o in (hook, owner, type(owner))
    )
