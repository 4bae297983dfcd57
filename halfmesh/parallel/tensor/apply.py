"""Tensor parallelism: a model's layers are cut, and each rank keeps its part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from ..._torch import assigns
from ...errors import InputError
from ..optimizer_checks import refuse_other_state
from ..same_calls import SameCalls
from ..shard_spec import Split
from .axis import TensorAxis
from .checks import ResolvedPlan
from .plans import caller
from .style import Undo, removal
from .verify import PlanCheck


class TensorParallel:
    """A model that is divided over a tensor group, in place: parameters, their names, ties and the optimizer that holds
    them stay the same objects.

    Args:
        model: equal on all ranks.
        optimizer: over its parameters; state that it has is cut along.
        plan: how each module is divided; without problems.
        axis: the tensor group.

    Attributes:
        splits: how each cut parameter was cut.
        cuts: what makes this rank's part of a whole tensor that is cut as each parameter was.
        partial: the parameters whose gradients have to be summed over the group.
        check: compares sharded blocks with whole ones before the first update; None after it.
    """

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, plan: ResolvedPlan, axis: TensorAxis) -> None:
        self.plan = plan
        self.axis = axis
        self.splits: dict[nn.Parameter, Split] = {}
        self.partial: set[nn.Parameter] = set()
        self._optimizer = optimizer
        self._undo: list[Undo] = []
        self.check: PlanCheck | None = PlanCheck(model, plan, axis)
        for a in plan.assignments:
            own = dict(a.module.named_parameters(recurse=False, remove_duplicate=False))
            self.splits |= {own[name]: split for name, split in a.style.splits(a.module).items()}
            self.partial |= set(a.style.partial(a.module, plan.in_region(a.name)))
        self.partial -= self.splits.keys()  # what is cut has the whole gradient of its part
        self.cuts = {p: partial(split.cut, rank=axis.rank, size=axis.size) for p, split in self.splits.items()}
        for param, cut in self.cuts.items():
            self._change(param, cut)
        for a in plan.assignments:
            self._undo.append(a.style.install(a.module, axis, plan.in_region(a.name)))
        hooks = [*self._guard_forks(model, plan), *self._take_whole(model)]
        hooks.append(optimizer.register_load_state_dict_post_hook(refuse_other_state))
        self._undo.append(removal(hooks))
        self.check.watch(model)
        self._undo.append(self.check.close)

    def watch_calls(self, model: nn.Module) -> None:
        """Each call of `model`, the whole, draws random numbers of its own, and is compared over the group."""
        common, same = self.axis.common, SameCalls(self.axis.group, "tensor group")
        hooks = [
            model.register_forward_pre_hook(self.axis.settle),
            model.register_forward_pre_hook(common.enter),
            model.register_forward_hook(common.leave, always_call=True),
            model.register_forward_pre_hook(lambda m, a, k: same.compare_inputs(m.training, a, k), with_kwargs=True),
            model.register_forward_hook(lambda m, a, output: same.compare_outputs(m.training, output)),
        ]
        self._undo.append(removal(hooks))

    def weight(self, param: nn.Parameter, dp_size: int) -> float:
        """1 / (number of ranks that hold the same numbers as this one)."""
        return 1 / (dp_size if param in self.splits else dp_size * self.axis.size)

    def undo(self) -> None:
        """Give the layers back as they came; parameters stay in parts."""
        self.axis.settle()
        for undo in reversed(self._undo):
            undo()

    @torch.no_grad()
    def _change(self, param: nn.Parameter, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change a parameter and those tensors of its optimizer state that have its shape."""
        state = self._optimizer.state.get(param, {})
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim():
                state[name] = change(value)
        param.data, param.grad = change(param.data), None

    def _guard_forks(self, model: nn.Module, plan: ResolvedPlan) -> Iterator[Any]:
        """Random numbers are in common again where a module ends that divides features, also when it fails. (And where
        the model begins: a backward may have left a fork open, checkpointing with preserve_rng_state=False.)"""
        modules = dict(model.named_modules())
        parents = {caller(modules, a.name) for a in plan.assignments if a.style.opens_fork}
        for parent in sorted(parents | {""}):
            yield modules[parent].register_forward_hook(self.axis.settle, always_call=True)

    def _take_whole(self, model: nn.Module) -> Iterator[Any]:
        """State dicts with whole tensors can be loaded, too: each rank takes its part."""
        for module in model.modules():
            own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
            cut = {name: self.splits[param] for name, param in own.items() if param in self.splits}
            if cut:
                yield module.register_load_state_dict_pre_hook(TakePart(self.axis, cut))


class TakePart:
    """Makes whole tensors in a state dict this rank's part, before they are loaded into a divided module."""

    def __init__(self, axis: TensorAxis, splits: Mapping[str, Split]) -> None:
        self._axis = axis
        self._splits = dict(splits)

    def __call__(self, module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any, *_: Any) -> None:
        own = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        for name, split in self._splits.items():
            value = state.get(prefix + name)
            if value is not None and assigns(metadata):
                raise InputError(
                    f"load_state_dict(..., assign=True) would replace {prefix + name}, of which this rank holds a "
                    "part; load without assign, or load before initialize"
                )
            if isinstance(value, torch.Tensor) and value.shape == split.whole_shape(own[name].shape, self._axis.size):
                state[prefix + name] = split.cut(value, self._axis.rank, self._axis.size)
