"""Tensor parallelism: a model's layers are cut, and each rank keeps its part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ...shard import ParamShard
from ..axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from ..shard_spec import Split
from .checks import ResolvedPlan, resolve
from .gradients import TensorGradients
from .layers import TensorAxis
from .plans import Assignment, caller, generalise
from .trial import PlanTrial

_ABSENT = object()


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
        return TensorParallel(inputs)


class TensorParallel(AppliedAxis):
    """A model that is divided over a tensor group, in place: parameters, their names, ties and the optimizer that holds
    them stay the same objects.

    Attributes:
        partial: the parameters whose gradients have to be summed over the group.
        trial: compares sharded blocks with whole ones before the first update; None after it.
    """

    def __init__(self, inputs: AxisInputs) -> None:
        context, model, optimizer = inputs.context, inputs.model, inputs.optimizer
        super().__init__(context, "tp", "tensor group")
        plan: ResolvedPlan = inputs.plan
        self.plan = plan
        self.axis = axis = TensorAxis(context.tp_group, context.device, inputs.random)
        self._host_random = inputs.host_random
        self.partial: set[nn.Parameter] = set()
        self._hooks: list[Any] = []
        self._before: list[tuple[nn.Module, type[nn.Module], dict[str, Any]]] = []  # what `undo` gives back
        self.trial: PlanTrial | None = PlanTrial(model, plan, axis)
        splits: dict[nn.Parameter, Split] = {}
        for a in plan.assignments:
            own = dict(a.module.named_parameters(recurse=False, remove_duplicate=False))
            splits |= {own[name]: split for name, split in a.style.splits(a.module).items()}
            self.partial |= set(a.style.partial(a.module, plan.in_region(a.name)))
        self.partial -= splits.keys()  # what is cut has the whole gradient of its part
        for param, split in splits.items():
            self.split(optimizer, param, split)
        for a in plan.assignments:
            self._install(a)
        self._hooks += [*self._guard_forks(model, plan), *self.take_whole_states(model, optimizer)]
        self.trial.watch(model)
        if not inputs.is_split:
            self._watch_calls(model)

    def _install(self, assignment: Assignment) -> None:
        module = assignment.module
        kind, before = type(module), dict(vars(module))
        self._hooks += assignment.style.install(module, self.axis, self.plan.in_region(assignment.name))
        changed = {n: before.get(n, _ABSENT) for n, v in vars(module).items() if v is not before.get(n, _ABSENT)}
        self._before.append((module, kind, changed))

    def _watch_calls(self, model: nn.Module) -> None:
        """Each call of `model`, the whole, draws random numbers of its own, and is compared over the group."""
        common = self.axis.common
        self._hooks += [
            model.register_forward_pre_hook(self.axis.end_tp_region),
            model.register_forward_pre_hook(common.enter),
            model.register_forward_hook(common.leave, always_call=True),
            *self.compare_calls(model),
        ]

    def make_reduction(self, shards: Sequence[ParamShard]) -> TensorGradients:
        return TensorGradients(self.axis, self.partial, self.splits, self._try_out, shards)

    def _try_out(self) -> None:
        if self.trial is not None:
            self.trial.run()
            self.trial = None

    def forward_scope(self, model: nn.Module, default: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        if not model.training:  # else hooks draw torch's numbers
            return default
        self.settle()  # a backward may have left a fork open, which is not to be put back
        return self._host_random  # the ranks call the same layers, also where python or numpy chooses them

    def settle(self) -> None:
        self.axis.end_tp_region()

    def explain(self, error: RuntimeError) -> None:
        if self.trial is not None:
            self.trial.explain(error)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        """Which layers are sharded over the tensor group, and their share of the parameters."""
        cut = {name for name, param in params.items() if param in self.splits}
        whole = {name: size * (self.size if name in cut else 1) for name, size in sizes.items()}
        share = sum(whole[name] for name in cut) / sum(whole.values())
        layers = _counted(generalise(name) for name in sorted({name.rpartition(".")[0] for name in cut}))
        sequence = " and the sequence" if self.plan.regions else ""
        return {"layout": f"{share:.0%} of parameters{sequence} sharded over tp: {layers}"}

    def undo(self) -> None:
        self.axis.end_tp_region()
        for hook in self._hooks:
            hook.remove()
        if self.trial is not None:
            self.trial.close()
        for module, kind, attributes in reversed(self._before):
            module.__class__ = kind
            for name, value in attributes.items():
                if value is _ABSENT:
                    delattr(module, name)
                else:
                    setattr(module, name, value)

    def _guard_forks(self, model: nn.Module, plan: ResolvedPlan) -> Iterator[Any]:
        """Random numbers are in common again where a module ends that divides features, also when it fails. (And where
        the model begins: a backward may have left a fork open, checkpointing with preserve_rng_state=False.)"""
        modules = dict(model.named_modules())
        parents = {caller(modules, a.name) for a in plan.assignments if a.style.opens_fork}
        for parent in sorted(parents | {""}):
            yield modules[parent].register_forward_hook(self.axis.end_tp_region, always_call=True)


def _counted(names: Iterable[str]) -> str:
    """ "head, blocks.*.mlp x 12"."""
    return ", ".join(f"{name} x {count}" if count > 1 else name for name, count in Counter(names).items())
