"""Fully sharded data parallelism: torch's FSDP2 (`fully_shard`) shards weights, gradients and optimizer state.

Each block gathers its weights before it computes, and gives them up afterwards; gradients are summed to the rank that
holds their part while backward runs. The update sees this rank's parts as plain tensors, as in every other layout.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..._torch import has_grad_hooks, move_module
from ...errors import InputError, shorten
from ...shard import ParamShard, set_compute_dtype
from ..axis import take_parts
from ..data_strategy import StrategyInputs, repoint
from ..optimizer_checks import refuse_other_state
from .fsdp_wrap import (
    FSDPUndo,
    ShardOptions,
    Units,
    UsageWatch,
    add_missing_grads,
    can_be_sharded,
    prefetch,
    wrap,
)
from .withheld import UNFINISHED, WithheldGradient


class FullyShard:
    """A model whose parameters are sharded over the data ranks, in place.

    FSDP2 replaces parameters by DTensors under the same names. The optimizer is given plain parameters over the same
    memory: its groups and settings stay.

    Args:
        inputs: of the data strategy. The model may be anywhere; state that the optimizer has is cut along.
        mesh: the data ranks, of one dim, or of two: copies, and the parts of one.

    Attributes:
        shards: as given, with this rank's part in place of each parameter that is sharded.
        parts: of these, those that are parts.
        withholds: whether summed gradients are not what they look like: nobody shall compute with them then. (Whether
            somebody has changed a DTensor cannot be seen: torch's `_foreach` functions do not count that.)
        whole: names of parameters that FSDP2 cannot shard (scalars, empty ones, such that are not contiguous, those of
            several units, under a pipeline those of modules that no stage calls): each rank has them whole.
    """

    def __init__(self, inputs: StrategyInputs, mesh: DeviceMesh, units: Units, options: ShardOptions) -> None:
        model, shards, optimizer = inputs.model, inputs.shards, inputs.optimizer
        self.model = model
        self.withholds = False
        self._param_dtype = options.param_dtype
        self._optimizer = optimizer
        self._ranks = mesh.size(-1)
        self._rank = mesh.get_local_rank(mesh.ndim - 1)
        kept = {shard.param for shard in shards if not can_be_sharded(shard.param)} | units.left_over(model)
        self.whole = [shard.name for shard in shards if shard.param in kept]
        taken = [shard for shard in shards if shard.param not in kept]
        self._dtypes = {shard.param: shard.param.dtype for shard in taken}
        self._offloads = options.cpu_offload
        self._is_pinned = options.cpu_offload and mesh.device_type == "cuda"
        self._undo = FSDPUndo(model)
        if options.param_dtype is not None:
            for shard in taken:  # what is kept of them are the masters, whatever the model came in
                shard.param.data = shard.param.data.float()
        self._places = {place: param for place, param in _places(model) if param not in kept}
        if options.buffer_dtype is not None:
            self._undo.cast_buffers(model, options.buffer_dtype)
        chosen = units.find(model)
        wide = torch.float64 in self._dtypes.values()
        reduce = replace(inputs.reduce, dtype=torch.float64) if wide else inputs.reduce
        self.units: list[FSDPModule] = []
        for module in chosen:
            inputs.make(module)  # its values, where it has none yet
            self.units.append(wrap(module, mesh, options, reduce, kept, is_root=module is model))
            self._give_up(module)
        prefetch(self.units[: len(units.blocks)], options.prefetch)
        self._reshards = not options.reshard_after_forward
        self.shards = self._take_parts(shards)
        # Now, while all of them are parts: a unit that has gathered its weights has other parameters.
        self._held = [set(map(id, unit.parameters())) for unit in chosen]
        self._use = UsageWatch(self.units, {place: self._originals[param] for place, param in self._places.items()})
        self._hooks = [optimizer.register_load_state_dict_post_hook(refuse_other_state)]
        if self._reshards:  # what is written into weights after an evaluation has to reach the parts
            self._hooks.append(model.register_forward_hook(self._after_forward))

    def _give_up(self, unit: nn.Module) -> None:
        """The memory of parameters that FSDP2 has cut, now: or the whole model would be held until the last unit."""
        inner = set(unit.modules())
        for (module, name), param in self._places.items():
            if module in inner and getattr(module, name) is not param:
                param.data = torch.empty(0, dtype=param.dtype, device=param.device)

    def _take_parts(self, shards: Sequence[ParamShard]) -> list[ParamShard]:
        now = dict(_places(self.model))
        sharded = {old: now[place] for place, old in self._places.items()}
        parts: dict[nn.Parameter, ParamShard] = {}
        for shard in shards:
            new = sharded.get(shard.param)
            if new is not None:
                own = nn.Parameter(_local(new), requires_grad=shard.param.requires_grad)
                source = ParamShard(shard.name, new)
                parts[shard.param] = ParamShard(
                    shard.name, own, shard.weight * self._ranks, source=source, original=shard.param
                )
        self._originals = parts
        repoint(self._optimizer, {param: part.param for param, part in parts.items()}, self._cut)
        self._trained = {id(part): part.param.requires_grad for part in parts.values()}
        self.parts = list(parts.values())
        self._loads = [
            module.register_load_state_dict_pre_hook(self._load) for module in {module for module, _ in self._places}
        ]
        return [parts.get(shard.param, shard) for shard in shards]

    def _load(self, module: nn.Module, *given: Any) -> None:
        """Whole tensors can be loaded, too: each rank takes its shard."""
        self.reshard()
        names = [name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)]
        take_parts(dict.fromkeys(names, _as_part), module, *given)

    def _cut(self, param: nn.Parameter, name: str, value: Any) -> Any:
        whole = self._originals[param].source
        assert whole is not None
        # `step` is a counter, in torch's optimizers, and a scalar.
        if not isinstance(value, torch.Tensor) or value.shape != whole.param.shape or name == "step":
            return value
        chunks = value.chunk(self._ranks)  # as FSDP2 cuts the parameter: some ranks may get nothing
        own = (chunks[self._rank] if self._rank < len(chunks) else value[:0]).clone()
        return own.to(param.dtype) if value.dtype == self._dtypes[param] else own

    def move(self, device: torch.device) -> None:
        """Move the model to `device`; of an offloaded one only what is not sharded."""
        if not self._offloads:
            move_module(self.model, device)
            return
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(device)

    def first_row(self, rows: int) -> int:
        """The row at which this rank's shard of a parameter begins."""
        return min(self._rank * -(-rows // self._ranks), rows)

    def tell_dtypes(self) -> None:
        """Let `halfmesh.shard.compute_dtype` know. After the model was moved: that exchanges what a DTensor is."""
        for part in self.parts:
            if self._param_dtype is not None and part.source is not None:
                set_compute_dtype(part.source.param, self._param_dtype)
        self._storages = [part.source.param.untyped_storage() for part in self.parts if part.source is not None]

    # -- while training ----------------------------------------------------------------------------------------

    def left_whole(self, shards: Sequence[ParamShard]) -> list[ParamShard]:
        """Those of `shards` that every rank has whole.

        Raises:
            InputError: one came into the optimizer that is neither sharded nor left whole.
        """
        rest = [shard for shard in shards if shard.source is None]
        new = [shard.name for shard in rest if shard.name not in self.whole]
        if new:
            raise InputError(
                f"{shorten(new)} came into the optimizer, but the model that FSDP2 shards has no such part; "
                "put parameters into model and optimizer before initialize"
            )
        return rest

    def announce(self, last: bool, params: Collection[nn.Parameter] | None = None) -> None:
        """A backward begins; gradients are summed over the ranks if it is the `last` before the update.

        Args:
            params: of what has them only; None: of all.
        """
        for part in self.parts if self.withholds else ():
            source = part.source.param  # type: ignore[union-attr]
            if isinstance(source.grad, WithheldGradient):
                source.grad = None
        wanted = None if params is None else set(map(id, params))
        for unit, held in zip(self.units, self._held, strict=True):
            if wanted is None or not held.isdisjoint(wanted):
                unit.set_requires_gradient_sync(last)
                if last and self._param_dtype is not None:
                    add_missing_grads(unit)

    @property
    def used(self) -> list[bool]:
        """For each part whether its parameter had a gradient on this rank since `take_grads`."""
        return [id(part) in self._use.seen for part in self.parts]

    def refuse_other_memory(self) -> None:
        """Raise InputError if others gave a parameter other memory: FSDP2 goes on with its own.

        (A DTensor's values are not in it, so that not even reading it shows what was assigned.)
        """
        pairs = zip(self.parts, self._storages, strict=True)
        lost = [part.name for part, held in pairs if part.source and part.source.param.untyped_storage() is not held]
        if lost:
            raise InputError(
                f"the memory of {shorten(lost)} was exchanged (param.data = ..., or model.to(dtype)), of which FSDP2, "
                "which holds weights in parts, does not hear; write in place, as in param.copy_(...) under "
                "torch.no_grad(), or before initialize"
            )

    def refuse_lost_changes(self) -> None:
        """Raise InputError for changes of the user's parameters that FSDP2, which has its own, does not notice."""
        self.refuse_other_memory()
        hooked = [part.name for part in self.parts if part.source and has_grad_hooks(part.source.param)]
        if hooked:
            raise InputError(
                f"hooks were registered on the gradient of {shorten(hooked)}, which FSDP2 never calls; remove them, or "
                "use data='zero1'"
            )
        given = [(part, part.original) for part in self.parts if part.original is not None]
        frozen = [part.name for part, original in given if original.requires_grad != self._trained[id(part)]]
        if frozen:
            raise InputError(
                f"requires_grad of {shorten(frozen)} was changed on the parameters that the model came with, but under "
                "data='fsdp' it computes with others; change it on engine.model's, as in engine.model.requires_grad_()"
            )

    @property
    def was_used(self) -> bool:
        """Whether a parameter had a gradient on this rank since `take_grads`."""
        return bool(self._use.seen)

    def take_grads(self, counts: Sequence[float]) -> None:
        """Give the shards the gradients that FSDP2 has summed.

        Args:
            counts: on how many ranks each part's parameter had one; where that is 0 there is none.

        Raises:
            InputError: FSDP2 has not summed one.
        """
        lost = []
        for part, count in zip(self.parts, counts, strict=True):
            assert part.source is not None
            source = part.source.param
            if source.grad is not None and count:
                local, held = _local(source.grad), part.param.grad
                if not self.withholds:  # each further backward is added to the gradient there, whose memory this is
                    part.param.grad = local
                    continue
                part.param.grad = local if held is None else held.add_(local)
                source.grad = WithheldGradient.of(source, part.name, UNFINISHED)
            elif count and source.requires_grad:
                lost.append(part.name)
            elif part.param.grad is None:  # zeros of FSDP2's
                source.grad = None
        self._use.seen.clear()
        if lost:
            raise InputError(
                f"FSDP2 has not summed the gradients of {shorten(lost)}. Either only some ranks used these in this "
                "batch, for which it takes torch 2.13; or a module returns tensors within an object that FSDP2 cannot "
                "look into: return tensors, tuples or dicts"
            )

    def begin(self) -> None:
        """Called before weights are written. (`halfmesh.shard.Publisher`.)"""
        for part in self.parts:  # so that the memory of gradients goes as they are used
            part.source.param.grad = None  # type: ignore[union-attr]
        if self._is_pinned:  # copies to the device that are under way, of a forward since backward, read them
            torch.cuda.synchronize()

    def stepped(self, shards: Sequence[ParamShard]) -> None:
        """New weights need not be sent: they are gathered when used."""

    def finish(self) -> None:
        """Called after an update: gathered weights are stale."""
        if self._reshards:
            self.reshard()

    def _after_forward(self, *_: Any) -> None:
        if not torch.is_grad_enabled():
            self.reshard()

    def reshard(self) -> None:
        """Free gathered weights."""
        for unit in self.units:
            unit.reshard()

    # -- the end -----------------------------------------------------------------------------------------------

    def undo(self) -> None:
        """Give model and optimizer the original parameters, without their values."""
        for hook in (*self._hooks, *self._loads):
            hook.remove()
        self.reshard()
        self._undo.unwrap()
        for (module, name), param in self._places.items():
            setattr(module, name, param)
        for param, part in self._originals.items():
            assert part.source is not None
            param.data, param.grad = torch.empty(part.source.param.shape, dtype=self._dtypes[param]), None
            param.requires_grad_(part.source.param.requires_grad)
        repoint(self._optimizer, {part.param: param for param, part in self._originals.items()})
        self._undo.restore_buffers()


def _places(model: nn.Module) -> Iterator[tuple[tuple[nn.Module, str], nn.Parameter]]:
    for module in model.modules():
        for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
            yield (module, name), param


def _local(tensor: Any) -> torch.Tensor:
    local: torch.Tensor = tensor.detach().to_local()
    return local


def _as_part(param: nn.Parameter, value: torch.Tensor) -> torch.Tensor:
    """A whole tensor as what FSDP2 makes of it."""
    if not isinstance(param, DTensor) or isinstance(value, DTensor):
        return value
    return distribute_tensor(value.to(param.device), param.device_mesh, param.placements, src_data_rank=None)
