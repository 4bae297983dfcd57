"""Tensor parallelism: a model's layers are cut, and each rank keeps its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn, optim

from ...shard import ParamShard
from ..axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from ..context import ParallelContext
from ..rng import IsolatedRNG
from ..shard_spec import Split
from .axis import TensorAxis
from .checks import ResolvedPlan, resolve
from .gradients import TensorGradients
from .plans import caller, generalise
from .style import Undo, removal
from .verify import PlanCheck


class TensorParallelism(Axis):
    """`parallel.tensor`."""

    dim = "tp"
    cost = "divided layers wait for the group's sums in forward and in backward"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled and config.compile.fullgraph:
            message = "divided layers wait for other ranks, where a graph ends; leave fullgraph out, or use tensor=1"
            yield "compile.fullgraph", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[ResolvedPlan | None, list[str]]:
        options = inputs.options
        return resolve(inputs.model, options.size, options.plan, options.sequence_parallel)

    @staticmethod
    def apply(inputs: AxisInputs) -> TensorParallel:
        axis = TensorAxis(inputs.context.tp_group, inputs.context.device, inputs.random)
        tensor = TensorParallel(inputs.model, inputs.optimizer, inputs.plan, axis, inputs.context, inputs.host_random)
        if not inputs.is_split:
            tensor.watch_calls(inputs.model)
        return tensor


class TensorParallel(AppliedAxis):
    """A model that is divided over a tensor group, in place: parameters, their names, ties and the optimizer that holds
    them stay the same objects.

    Args:
        model: equal on all ranks.
        optimizer: over its parameters; state that it has is cut along.
        plan: how each module is divided; without problems.
        axis: the tensor group.
        context: the mesh.
        host_random: the random numbers of python and numpy within the model.

    Attributes:
        partial: the parameters whose gradients have to be summed over the group.
        check: compares sharded blocks with whole ones before the first update; None after it.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: optim.Optimizer,
        plan: ResolvedPlan,
        axis: TensorAxis,
        context: ParallelContext,
        host_random: IsolatedRNG,
    ) -> None:
        super().__init__(context, "tp", "tensor group")
        self.plan = plan
        self.axis = axis
        self._host_random = host_random
        self.partial: set[nn.Parameter] = set()
        self._undo: list[Undo] = []
        self.check: PlanCheck | None = PlanCheck(model, plan, axis)
        splits: dict[nn.Parameter, Split] = {}
        for a in plan.assignments:
            own = dict(a.module.named_parameters(recurse=False, remove_duplicate=False))
            splits |= {own[name]: split for name, split in a.style.splits(a.module).items()}
            self.partial |= set(a.style.partial(a.module, plan.in_region(a.name)))
        self.partial -= splits.keys()  # what is cut has the whole gradient of its part
        for param, split in splits.items():
            self.split(optimizer, param, split)
        for a in plan.assignments:
            self._undo.append(a.style.install(a.module, axis, plan.in_region(a.name)))
        self._undo.append(removal([*self._guard_forks(model, plan), *self.take_whole_states(model, optimizer)]))
        self.check.watch(model)
        self._undo.append(self.check.close)

    def watch_calls(self, model: nn.Module) -> None:
        """Each call of `model`, the whole, draws random numbers of its own, and is compared over the group."""
        common = self.axis.common
        hooks = [
            model.register_forward_pre_hook(self.axis.settle),
            model.register_forward_pre_hook(common.enter),
            model.register_forward_hook(common.leave, always_call=True),
            *self.compare_calls(model),
        ]
        self._undo.append(removal(hooks))

    def make_reduction(self, shards: Sequence[ParamShard]) -> TensorGradients:
        return TensorGradients(self.axis, self.partial, self.splits, self._run_check, shards)

    def _run_check(self) -> None:
        if self.check is not None:
            self.check.run()
            self.check = None

    def forward_scope(self, model: nn.Module, default: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        if not model.training:  # else hooks draw torch's numbers
            return default
        self.settle()  # a backward may have left a fork open, which is not to be put back
        return self._host_random  # the ranks call the same layers, also where python or numpy chooses them

    def settle(self) -> None:
        self.axis.settle()

    def explain(self, error: RuntimeError) -> None:
        if self.check is not None:
            self.check.explain(error)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """Which layers are divided over the tensor group, and what share of the numbers that is."""
        cut = {name for name, param in params.items() if param in self.splits}
        whole = {name: size * (self.size if name in cut else 1) for name, size in sizes.items()}
        share = sum(whole[name] for name in cut) / sum(whole.values())
        layers = _counted(generalise(name) for name in sorted({name.rpartition(".")[0] for name in cut}))
        sequence = " and the sequence" if self.plan.regions else ""
        return {"layout": f"{share:.0%} of the numbers{sequence} divided over tp: {layers}"}

    def undo(self) -> None:
        self.axis.settle()
        for undo in reversed(self._undo):
            undo()

    def _guard_forks(self, model: nn.Module, plan: ResolvedPlan) -> Iterator[Any]:
        """Random numbers are in common again where a module ends that divides features, also when it fails. (And where
        the model begins: a backward may have left a fork open, checkpointing with preserve_rng_state=False.)"""
        modules = dict(model.named_modules())
        parents = {caller(modules, a.name) for a in plan.assignments if a.style.opens_fork}
        for parent in sorted(parents | {""}):
            yield modules[parent].register_forward_hook(self.axis.settle, always_call=True)


def _counted(names: Iterable[str]) -> str:
    """ "head, blocks.*.mlp x 12"."""
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(names).items())
