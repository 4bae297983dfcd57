"""Fully sharded data parallelism: torch's FSDP2 (`fully_shard`) shards weights, gradients and optimizer state.

Each block all-gathers its weights before it computes and frees them afterwards; gradients are reduce-scattered while
backward runs. The update sees this rank's shards as plain tensors, as in every other layout.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import InputError, counted, shorten
from ...options import DType, Options, PositiveInt
from ...utils.optimizer_state import cast, reject_other_state, repoint
from ...utils.param_shard import ParamShard, set_compute_dtype
from ..axis import shard_loaded_state
from ..data_strategy import DataStrategy, StrategyInputs
from ..reducer import Buffers
from ..shard_spec import Placement
from .fsdp_reducer import FSDPReducer
from .fsdp_wrap import (
    CastGather,
    ReduceScatter,
    Slot,
    WriteWatch,
    drop_casts,
    find_units,
    first_row,
    make_mesh,
    prefetch,
    unowned_params,
)

FREED = "are out of bounds for storage of size 0"
"""torch's error for the use of a tensor whose memory was freed."""
_EXPLAINED = {
    "'Sparse": "a gradient is sparse, which FSDP2 cannot sum; build embeddings with sparse=False",
    "got mixed torch.Tensor and DTensor": "weights were used outside the forward of their module, where they are "
    "DTensors; give initialize a criterion that holds them, or use data='zero1'",
    FREED: "backward needs weights that FSDP2 has already freed. If a module returns tensors inside an object, return "
    "tuples, lists or dicts (dataclasses since torch 2.13). If the loss contains gradients, use data='zero1'",
}
_METHOD = "_halfmesh_called"
"""The attribute of the model under which FSDP2 finds the method that is called."""


class FSDPOptions(Options):
    """The keys of `parallel.data` under fsdp."""

    param_dtype: DType | None = None
    output_dtype: DType | None = None
    buffer_dtype: DType | None = None
    reshard_after_forward: bool | None = None
    """None: True, except under a pipeline, where weights stay gathered from a batch's first microbatch to the last."""
    prefetch: PositiveInt = 1
    cpu_offload: bool = False
    hybrid: PositiveInt | None = None
    """The number of ranks that share one full copy of the weights. None: all ranks of the data axis."""
    separate_reduce_group: bool = False
    """Reduce-scatter gradients over a separate group, so that they overlap all-gathers (not those of experts)."""


