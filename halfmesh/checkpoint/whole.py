"""Gathers sharded tensors to host memory: for files of weights, and for `close(restore=True)`."""

from __future__ import annotations

from itertools import chain

import torch
import torch.distributed as dist
from torch import nn, optim

from ..parallel.mesh import ParallelContext
from ..parallel.shard_spec import Shape, whole
from .collective import run_on_all_ranks
from .compound import put_together
from .state import MODEL, ShardedState, Shards, TensorShard, WholeTensor, describe, find_tensors, join_groups


def gather_tensor(
    name: str, tensor: WholeTensor, shards: Shards, context: ParallelContext, everywhere: bool = False
) -> torch.Tensor | None:
    """The full tensor on the CPU of rank 0, or of every rank with `everywhere`. All ranks together, box by box.

    Args:
        shards: this rank's shards, by the tensor's name.
    """
    gathered = torch.empty(tensor.shape, dtype=tensor.dtype) if everywhere or context.rank == 0 else None
    for box in tensor.boxes:
        if 0 in box.sizes:
            continue
        if context.rank == box.rank:
            part = shards[name].box(box.at).to(context.device).contiguous()
        elif gathered is not None:
            part = torch.empty(box.sizes, dtype=tensor.dtype, device=context.device)
        else:
            continue
        flat = part.view(-1).view(torch.uint8)  # as bytes: not every backend has every dtype
        if everywhere:
            dist.broadcast(flat, box.rank)
        elif box.rank != 0:
            if context.rank == 0:
                dist.recv(flat, box.rank)
            else:
                dist.send(flat, 0)
        if gathered is not None:
            gathered[slices(box.at, box.sizes)] = part.cpu()
    if gathered is not None and everywhere and name in shards:  # replicas may differ, such as BatchNorm's buffers
        for region in shards[name].placement.regions:
            gathered[slices(region.at, region.sizes)] = region.view(shards[name].tensor).cpu()
    return gathered


def slices(at: Shape, sizes: Shape) -> tuple[slice, ...]:
    """The index of a box in the full tensor."""
    return tuple(slice(start, start + size) for start, size in zip(at, sizes, strict=True))


class WholeModel:
    """Gathers the full model and optimizer state to the host memory of every rank, one tensor at a time.

    It is created before anything is closed, from the ranks' shards in full precision; `restore` follows when the model
    has its modules and parameters again. All ranks together.

    Raises:
        InputError: the optimizer has state whose position in the full tensor is unknown.
    """

    def __init__(self, state: ShardedState, context: ParallelContext) -> None:
        def collect() -> tuple[Shards, dict[str, dict[str, object]]]:
            state.update.sync_param_groups()  # groups added since the last step
            shards, plain = state.optimizer_state()
            first, of_model = state.division.first_names(state.model), state.weights()
            for name, buffer in state.model.named_buffers(remove_duplicate=False):  # also those that are not saved
                of_model.setdefault(first.get(name, name), TensorShard(buffer.detach(), whole(buffer.shape)))
            return shards | {MODEL + name: shard for name, shard in of_model.items()}, plain

        self._context = context
        self._shards, plain = run_on_all_ranks(context, "engine.close(restore=True)", collect)
        mine = describe(self._shards), plain, [group["params"] for group in state.groups()]
        shapes, self._plain, names = zip(*context.everyone(mine), strict=True)
        self._tensors = find_tensors(shapes, spread=False)
        self._groups = join_groups(names)

    @torch.no_grad()
    def restore(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Fill parameters, buffers and the optimizer's state, which keep their dtypes and strides."""
        params = dict(model.named_parameters())
        of_model = {MODEL + name: tensor for name, tensor in chain(model.named_buffers(), params.items())}
        optimizer.state.clear()  # that of this rank's shards
        for name, tensor in self._tensors.items():
            value = gather_tensor(name, tensor, self._shards, self._context, everywhere=True)
            assert value is not None
            self._shards.pop(name, None)
            if name in of_model:
                of_model[name].data, of_model[name].grad = _like(of_model[name], value, of_model[name].dtype), None
            else:
                _, key, of = name.split(".", 2)
                optimizer.state[params[of]][key] = _like(params[of], value, value.dtype)
        for name, values in ((n, v) for theirs in self._plain for n, v in theirs.items()):
            optimizer.state[params[name]].update(values)
            put_together(optimizer.state[params[name]])
        for group, names in zip(optimizer.param_groups, self._groups, strict=True):
            held = set(map(id, group["params"]))
            group["params"] += [params[name] for name in names if id(params[name]) not in held]


def _like(tensor: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`value` on the CPU, with the strides of `tensor` if that has its shape."""
    if tensor.shape != value.shape:
        return value.to(dtype)
    return torch.empty_like(tensor, dtype=dtype, device="cpu").copy_(value)
