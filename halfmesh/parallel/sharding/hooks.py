"""What is looked at while FSDP2 works: which parameters get gradients here, and what is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from ..._torch import assigns, has_grad_hooks
from ...errors import InputError
from ...shard import ParamShard


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


def take_part(
    reshard: Callable[[], None], module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any
) -> None:
    """Make whole tensors in a state dict this rank's part, before they are loaded into a sharded module.

    Args:
        reshard: gives up gathered weights: what is loaded goes into the parts.
    """
    reshard()
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        value = state.get(prefix + name)
        if value is not None and assigns(metadata):
            raise InputError(
                f"load_state_dict(..., assign=True) would replace {prefix + name}, of which this rank holds a part; "
                "load without assign, or load before initialize"
            )
        if isinstance(param, DTensor) and isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
            placed, mesh = value.to(param.device), param.device_mesh
            state[prefix + name] = distribute_tensor(placed, mesh, param.placements, src_data_rank=None)
