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
from torch.distributed.fsdp import MixedPrecisionPolicy, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from ...errors import InputError, shorten
from ...options import DType, Options, PositiveInt
from ...utils.optimizer_state import refuse_other_state, repoint
from ...utils.param_shard import ParamShard, set_compute_dtype
from ...utils.torch_private import has_grad_hooks, move_module
from ..axis import shard_loaded_state
from ..data_strategy import DataStrategy, StrategyInputs
from ..shard_spec import Placement
from .fsdp_reducer import FSDPReducer
from .fsdp_wrap import CastGather, WriteWatch, can_be_sharded, find_units, make_mesh, prefetch, unowned_params, wrap

FREED = "are out of bounds for storage of size 0"
"""torch's error for the use of a tensor whose memory was freed."""
_METHOD = "_halfmesh_called"
"""The attribute of the model under which FSDP2 finds the method that is called."""


class FSDPOptions(Options):
    """The keys of `parallel.data` under fsdp."""

    param_dtype: DType | None = None
    output_dtype: DType | None = None
    buffer_dtype: DType | None = None
    reshard_after_forward: bool | None = None
    """None: True, but under a pipeline weights stay gathered from a batch's first microbatch to the last."""
    prefetch: PositiveInt = 1
    cpu_offload: bool = False
    hybrid: PositiveInt | None = None
    """Ranks that share one full copy of the weights; None: all of the data axis."""


