"""A model is cut: this rank keeps the parameters and buffers of its stages, and gives the model back whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn, optim

from ..._torch import assigns
from ...errors import InputError, shorten
from ...shard import ParamShard
from ...tensors import replace_data
from ..axis import AppliedAxis
from ..context import ParallelContext
from ..registries import SCHEDULES
from .partition import Partition, all_entries, first_names
from .skeleton import Skeleton
from .ties import TiedGradients


class StageCut(AppliedAxis):
    """The model of one rank. Modules, names and the parameters that stay are the same objects as before; what other
    ranks hold is None here, and left out of the optimizer's groups.

    Args:
        model: equal on all ranks, on whatever device.
        optimizer: over its parameters; of its state, too, what other ranks hold is dropped.
        partition: which pieces this rank has.

    Attributes:
        partition: as given.
        skeleton: a copy of the model without data, which finds shapes.
        ties: the parameters of this rank that others hold, too, with the pipeline ranks of all holders.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, partition: Partition, context: ParallelContext
    ) -> None:
        self.partition = partition
        self.skeleton = Skeleton(model)
        self._model = model
        self._optimizer = optimizer
        self._context = context
        self.first_names = first_names(model)
        users = partition.entries(model)
        ranks = {entry: sorted({stage % partition.size for stage in stages}) for entry, stages in users.items()}
        tensors = dict(all_entries(model))
        self._holders: dict[int, list[int]] = {}  # of a tensor, wherever it is: by its id
        for entry, tensor in tensors.items():
            self._holders[id(tensor)] = sorted({*self._holders.get(id(tensor), []), *ranks[entry]})
        self._places = {entry: (tensor, self._holders[id(tensor)]) for entry, tensor in tensors.items()}
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        self._params = dict(model.named_parameters())
        self._names = {id(p): name for name, p in model.named_parameters()}
        super().__init__(context, "pp")
        mine = context.pp_rank
        self.ties: dict[nn.Parameter, list[int]] = {
            param: holders
            for param in model.parameters()
            if mine in (holders := self._holders[id(param)]) and len(holders) > 1
        }
        self._tied_names = [name for id_, name in self._names.items() if len(self._holders[id_]) > 1]
        """Of all parameters that several pipeline ranks hold."""
        self._shapes = {id(t): torch.empty_like(t, device="meta") for t in tensors.values()}
        self._foreign = {entry: t for entry, (t, holders) in self._places.items() if mine not in holders}
        self._drop()
        self._hooks = [
            model.register_forward_pre_hook(self._refuse_call),
            model.register_load_state_dict_pre_hook(self._take_own),
            model.register_load_state_dict_post_hook(self._expect_own),
        ]

    def replicas(self, param: nn.Parameter) -> int:
        return len(self.ties.get(param, [0]))

    def make_reduction(self, shards: Sequence[ParamShard]) -> TiedGradients | None:
        groups = self._tie_groups()
        return TiedGradients(self.ties, groups, shards) if groups else None

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """Schedule, bubble, who has which stage and what part of the whole it is, and what several have."""
        partition, microbatches = self.partition, options.microbatches or 1
        total = sum(partition.costs) or 1
        bubble = SCHEDULES.get(options.schedule).bubble(options.size, options.chunks, microbatches)
        stages = [
            f"{index} on pp {index % partition.size}: {name} ({cost / total:.0%} of parameters)"
            for index, (name, cost) in enumerate(zip(partition.names, partition.costs, strict=True))
        ]
        stages += [f"on several stages: {shorten(sorted(self._tied_names))}"] if self._tied_names else []
        rows = f"{options.schedule}, {microbatches} microbatches, bubble {bubble:.0%}; {'; '.join(stages)}"
        return {"layout": "every rank holds its stages", "stages": rows}

    def _tie_groups(self) -> dict[tuple[int, ...], dist.ProcessGroup | None]:
        """A group for each set of pipeline ranks that hold something together; None where this rank is not of them.

        All ranks of the engine call it together.
        """
        params = (holders for tensor, holders in self._places.values() if isinstance(tensor, nn.Parameter))
        sets = sorted({tuple(holders) for holders in params if len(holders) > 1})
        return {ranks: self._context.subgroup("pp", ranks) for ranks in sets}

    def undo(self) -> None:
        """Give the modules and the optimizer's groups their parameters again: what other ranks hold without its values,
        on the CPU."""
        for hook in self._hooks:
            hook.remove()
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for (path, name), tensor in self._foreign.items():
            replace_data(tensor, torch.empty_like(self._shapes[id(tensor)], device="cpu"))
            setattr(modules[path], name, tensor)
        for group, came in zip(self._optimizer.param_groups, self._groups, strict=False):
            known = set(map(id, came))
            group["params"] = [*came, *(param for param in group["params"] if id(param) not in known)]

    # -- parts -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _drop(self) -> None:
        modules = dict(self._model.named_modules(remove_duplicate=False))
        for (path, name), tensor in self._foreign.items():
            setattr(modules[path], name, None)
            replace_data(tensor, torch.empty(0, dtype=tensor.dtype))
            tensor.grad = None
        foreign = {id(tensor) for tensor in self._foreign.values()}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if id(param) in foreign:
                    self._optimizer.state.pop(param, None)
            group["params"] = [param for param in group["params"] if id(param) not in foreign]

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Whole state dicts can be loaded, too: each rank takes its part."""
        foreign = {prefix + ".".join(filter(None, entry)) for entry in self._foreign}
        if assigns(metadata) and foreign & state.keys():
            raise InputError(
                "load_state_dict(..., assign=True) would put parameters into this rank's model that it does not hold "
                f"({shorten(sorted(foreign & state.keys()))}); load without assign, or load before initialize"
            )
        for name in foreign & state.keys():
            del state[name]

    def _expect_own(self, module: nn.Module, keys: Any) -> None:
        """BatchNorm adds its counter to states without versions, on ranks that do not hold it, too."""
        foreign = {".".join(filter(None, entry)) for entry in self._foreign}
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if key not in foreign]

    def _refuse_call(self, model: nn.Module, *_: Any) -> NoReturn:
        raise InputError(
            f"the model itself was called, but this rank holds stage {self._context.pp_rank} of it only; call "
            "engine(...), on all ranks"
        )
