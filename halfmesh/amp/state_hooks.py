"""What goes into and comes out of the state dict of a converted model: full precision, both ways."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .._torch import assigns
from ..errors import InputError
from .master_weights import MasterWeights


def watch_state(
    model: nn.Module, master_weights: MasterWeights, dtypes: Mapping[torch.Tensor, torch.dtype]
) -> Iterator[RemovableHandle]:
    """Give `model.state_dict()` the masters and the dtypes that the model came with, and take loads to the masters.

    Parameters that are added to the optimizer later are among them.

    Args:
        dtypes: the original dtype of each tensor that was cast.
    """
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):  # takes no such hooks
            continue
        given = {name: dtypes.get(tensor) for name, tensor in _own_tensors(module)}
        if given and (dtypes or master_weights.enabled):
            yield module.register_state_dict_post_hook(FullPrecision(given, master_weights))
        if given:
            yield module.register_load_state_dict_pre_hook(LoadHook(master_weights))


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(recurse=False, remove_duplicate=False)
    yield from module.named_buffers(recurse=False, remove_duplicate=False)


class FullPrecision:
    """Puts into a module's state dict its masters, and its other tensors as they came.

    A copy of the model (deepcopy for an average of its weights, torch.save) gets a hook that knows their dtypes only.
    """

    def __init__(self, dtypes: Mapping[str, torch.dtype | None], master_weights: MasterWeights | None) -> None:
        self._dtypes = dict(dtypes)
        self._master_weights = master_weights

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        own = dict(_own_tensors(module))
        for name in {**self._dtypes, **own}:  # torch.nn.utils.prune gives them other names
            key, tensor, dtype = prefix + name, own.get(name), self._dtypes.get(name)
            if not isinstance(state.get(key), torch.Tensor):
                continue  # not persistent, or taken out by a hook of the user's
            full = None if tensor is None or self._master_weights is None else self._master_weights.full_value(tensor)
            if full is not None:
                state[key] = full
            elif dtype is not None:
                state[key] = state[key].to(dtype)

    def __deepcopy__(self, memo: Any) -> FullPrecision:
        return FullPrecision(self._dtypes, None)

    def __reduce__(self) -> tuple[type[FullPrecision], tuple[dict[str, torch.dtype | None], None]]:
        return FullPrecision, (self._dtypes, None)


class LoadHook:
    """Takes what is loaded into a module to its masters too: in full precision, and before the next step undoes it.
    Of other tensors it is what they are given back as.

    Refuses `assign=True`, after which the optimizer would step parameters that nobody uses. A copy of the model gets a
    hook that does nothing.
    """

    def __init__(self, master_weights: MasterWeights | None) -> None:
        self._master_weights = master_weights

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: Mapping[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        if self._master_weights is None:
            return
        held = {id(shard.model_param): shard for shard in self._master_weights.trained}
        for name, param in _own_tensors(module):
            value, shard = state.get(prefix + name), held.get(id(param))
            master = None if shard is None else self._master_weights.masters.get(shard.param)
            if value is not None and shard is not None and assigns(metadata):
                raise InputError(
                    "load_state_dict(..., assign=True) would replace parameters that the optimizer holds, and it would "
                    "go on stepping the old ones; load without assign, or load before initialize"
                )
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue
            self._master_weights.originals.keep(param, value)
            # Of the parameter's dtype it is no more exact than what the parameter gets, which the next step takes over.
            if master is not None and shard is not None and value.dtype != param.dtype:
                alike = torch.empty_like(param, dtype=master.dtype).copy_(value)
                master.copy_(shard.part_of(alike))

    def __deepcopy__(self, memo: Any) -> LoadHook:
        return LoadHook(None)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[None]]:
        return LoadHook, (None,)