class FSDP(DataStrategy):
    """Weights, gradients and optimizer state are sharded; each block gathers its weights before it computes.

    FSDP2 replaces parameters by DTensors under the same names. The optimizer is given plain parameters over the same
    memory, and keeps its groups and settings.

    Attributes:
        shards: as given, with this rank's shard instead of each parameter that is sharded.
        sharded: each of these shards, and the DTensor that the model uses.
        originals: for each original parameter its shard.
        slots: the module and the name of each of them; several for a tied one.
        units: the modules that gather their weights separately.
        replicated: names of parameters that every rank replicates: those that FSDP2 cannot shard (scalars, empty ones,
            non-contiguous ones), those that stay in fp32 by their names, those of several units and of the criterion,
            and under a pipeline those of modules that no stage calls.
    """

    shards_state = shards_model = True
    cost = "each block waits for its weights in forward and again in backward, for every batch of an update"
    options = FSDPOptions

    def __init__(self, inputs: StrategyInputs) -> None:
        self.inputs = inputs
        self.publisher = self
        model, data, device = inputs.model, inputs.options, inputs.context.device
        all_axes = dict.fromkeys([inputs.axes, *inputs.fewer_axes.values()])
        self._meshes = {axes: make_mesh(inputs.context, axes, data.hybrid) for axes in all_axes}
        units = find_units(model, inputs.blocks, inputs.fewer_axes.keys(), inputs.not_called)
        replicated: set[Any] = {*inputs.kept, *inputs.outside, *unowned_params(model, units)}
        replicated |= {shard.param for shard in inputs.shards if not can_be_sharded(shard.param)}
        self.replicated = [shard.name for shard in inputs.shards if shard.param in replicated]
        taken = [shard.param for shard in inputs.shards if shard.param not in replicated]
        self._dtypes = {param: param.dtype for param in taken}
        param_dtype = inputs.param_dtype or _dtype(data.param_dtype)
        if param_dtype is not None:
            for param in taken:  # the shards are the masters, whatever dtype the model had
                param.data = param.data.float()
        self.slots = {slot: param for slot, param in _slots(model) if param not in replicated}
        names = {shard.param: shard.name for shard in inputs.shards}
        self._writes = WriteWatch({slot: names[param] for slot, param in self.slots.items()}, inputs.context.device)
        if (buffer_dtype := _dtype(data.buffer_dtype)) is not None:
            for buffer in model.buffers():
                buffer.data = buffer.data.to(buffer_dtype) if buffer.is_floating_point() else buffer.data
        self.units = self._wrap(units, replicated, param_dtype)
        self.originals = self._shard_optimizer()
        self.shards = [self.originals.get(shard.param, shard) for shard in inputs.shards]
        for module in {module for module, _ in self.slots}:
            module.register_load_state_dict_pre_hook(self._load)
        inputs.optimizer.register_load_state_dict_post_hook(refuse_other_state)
        # Writes into weights after an evaluation have to reach the shards.
        model.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else self.reshard())
        inputs.make(model)
        self._move(device)
        self.sharded: list[tuple[ParamShard, Any]] = [(s, s.source.param) for s in self.originals.values() if s.source]
        if param_dtype is not None:
            for _, weight in self.sharded:  # not before they are moved, which replaces attributes of a DTensor
                set_compute_dtype(weight, param_dtype)
        self._storages = [weight.untyped_storage() for _, weight in self.sharded]
        self._cast = self._cast_gathers()
        # Now, while all parameters are shards: a unit that has gathered its weights has other parameters.
        self.unit_params = [(unit, set(map(id, unit.parameters()))) for unit in self.units]

    # -- the config --------------------------------------------------------------------------------------------

    @staticmethod
    def find_key_problems(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        data, computes_in = config.parallel.data, config.precision_dtype or "float32"
        for key in ("output_dtype", "prefetch") if config.parallel.pipeline.size > 1 else ():
            if getattr(data, key) != type(data).model_fields[key].default:
                yield (
                    f"parallel.data.{key}",
                    "FSDP2 does not support this under a pipeline, whose stages call the blocks separately; remove it",
                )
        if data.buffer_dtype is not None and param_dtype not in (None, _dtype(data.buffer_dtype)):
            message = f"is not the dtype that the mode casts the model to ({computes_in}); remove it"
            yield "parallel.data.buffer_dtype", f"{data.buffer_dtype!r} {message}"
        if data.param_dtype not in (None, computes_in):
            message = f"is not the dtype that the mode computes in ({computes_in}); remove it: the mode decides"
            yield "parallel.data.param_dtype", f"{data.param_dtype!r} {message}"
        if config.activation_offload and not config.activation_checkpoint.enabled:
            yield (
                "activation_offload",
                "True with data='fsdp' would also offload the gathered weights that forward saves; set "
                "activation_checkpoint, which saves inputs only, or use 'zero1'",
            )

    @staticmethod
    def find_size_problems(options: Any, data_ranks: int) -> Iterator[tuple[str, str]]:
        if options.hybrid is not None and data_ranks % options.hybrid:
            fits = ", ".join(str(n) for n in range(1, data_ranks + 1) if data_ranks % n == 0)
            message = f"{options.hybrid} does not divide the {data_ranks} data ranks; use one of {fits}"
            yield "parallel.data.hybrid", message

    @staticmethod
    def ranks_of_copy(options: Any, data_ranks: int) -> int:
        return options.hybrid or data_ranks

    @staticmethod
    def steps_on_host(options: Any) -> bool:
        return bool(options.cpu_offload)

    @staticmethod
    def find_advice(config: Any, param_dtype: torch.dtype | None) -> Iterator[tuple[str, str]]:
        data = config.parallel.data
        if data.reduce_dtype != "float32":
            yield (
                "parallel.data.reduce_dtype",
                f"gradients are summed over the ranks in {data.reduce_dtype}, where small ones are lost among large "
                "ones; FSDP2's documentation recommends 'float32', the default, also for weights in half precision",
            )
        if param_dtype is None and data.param_dtype in (None, "float32"):
            message = (
                "weights are gathered in float32; bf16 = dict(mode='naive') gathers, sends and holds half as much, "
                "with the shards as fp32 masters, and mode='torch' with param_dtype='bfloat16' gathers in bf16, too"
            )
            if config.fp8:
                message = (
                    "weights that are not gathered in float8 are gathered in float32; param_dtype='bfloat16' gathers "
                    "and sends half as much of them"
                )
            yield "parallel.data.param_dtype", message

    @staticmethod
    def find_problems(model: nn.Module, param_dtype: torch.dtype | None) -> Iterator[str]:
        dtypes = {name: param.dtype for name, param in model.named_parameters() if can_be_sharded(param)}
        if param_dtype is None and len(set(dtypes.values())) > 1:
            first, dtype = next(iter(dtypes.items()))
            others = [name for name, other in dtypes.items() if other != dtype]
            yield (
                f"parallel.data: 'fsdp' gathers weights of one dtype together, but {shorten(others)} differ from "
                f"{first} ({dtype}); give all parameters one dtype, or use data='zero1'"
            )
        sparse = [n for n, m in model.named_modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.sparse]
        if sparse:
            yield f"parallel.data: {shorten(sparse)}: 'fsdp' cannot sum sparse gradients; build it with sparse=False"
        hooked = [name for name, param in model.named_parameters() if has_grad_hooks(param)]
        if hooked:
            yield (
                f"parallel.data: {shorten(hooked)} has hooks on its gradient, which FSDP2 never calls (it computes "
                "with other parameters); remove them, or use data='zero1'"
            )

    # -- sharding ----------------------------------------------------------------------------------------------

    def _wrap(
        self, units: Sequence[nn.Module], replicated: set[nn.Parameter], param_dtype: torch.dtype | None
    ) -> list[Any]:
        """Returns FSDPModules (which, as torch annotates them, are no nn.Modules)."""
        inputs, data, wrapped = self.inputs, self.inputs.options, []
        policy = MixedPrecisionPolicy(
            param_dtype=param_dtype,
            reduce_dtype=torch.float64 if torch.float64 in self._dtypes.values() else inputs.reduce.dtype,
            cast_forward_inputs=inputs.param_dtype is None,  # else the engine casts the model's inputs
        )
        for unit in units:
            self._writes.add(unit)
            inputs.make(unit)  # materializes a deferred unit
            own = replace(policy, output_dtype=_dtype(data.output_dtype)) if unit is inputs.model else policy
            taken = next((param for param in unit.parameters() if param in self._dtypes), None)  # of no inner unit
            mesh = self._meshes[inputs.axes if taken is None else inputs.fewer_axes.get(taken, inputs.axes)]
            has_root = inputs.not_called is None
            wrapped.append(wrap(unit, mesh, own, data, inputs.reduce.mean, replicated, has_root))
            self._free_originals(unit)
        blocks = {module for name, module in inputs.model.named_modules() if name in inputs.blocks}
        prefetch([unit for unit in wrapped if unit in blocks], data.prefetch)
        return wrapped

    def _cast_gathers(self) -> int:
        """Make FSDP2 gather cast weights, if it can: all ranks have as many rows, and the shards are on the device.
        Returns their number."""
        casts, now = {} if self.inputs.options.cpu_offload else self.inputs.casts, dict(_slots(self.inputs.model))
        given = {now[slot]: casts[param] for slot, param in self.slots.items() if param in casts}
        fits = {weight: cast for weight, cast in given.items() if len(weight) % _place(weight)[1] == 0}
        count = len(fits)
        # With a root all scales of a mesh are computed as it begins; else those of each unit as it does.
        for unit in self.units if self.inputs.not_called is not None else self.units[-1:]:
            mine = [weight for weight in unit.parameters() if weight in fits]
            for mesh in dict.fromkeys(weight.device_mesh for weight in mine):
                some = {weight: fits.pop(weight) for weight in mine if weight.device_mesh == mesh}
                unit.register_forward_pre_hook(CastGather(list(some), list(some.values())).attach, prepend=True)
        return count

    def _free_originals(self, unit: nn.Module) -> None:
        """Free the parameters that FSDP2 has sharded, now: or all of the model would stay until the last unit."""
        inner = set(unit.modules())
        for (module, name), param in self.slots.items():
            if module in inner and getattr(module, name) is not param:
                param.data = torch.empty((), dtype=param.dtype, device=param.device).expand(param.shape)

    def _shard_optimizer(self) -> dict[nn.Parameter, ParamShard]:
        """Put this rank's shards into the optimizer. Returns them by the parameters that it held."""
        now: dict[Any, Any] = dict(_slots(self.inputs.model))
        weights = {old: now[slot] for slot, old in self.slots.items()}
        found = {}
        for shard in self.inputs.shards:
            if (weight := weights.get(shard.param)) is not None:
                own = nn.Parameter(weight.detach().to_local(), shard.param.requires_grad)
                source, share = ParamShard(shard.name, weight), shard.weight * _place(weight)[1]
                found[shard.param] = ParamShard(shard.name, own, share, source=source, original=shard.param)

        def cut(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
            start = _first_row(weights[param])
            own = value[start : start + len(found[param].param)].clone()
            return own.to(param.dtype) if value.dtype == self._dtypes[param] else own

        repoint(self.inputs.optimizer, {param: shard.param for param, shard in found.items()}, cut)
        return found

    def _load(self, module: nn.Module, *given: Any) -> None:
        """A hook that also accepts full tensors: each rank loads its shard."""
        self.reshard()
        names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        shard_loaded_state(dict.fromkeys(names, _as_shard), module, *given)

    def _move(self, device: torch.device) -> None:
        """Move the model to `device`; under `cpu_offload` only tensors that are not sharded."""
        model = self.inputs.model
        if not self.inputs.options.cpu_offload:
            move_module(model, device)
            return
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)

    # -- for the engine ----------------------------------------------------------------------------------------

    def keep_gathered(self, keeps: bool, params: Collection[nn.Parameter] | None = None) -> None:
        if not self.inputs.options.reshard_after_forward:
            wanted = None if params is None else set(map(id, params))
            for unit, held in self.unit_params:
                if wanted is None or not held.isdisjoint(wanted):
                    unit.set_reshard_after_forward(not keeps, recurse=False)
                    unit.set_reshard_after_backward(not keeps, recurse=False)

    def make_reducer(
        self, shards: Sequence[ParamShard], buffers: Mapping[str, torch.Tensor], withholds: bool
    ) -> FSDPReducer:
        return FSDPReducer(self, shards, buffers, withholds)

    def method(self, model: nn.Module, name: str) -> Callable[..., Any]:
        inner = getattr(model, name)
        inner = inner.__call__ if isinstance(inner, nn.Module) else inner

        @wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            vars(model)[_METHOD] = inner
            register_fsdp_forward_method(model, _METHOD)
            try:
                return vars(model).pop(_METHOD)(*args, **kwargs)
            finally:
                if not torch.is_grad_enabled():
                    self.reshard()  # as after a forward

        return call

    def placement(self, shard: ParamShard, source: Placement) -> Placement:
        assert shard.source is not None
        start = _first_row(shard.source.param)
        return source.rows(start, start + len(shard.param))

    @property
    def update_device(self) -> torch.device:
        return torch.device("cpu") if self.inputs.options.cpu_offload else self.inputs.context.device

    @property
    def text(self) -> str:
        data, where = self.inputs.options, " in host memory" if self.inputs.options.cpu_offload else ""
        cast = f", {self._cast} weights gathered in float8" if self._cast else ""
        ranks = data.hybrid or self.inputs.mean_over
        kept = f"sharded{where} over {ranks} data ranks" if ranks > 1 else f"kept whole{where} by one data rank"
        return f", {kept} (fsdp){cast}"

    def follow(self) -> None:
        """Copy shards whose memory was replaced back to their former memory. Raise InputError if that of a parameter of
        the model was: FSDP2 continues with the former.

        (A DTensor's values are not in it, so reading it does not show the assigned values either.)
        """
        pairs = zip(self.sharded, self._storages, strict=True)
        lost = [shard.name for (shard, weight), held in pairs if weight.untyped_storage() is not held]
        if lost:
            raise InputError(
                f"new memory was assigned to {shorten(lost)} (param.data = ..., or model.to(dtype)), but FSDP2 goes on "
                "with the old; write in place under torch.no_grad(), as in param.copy_(...), or do it before initialize"
            )
        for shard, weight in self.sharded:
            if shard.param.untyped_storage() is not weight._local_tensor.untyped_storage():
                value, shard.param.data = shard.param.data, weight.detach().to_local()
                shard.param.copy_(value)

    def find_lost_writes(self, watch: bool) -> Collection[str]:
        self._writes.is_on = watch
        return self._writes.take()

    def explain(self, error: RuntimeError) -> None:
        words = {
            "'Sparse": "a gradient is sparse, which FSDP2 cannot sum; build embeddings with sparse=False",
            "got mixed torch.Tensor and DTensor": "weights were used outside of the forward of their module (in the "
            "criterion?), where they are DTensors. Give initialize a criterion that has them, or use data='zero1'",
            FREED: "backward needs weights that FSDP2 has freed. Either a module returns tensors inside an object that "
            "FSDP2 cannot look into: return tensors, tuples, lists or dicts (dataclasses since torch 2.13). Or the "
            "loss contains gradients (torch.autograd.grad with create_graph=True): use data='zero1'",
        }
        for theirs, ours in words.items():
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


def _slots(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield (module, name), param


def _place(weight: Any) -> tuple[int, int]:
    """This rank's place among those that shard a DTensor, and their number."""
    mesh = weight.device_mesh
    return mesh.get_local_rank(mesh.ndim - 1), mesh.size(-1)


def _first_row(weight: Any) -> int:
    """The row at which this rank's shard of a DTensor begins."""
    (rank, ranks), rows = _place(weight), len(weight)
    return min(rank * -(-rows // ranks), rows)


def _as_shard(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a full tensor, as FSDP2 shards it."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
