"""Applies a recipe to a model and its optimizer, and undoes it. In between, state dicts have full precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim
from torch.utils.hooks import RemovableHandle

from ..errors import InputError
from ..utils.optimizer_state import cast, cast_state, repoint
from ..utils.param_shard import OneRank, ParamShard, Publisher, Ranks
from ..utils.torch_private import assigns
from .master_weights import MasterWeights, held_ids, masters_for
from .optimizer import MixedPrecisionOptimizer
from .precision import Precision, named_tensors, tensors_to_cast
from .recipe import UpdateOptions


def convert(
    model: nn.Module,
    optimizer: optim.Optimizer,
    shards: Sequence[ParamShard],
    precision: Precision,
    ranks: Ranks | None = None,
    options: UpdateOptions | None = None,
    device: torch.device | None = None,
    publisher: Publisher | None = None,
) -> MixedPrecisionOptimizer:
    """Cast `model` in place and re-point `optimizer` to fp32 masters where the recipe keeps them.

    Masters are made before the cast, from the model's full-precision parameters, whose memory they reuse.
    `close` of the returned optimizer undoes the conversion.

    Args:
        device, publisher: see `MixedPrecisionOptimizer`.
    """
    recipe = precision.recipe
    dtypes = {name: tensor.dtype for name, tensor in named_tensors(model)}
    # fsdp casts its parameters while they are gathered: the shards are the masters.
    excluded = {id(shard.source.param) for shard in shards if shard.source is not None and shard.original is not None}
    held = held_ids(optimizer)
    trained = {id(shard.model_param) for shard in shards if id(shard.param) in held}
    to_cast, not_trained = set(), {}
    for name, tensor in tensors_to_cast(model, recipe, excluded):
        to_cast.add(id(tensor))
        if id(tensor) not in trained:
            not_trained[name] = tensor.detach()
    masters: dict[nn.Parameter, nn.Parameter] = {}
    if recipe.master_weights:
        masters = masters_for(
            optimizer, [shard for shard in shards if id(shard.model_param) in to_cast], {}, torch.Tensor.detach
        )
    precision.cast_model(model, excluded)
    for shard in shards:
        shard.rebind_view()
        _reset_grad(shard.param)
    changed = {tensor: dtypes[name] for name, tensor in named_tensors(model) if tensor.dtype != dtypes[name]}
    if not recipe.master_weights:
        cast_state(optimizer, changed)
    update = MixedPrecisionOptimizer(
        optimizer, shards, recipe, ranks or OneRank(), options or UpdateOptions(), masters, device, publisher
    )
    for name, tensor in named_tensors(model):
        if name in not_trained:  # taken out one by one, to free GPU memory while the originals go to the host
            update.master_weights.originals.add(tensor, not_trained.pop(name))
    hooks = list(_add_state_hooks(model, update.master_weights, changed))
    if recipe.split_masters:  # which round ties otherwise than the cast, of what this rank steps
        update.send_masters()
    update.on_close = lambda: _take_back(model, update, dtypes, hooks)
    return update


def _take_back(
    model: nn.Module,
    update: MixedPrecisionOptimizer,
    dtypes: Mapping[str, torch.dtype],
    hooks: Sequence[RemovableHandle],
) -> None:
    """Give the model its dtypes and the full-precision values, and the optimizer the model's parameters."""
    for hook in hooks:
        hook.remove()
    if update.recipe.linear is not None:
        update.recipe.linear.remove(model)
    masters, changed = update.master_weights.masters, {}
    for tensor, name in {tensor: name for name, tensor in named_tensors(model)}.items():  # tied ones once
        dtype, full = dtypes.get(name, tensor.dtype), update.master_weights.full_value(tensor)
        if full is None and tensor.dtype == dtype:
            continue
        if full is None:
            changed[tensor] = tensor.dtype
        tensor.data = (tensor.data if full is None else full).to(dtype)
        _reset_grad(tensor)
    cast_state(update.optimizer, changed)
    params = {master: param for param, master in masters.items()}
    repoint(update.optimizer, params, lambda master, value: cast(value, master.dtype, params[master].dtype))


def _reset_grad(tensor: torch.Tensor) -> None:
    """Drop the gradient; the next one has the tensor's dtype. (`grad_dtype` outlives a cast of the tensor.)"""
    tensor.grad = None
    if tensor.grad_dtype is not tensor.dtype:
        tensor.grad_dtype = tensor.dtype


# -- state dicts -----------------------------------------------------------------------------------------------


class _FullPrecision:
    """The full-precision values of one module, and its state dict hooks.

    A copy of the model (deepcopy for an average of its weights, torch.save) has the dtypes only: the masters would
    also be copied.

    Args:
        dtypes: by the tensor's name in the module, its dtype before it was cast; None: it was not.
    """

    def __init__(self, dtypes: dict[str, torch.dtype | None], master_weights: MasterWeights | None) -> None:
        self.dtypes = dtypes
        self.master_weights = master_weights

    def __reduce__(self) -> tuple[Any, ...]:
        return _FullPrecision, (self.dtypes, None)

    @torch.no_grad()
    def save(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        """Put the masters and originals of `module` into `state`; other tensors get their original dtypes."""
        own = dict(named_tensors(module, recurse=False))
        for name in {**self.dtypes, **own}:  # torch.nn.utils.prune gives them other names
            key, dtype = prefix + name, self.dtypes.get(name)
            if not isinstance(state.get(key), torch.Tensor):
                continue  # not persistent, or taken out by a hook of the user's
            value = self.master_weights.full_value(own[name]) if self.master_weights and name in own else None
            if value is not None:
                state[key] = value
            elif dtype is not None:
                state[key] = state[key].to(dtype)

    @torch.no_grad()
    def load(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Also copy what is loaded into `module` into its masters and originals, in full precision.

        Raises:
            InputError: `assign=True`, after which the optimizer would step parameters that the model no longer uses.
        """
        if self.master_weights is None:
            return
        held = {id(shard.model_param): shard for shard in self.master_weights.trained}
        for name, param in named_tensors(module, recurse=False):
            value, shard = state.get(prefix + name), held.get(id(param))
            if value is not None and shard is not None and assigns(metadata):
                raise InputError(
                    "load_state_dict(..., assign=True) would replace the parameters that the optimizer holds; load "
                    "without assign, or before initialize"
                )
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            self.master_weights.originals.keep(param, value)
            if shard is not None and shard.param in self.master_weights.masters:
                state[prefix + name] = self.master_weights.set_master(shard, value)


def _add_state_hooks(
    model: nn.Module, master_weights: MasterWeights, dtypes: Mapping[torch.Tensor, torch.dtype]
) -> Iterator[RemovableHandle]:
    for module in model.modules():
        own = {name: dtypes.get(tensor) for name, tensor in named_tensors(module, recurse=False)}
        if own and not isinstance(module, torch.jit.ScriptModule):  # which takes no such hooks
            full = _FullPrecision(own, master_weights)
            yield module.register_state_dict_post_hook(partial(full.save))  # torch sets attributes on it
            yield module.register_load_state_dict_pre_hook(full.load)
