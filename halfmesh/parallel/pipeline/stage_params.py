"""Keeps only the parameters and buffers of this rank's stages, and those that several stages share equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn, optim

from ...errors import InputError, shorten
from ...utils.param_shard import ParamShard
from ...utils.tensors import replace_data
from ...utils.torch_private import assigns
from ..axis import AppliedAxis
from ..mesh import ParallelContext
from ..reducer import CompleteGradients, SharedGradients
from ..registries import SCHEDULES
from .partition import Partition, all_tensors, first_names
from .transport import make_meta_model


class StageParameters(AppliedAxis):
    """The model of one rank. Modules, names and the remaining parameters are the same objects as before; parameters and
    buffers that only other ranks hold become None, and leave the optimizer with their state.

    Args:
        model: equal on all ranks, on any device.
        optimizer: over its parameters.

    Attributes:
        meta_model: a copy of the full model without data, to infer shapes.
        tries: the first outputs and losses are compared with those of the whole batch.
        ties: the parameters of this rank that other ranks hold too, with the pipeline ranks of all holders.
    """

    def __init__(
        self, model: nn.Module, optimizer: optim.Optimizer, partition: Partition, context: ParallelContext
    ) -> None:
        super().__init__(context, "pp")
        self.tries = True
        self.partition = partition
        self.meta_model = make_meta_model(model)
        self.first_names = first_names(model)
        self._context = context
        holders = partition.holders(model)
        shared = [(name, p, holders[id(p)]) for name, p in model.named_parameters() if len(holders[id(p)]) > 1]
        self._shared_names = sorted(name for name, _, _ in shared)
        self._shared_by = sorted({ranks for _, _, ranks in shared})
        self.ties: dict[nn.Parameter, tuple[int, ...]] = {p: ranks for _, p, ranks in shared if self.rank in ranks}
        self._foreign = {name: t for name, t in all_tensors(model) if self.rank not in holders[id(t)]}
        self._drop(model, optimizer)
        model.register_forward_pre_hook(self._refuse_call)
        model.register_load_state_dict_pre_hook(self._take_own)
        model.register_load_state_dict_post_hook(self._expect_own)

    def replicas(self, param: nn.Parameter) -> int:
        return len(self.ties.get(param, [0]))

    def make_reduction(self, shards: Sequence[ParamShard]) -> CompleteGradients | None:
        groups = {ranks: self._context.subgroup("pp", ranks) for ranks in self._shared_by}  # all ranks together
        sums = [
            SharedGradients({p for p, holders in self.ties.items() if holders == ranks}, group, shards)
            for ranks, group in groups.items()
            if group is not None
        ]
        return CompleteGradients(sums) if sums else None

    def skip_trial(self) -> None:
        self.tries = False

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """Schedule, bubble, the rank and fraction of parameters of each stage, and tensors that stages share."""
        partition, microbatches = self.partition, options.microbatches or 1
        total = sum(partition.costs) or 1
        bubble = SCHEDULES.get(options.schedule).bubble(options.size, options.chunks, microbatches)
        stages = [
            f"{index} on pp {partition.ranks[index]}: {name} ({cost / total:.0%} of parameters)"
            for index, (name, cost) in enumerate(zip(partition.names, partition.costs, strict=True))
        ]
        stages += [f"on several stages: {shorten(self._shared_names)}"] if self._shared_names else []
        rows = f"{options.schedule}, {microbatches} microbatches, bubble {bubble:.0%}; {'; '.join(stages)}"
        return {"layout": "every rank holds its stages", "stages": rows}

    @torch.no_grad()
    def _drop(self, model: nn.Module, optimizer: optim.Optimizer) -> None:
        """Free what only other ranks hold."""
        for name, tensor in self._foreign.items():
            path, _, own = name.rpartition(".")
            setattr(model.get_submodule(path), own, None)
            replace_data(tensor, torch.empty(0, dtype=tensor.dtype))
            tensor.grad = None
        foreign = set(map(id, self._foreign.values()))
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in foreign:
                    optimizer.state.pop(param, None)
            group["params"] = [param for param in group["params"] if id(param) not in foreign]

    # -- hooks on the model ------------------------------------------------------------------------------------

    def _take_own(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        """Keep only this rank's entries of a state dict of the full model."""
        foreign = {prefix + name for name in self._foreign} & state.keys()
        if assigns(metadata) and foreign:
            raise InputError(
                "load_state_dict(..., assign=True) would put parameters into this rank's model that it does not hold "
                f"({shorten(sorted(foreign))}); load without assign, or load before initialize"
            )
        for name in foreign:
            del state[name]

    def _expect_own(self, module: nn.Module, keys: Any) -> None:
        """Ignore the counter that BatchNorm adds to state dicts without versions, if this rank does not hold it."""
        keys.unexpected_keys[:] = [key for key in keys.unexpected_keys if key not in self._foreign]

    def _refuse_call(self, model: nn.Module, *_: Any) -> NoReturn:
        raise InputError(
            f"the model itself was called, but this rank holds only stage {self.rank} of it; call engine(...) on all "
            "ranks"
        )
