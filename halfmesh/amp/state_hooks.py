"""What goes into and comes out of the state dict of a converted model: full precision, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..errors import InputError
from .holdings import Holdings
from .master_weights import current_value


def watch_state(
    model: nn.Module, holdings: Holdings, dtypes: Mapping[torch.Tensor, torch.dtype]
) -> Iterator[RemovableHandle]:
    """Give `model.state_dict()` the masters and the dtypes that the model came with, and take loads to the masters.

    Parameters that are added to the optimizer later are among them.

    Args:
        dtypes: the original dtype of each tensor that was cast.
    """
    for module in model.modules() if dtypes or holdings.keeps_masters else ():
        tensors = chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        given = {name: dtypes.get(tensor) for name, tensor in tensors}
        if given:
            yield module.register_state_dict_post_hook(FullPrecision(given, holdings.masters))
    yield model.register_load_state_dict_pre_hook(LoadHook(holdings.adopt))
    trained = [shard.param for shard in holdings.trained]
    yield model.register_load_state_dict_post_hook(AssignCheck(trained))


class FullPrecision:
    """Puts into a module's state dict its masters, and its other tensors in the dtype that they came with.

    A copy of the model (deepcopy for an average of its weights, torch.save) gets a hook without masters.
    """

    def __init__(
        self, dtypes: Mapping[str, torch.dtype | None], masters: Mapping[nn.Parameter, nn.Parameter] | None
    ) -> None:
        self._dtypes = dict(dtypes)
        self._masters = {} if masters is None else masters  # masters are added to it later

    @torch.no_grad()
    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        params = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, dtype in self._dtypes.items():
            key, param = prefix + name, params.get(name)
            if not isinstance(state.get(key), torch.Tensor):
                continue  # not persistent, or taken out by a hook of the user's
            if param is not None and param in self._masters:
                state[key] = current_value(param, self._masters[param])
            elif dtype is not None:
                state[key] = state[key].to(dtype)

    def __deepcopy__(self, memo: Any) -> FullPrecision:
        return FullPrecision(self._dtypes, None)

    def __reduce__(self) -> tuple[type[FullPrecision], tuple[dict[str, torch.dtype | None], None]]:
        return FullPrecision, (self._dtypes, None)


class LoadHook:
    """Takes what is loaded into the model to the masters too, or the next step would undo it.

    A copy of the model gets a hook without masters to reach.
    """

    def __init__(self, adopt: Callable[[Mapping[str, torch.Tensor], str], None] | None) -> None:
        self._adopt = adopt

    def __call__(self, module: nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *_: Any) -> None:
        if self._adopt is not None:
            self._adopt(state, prefix)

    def __deepcopy__(self, memo: Any) -> LoadHook:
        return LoadHook(None)

    def __reduce__(self) -> tuple[type[LoadHook], tuple[None]]:
        return LoadHook, (None,)


class AssignCheck:
    """After `model.load_state_dict(..., assign=True)` the optimizer would step parameters that nobody uses."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        self._params = list(params)

    def __call__(self, module: nn.Module, *_: Any) -> None:
        theirs = {id(param) for param in module.parameters()}
        if not all(id(param) in theirs for param in self._params):
            raise InputError(
                "load_state_dict(..., assign=True) has replaced the model's parameters, which the optimizer does not "
                "know; load without assign, or load before initialize"
            )

    def __deepcopy__(self, memo: Any) -> AssignCheck:
        return AssignCheck([])

    def __reduce__(self) -> tuple[type[AssignCheck], tuple[list[nn.Parameter]]]:
        return AssignCheck, ([],)
