"""Tensor parallelism applied to a model: each rank keeps its shards of the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...utils.param_shard import ParamShard
from ..axis import Axis, AxisInputs, PlanInputs
from .checks import resolve
from .gradients import TensorGradients
from .layers import TensorAxis
from .plans import Assignment, caller, generalise
from .sequence_styles import SequenceBegin
from .trial import PlanTrial


class TensorParallelism(Axis):
    """`parallel.tensor`."""

    dim = "tp"
    cost = "sharded layers wait for the group's sums in forward and in backward"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled and config.compile.fullgraph:
            message = "sharded layers wait for other ranks, which ends a graph; leave fullgraph out, or use tensor=1"
            yield "compile.fullgraph", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[list[Assignment], list[str]]:
        options = inputs.options
        return resolve(inputs.model, options.size, options.plan, options.sequence_parallel)

    @staticmethod
    def apply(inputs: AxisInputs) -> TensorParallel:
        return TensorParallel(inputs)


class TensorParallel(TensorAxis):
    """A model that was sharded over the tensor axis, in place: its parameters, their names, ties and optimizer stay the
    same objects.

    Attributes:
        partial: the parameters whose gradients are summed over the ranks.
        trial: compares sharded blocks with unsharded ones before the first update.
    """

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs.context)
        model, optimizer = inputs.model, inputs.optimizer
        self._assignments: list[Assignment] = inputs.plan
        self._host_random = inputs.host_random
        self.trial = PlanTrial(model, self._assignments, self)
        splits = {a.module.get_parameter(name): s for a in self._assignments for name, s in a.splits().items()}
        self.partial = {param for a in self._assignments for param in a.style.partial(a.module, a.in_region)}
        self.partial -= splits.keys()  # each rank has the full gradient of its shard
        for param, split in splits.items():
            self.split(optimizer, param, split)
        for assignment in self._assignments:
            assignment.install(self)
        self._end_regions(model)
        self.take_whole_states(model, optimizer)
        self.trial.watch(model)
        if not inputs.is_split:  # each call of the full model draws its random numbers, and is compared
            common = inputs.random
            model.register_forward_pre_hook(self.end_tp_region)
            model.register_forward_pre_hook(common.enter)
            model.register_forward_hook(common.leave, always_call=True)
            self.compare_calls(model)

    def _end_regions(self, model: nn.Module) -> None:
        """Add hooks after which ranks draw the same random numbers again: after each module whose children shard
        features, also if its forward fails; and after the model, because a backward may have left a fork open
        (checkpointing with preserve_rng_state=False)."""
        modules = dict(model.named_modules())
        parents = {caller(modules, a.name) for a in self._assignments if a.style.opens_fork}
        for parent in sorted(parents | {""}):
            modules[parent].register_forward_hook(self.end_tp_region, always_call=True)

    def make_reduction(self, shards: Sequence[ParamShard]) -> TensorGradients:
        shards_sequence = any(isinstance(a.style, SequenceBegin) for a in self._assignments)
        return TensorGradients(self, self.partial, shards_sequence, self.trial.run, shards)

    def forward_scope(self, model: nn.Module, default: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        if not model.training:  # else hooks draw torch's numbers
            return default
        self.settle()  # a backward may have left a fork open, which must not be restored
        return self._host_random  # ranks call the same layers, also where python or numpy chooses them

    def settle(self) -> None:
        self.end_tp_region()

    def explain(self, error: RuntimeError) -> None:
        self.trial.explain(error)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """The layers that are sharded over the tensor axis, and their fraction of the parameters."""
        sharded = {name for name, param in params.items() if param in self.splits}
        whole = {name: size * (self.size if name in sharded else 1) for name, size in sizes.items()}
        share = sum(whole[name] for name in sharded) / sum(whole.values())
        counts = Counter(generalise(name) for name in sorted({name.rpartition(".")[0] for name in sharded}))
        layers = ", ".join(f"{name} x {count}" if count > 1 else name for name, count in counts.items())
        sequence = " and the sequence" if any(a.style.is_region for a in self._assignments) else ""
        return {"layout": f"{share:.0%} of parameters{sequence} sharded over tp: {layers}"}