class FSDP(DataStrategy):
    """The strategy `fsdp`: shards weights, gradients and optimizer state. Each block gathers its weights before it
    computes.

    FSDP2 replaces parameters with DTensors of the same names. The optimizer gets plain parameters over the same memory,
    and keeps its groups and settings.

    Attributes:
        shards: the given shards, with this rank's shard in place of each parameter that is sharded.
        sharded: each of these shards, and the DTensor that the model uses.
        slots: this rank's shard by the module and the name of its parameter; several for a tied one.
        units: the modules that gather their weights separately.

    Every rank replicates the parameters that FSDP2 cannot shard (scalars, empty ones, non-contiguous ones), those that
    stay in fp32 by their names, those of several units and of the criterion, and under a pipeline those of modules that
    no stage calls.
    """

    shards_state = shards_model = True
    cost = "each block waits for its weights in forward and in backward, for every batch of an update"
    options = FSDPOptions

    def __init__(self, inputs: StrategyInputs) -> None:
        self.inputs = inputs
        self.publisher = self
        model, data = inputs.model, inputs.options
        all_axes = dict.fromkeys([inputs.axes, *inputs.fewer_axes.values()])
        self._meshes = {axes: make_mesh(inputs.context, axes, data.hybrid) for axes in all_axes}
        units = find_units(model, inputs.blocks, inputs.fewer_axes.keys(), inputs.not_called)
        replicated: set[Any] = {*inputs.kept, *inputs.outside, *unowned_params(model, units)}
        params = [shard.param for shard in inputs.shards]
        replicated |= {p for p in params if not (p.dim() and p.numel() and p.is_contiguous())}
        self._dtypes = {param: param.dtype for param in params if param not in replicated}
        param_dtype = inputs.param_dtype or _dtype(data.param_dtype)
        if param_dtype is not None:
            for param in self._dtypes:  # the shards are the masters, whatever dtype the model had
                param.data = param.data.float()
        own = {module: module.named_parameters(recurse=False, remove_duplicate=False) for module in model.modules()}
        given = {(m, name): param for m, params in own.items() for name, param in params if param not in replicated}
        self._writes = WriteWatch()
        if (buffer_dtype := _dtype(data.buffer_dtype)) is not None:
            for buffer in model.buffers():
                buffer.data = buffer.data.to(buffer_dtype) if buffer.is_floating_point() else buffer.data
        self.units = self._wrap(units, given, replicated, param_dtype)
        made = self._shard_optimizer(given)
        self.shards = [made.get(shard.param, shard) for shard in inputs.shards]
        self.slots = self._writes.slots = {slot: made[param] for slot, param in given.items()}
        for module in {module for module, _ in given}:
            module.register_load_state_dict_pre_hook(self._load)
        inputs.optimizer.register_load_state_dict_post_hook(reject_other_state)
        # Writes into weights after an evaluation must reach the shards.
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.reshard())
        inputs.make(model)
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):  # FSDP2 has moved the others; or they stay on the host
                tensor.data = tensor.data.to(inputs.context.device)
        self.sharded: list[tuple[ParamShard, Any]] = [(s, s.source.param) for s in made.values() if s.source]
        if param_dtype is not None:
            for _, weight in self.sharded:
                set_compute_dtype(weight, param_dtype)
        self._storages = [weight.untyped_storage() for _, weight in self.sharded]
        self._casts = self._cast_gathers()
        # Now, while all parameters are shards: a unit that has gathered its weights has other parameters.
        self.unit_params = [(unit, set(map(id, unit.parameters()))) for unit in self.units]

    # -- the config --------------------------------------------------------------------------------------------

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        data, computes_in = config.parallel.data, config.precision_dtype or "float32"
        for key in ("output_dtype", "prefetch") if config.parallel.pipeline.size > 1 else ():
            if getattr(data, key) != type(data).model_fields[key].default:
                yield f"parallel.data.{key}", "FSDP2 does not support this under a pipeline; remove it"
        for key in ["param_dtype"] if param_dtype is None else ["param_dtype", "buffer_dtype"]:
            if (given := getattr(data, key)) not in (None, computes_in):
                yield f"parallel.data.{key}", f"{given!r} is not {computes_in}, in which the mode computes; remove it"
        if data.separate_reduce_group and data.hybrid is not None:
            yield "parallel.data.separate_reduce_group", "hybrid makes its own groups; remove one of the two keys"
        if config.activation_offload and not config.activation_checkpoint.enabled:
            yield "activation_offload", "would also offload gathered weights; add activation_checkpoint, or use 'zero1'"

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        if options.hybrid is not None and data_ranks % options.hybrid:
            ranks = counted(data_ranks, "data rank")
            yield "parallel.data.hybrid", f"{options.hybrid} does not divide the {ranks}; use a divisor"

    @staticmethod
    def ranks_of_copy(options: Any, data_ranks: int) -> int:
        return options.hybrid or data_ranks

    @staticmethod
    def steps_on_host(options: Any) -> bool:
        return bool(options.cpu_offload)

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        if param_dtype is None and config.parallel.data.param_dtype in (None, "float32") and not config.fp8:
            words = "weights are gathered in float32; mode='naive', or param_dtype='bfloat16', gathers half as much"
            yield "parallel.data.param_dtype", words

    # -- sharding ----------------------------------------------------------------------------------------------

    def _wrap(
        self, units: Sequence[nn.Module], given: Mapping[Slot, nn.Parameter], replicated: set[Any], param_dtype: Any
    ) -> list[Any]:
        """Shard the parameters of each unit, in place, except those of units inside it and those in `replicated`.
        Returns FSDPModules (which, as torch annotates them, are not nn.Modules)."""
        inputs, data, wrapped = self.inputs, self.inputs.options, list[Any]()
        policy = fsdp2.MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=torch.float64 if torch.float64 in self._dtypes.values() else inputs.reduce.dtype,
            cast_forward_inputs=inputs.param_dtype is None,  # else the engine casts the model's inputs
        )
        reduces = None
        if data.separate_reduce_group and inputs.mean_over > 1:  # the ranks of the gathers' group, once more
            reduces = ReduceScatter(inputs.context.subgroup(range(inputs.mean_over), *inputs.axes))
        on_cuda = inputs.context.device.type == "cuda"
        offload = fsdp2.CPUOffloadPolicy(pin_memory=on_cuda) if data.cpu_offload else fsdp2.OffloadPolicy()
        # None: of the root, which contains all others. Backward begins with it, so it stays gathered from forward on.
        reshards = None if data.reshard_after_forward is not False else False
        for module in units:
            module.register_forward_hook(self._writes.after_forward)  # within FSDP2's
            module.register_forward_hook(drop_casts)
            inputs.make(module)  # materializes a deferred unit
            own = replace(policy, output_dtype=_dtype(data.output_dtype)) if module is inputs.model else policy
            taken = next((param for param in module.parameters() if param in self._dtypes), None)  # of no inner unit
            axes = inputs.axes if taken is None else inputs.fewer_axes.get(taken, inputs.axes)
            unit = fsdp2.fully_shard(
                module,
                mesh=self._meshes[axes],
                reshard_after_forward=reshards if inputs.not_called is None else True,
                mp_policy=own,
                offload_policy=offload,
                ignored_params=replicated,
            )
            if not inputs.reduce.mean:
                unit.set_gradient_divide_factor(1.0)  # others are applied twice to a unit of one rank (torch 2.14)
                unit.set_force_sum_reduction_for_comms(True)  # not every backend multiplies as it sums
            if reduces is not None and axes == inputs.axes:
                unit.set_custom_reduce_scatter(reduces)  # type: ignore[arg-type]  # of torch's private base class
            if hasattr(unit, "set_reduce_scatter_unused_params"):  # since torch 2.13
                unit.set_reduce_scatter_unused_params(True)  # a rank may not use a parameter that another does
            wrapped.append(unit)
            _free_sharded(module, given)
        blocks = {module for name, module in inputs.model.named_modules() if name in inputs.blocks}
        prefetch([unit for unit in wrapped if unit in blocks], data.prefetch)
        return wrapped

    def _cast_gathers(self) -> list[CastGather]:
        """Make FSDP2 gather cast weights, if all ranks have equally many rows and the shards are on the device."""
        casts = {} if self.inputs.options.cpu_offload else self.inputs.casts
        by_mesh: dict[Any, dict[Any, Any]] = {}
        for shard, weight in self.sharded:
            if shard.model_param in casts and len(weight) % weight.device_mesh.size(-1) == 0:
                by_mesh.setdefault(weight.device_mesh, {})[weight] = casts[shard.model_param]
        if by_mesh and self.inputs.not_called is None:  # else there is no root: see `follow` and `keep_gathered`
            self.units[-1].register_forward_pre_hook(self._renew_scales, prepend=True)
        return [CastGather(list(some), list(some.values())) for some in by_mesh.values()]

    def _renew_scales(self, *_: Any) -> None:
        """A forward begins, before which weights may have been written."""
        for gather in self._casts:
            gather.attach()

    def _shard_optimizer(self, given: Mapping[Slot, nn.Parameter]) -> dict[nn.Parameter, ParamShard]:
        """Put this rank's shards into the optimizer. Returns them by the parameters that it held."""
        weights: dict[nn.Parameter, Any] = {old: getattr(module, name) for (module, name), old in given.items()}
        found = {}
        for shard in self.inputs.shards:
            if (weight := weights.get(shard.param)) is not None:
                own = nn.Parameter(weight.detach().to_local(), shard.param.requires_grad)
                source, share = ParamShard(shard.name, weight), shard.weight * weight.device_mesh.size(-1)
                found[shard.param] = ParamShard(shard.name, own, share, source=source, original=shard.param)

        def cut(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
            start = first_row(weights[param])
            return cast(value[start : start + len(found[param].param)].clone(), self._dtypes[param], param.dtype)

        repoint(self.inputs.optimizer, {param: shard.param for param, shard in found.items()}, cut)
        return found

    def _load(self, module: nn.Module, *given: Any) -> None:
        """A hook that also accepts full tensors: each rank loads its shard."""
        self.reshard()
        names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        shard_loaded_state(dict.fromkeys(names, _as_shard), module, *given)

    # -- for the engine ----------------------------------------------------------------------------------------

    def keep_gathered(self, keeps: bool, params: Collection[nn.Parameter] | None = None) -> None:
        if keeps:
            self._renew_scales()
        if not self.inputs.options.reshard_after_forward:
            for unit in self.units_with(params):
                unit.set_reshard_after_forward(not keeps, recurse=False)
                unit.set_reshard_after_backward(not keeps, recurse=False)

    def units_with(self, params: Collection[nn.Parameter] | None) -> list[Any]:
        """The units that have some of `params`; None: all."""
        wanted = None if params is None else set(map(id, params))
        return [unit for unit, held in self.unit_params if wanted is None or not held.isdisjoint(wanted)]

    def make_reducer(self, shards: Sequence[ParamShard], buffers: Buffers, withholds: bool) -> FSDPReducer:
        return FSDPReducer(self, shards, buffers, withholds)

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        inner = getattr(model, name)

        @wraps(getattr(inner, "forward", inner))  # for the names of its arguments
        def call(*args: Any, **kwargs: Any) -> Any:
            vars(model)[_METHOD] = inner.__call__ if isinstance(inner, nn.Module) else inner
            fsdp2.register_fsdp_forward_method(model, _METHOD)
            try:
                return vars(model).pop(_METHOD)(*args, **kwargs)
            finally:
                if not torch.is_grad_enabled():
                    self.reshard()  # as after a forward

        return call

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        start = first_row(shard.source and shard.source.param)
        return source.rows(start, start + len(shard.param))

    @property
    def text(self) -> str:
        where = " in host memory" if self.inputs.options.cpu_offload else ""
        count = sum(gather.count for gather in self._casts)
        ranks = counted(self.inputs.options.hybrid or self.inputs.mean_over, "data rank")
        return f", weights sharded{where} over {ranks} (fsdp)" + f", {count} weights gathered in float8" * bool(count)

    def follow(self) -> None:
        """Copy shards whose memory was replaced back to their former memory. Raise InputError if that of a parameter of
        the model was: FSDP2 continues with the former.

        (A DTensor's values are not in it, so reading it does not show the assigned values either.)
        """
        pairs = zip(self.sharded, self._storages, strict=True)
        if lost := [shard.name for (shard, weight), held in pairs if weight.untyped_storage() is not held]:
            raise InputError(f"{shorten(lost)} got new memory, which FSDP2 does not use; write in place (param.copy_)")
        for shard, weight in self.sharded:
            if shard.param.untyped_storage() is not weight._local_tensor.untyped_storage():
                value, shard.param.data = shard.param.data, weight.detach().to_local()
                shard.param.copy_(value)
        self._renew_scales()  # also here: no hook runs before `engine.call`, or a model that is not called

    def find_lost_writes(self, watch: bool) -> Collection[str]:
        return self._writes.take(watch)

    def explain(self, error: RuntimeError) -> None:
        for theirs, ours in _EXPLAINED.items():
            if theirs in str(error):
                raise InputError(ours) from error

    # -- `halfmesh.utils.param_shard.Publisher` ------------------------------------------------------------------------

    def begin(self) -> None:
        for _, weight in self.sharded:  # so that each gradient is freed as it is used
            weight.grad = None
        if self.inputs.options.cpu_offload and self.inputs.context.device.type == "cuda":
            torch.cuda.synchronize()  # a forward since backward may still be copying them to the device

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """Do nothing: new weights are gathered when used."""

    def reshard(self) -> None:
        """Free gathered weights."""
        for unit in self.units:
            unit.reshard()

    finish = reshard  # after an update they are stale


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


def _free_sharded(unit: nn.Module, given: Mapping[Slot, nn.Parameter]) -> None:
    """Free the parameters that FSDP2 has sharded, now: or all of the model would stay until the last unit."""
    inner = set(unit.modules())
    for (module, name), param in given.items():
        if module in inner and getattr(module, name) is not param:
            param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)


def _as_shard(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, as FSDP2 shards it."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
