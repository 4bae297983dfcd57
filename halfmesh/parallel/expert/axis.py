"""`parallel.expert` as an axis of the mesh: its keys, its plan, and layers that hold this rank's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ...errors import shorten
from ...options import Options, PositiveInt
from ...utils.tensors import parameter_names
from ...utils.torch_private import BATCH_NORMS
from ..axis import Axis, AxisInputs, PlanInputs
from ..batch_shard.calls import SplitBatch
from ..shard_spec import Split
from .dispatch import dispatch

_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class ExpertOptions(Options):
    """`parallel = dict(expert=2)`."""

    size: PositiveInt = 1
    """The number of ranks over which the experts of each layer, and each batch, are sharded."""


@dataclass(frozen=True)
class ExpertPlan:
    """The plan that shards experts.

    Attributes:
        names: of the arguments of the model's forward.
        layers: names of the modules that hold experts.
    """

    names: list[str]
    layers: list[str]


class ExpertParallelism(Axis):
    """`parallel.expert`."""

    dim = "ep"
    options = ExpertOptions
    same_rng = False
    cost = "each layer of experts sends its tokens to their experts and back, and the host waits for their numbers"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        for other, size in config.parallel.sizes.items():
            if size > 1 and other in ("context", "pipeline"):
                yield f"parallel.{other}", "experts are not sharded with it; leave one of the two out"
        if config.compile.enabled:
            message = "tokens are sent in numbers that compiled code does not know; leave compile out, or expert"
            yield "compile", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[ExpertPlan, list[str]]:
        model, size, problems = inputs.model, inputs.options.size, list[str]()
        layers = [name for name, module in model.named_modules() if holds_experts(module)]
        if not layers:
            problems.append(
                f"parallel.expert: {type(model).__name__} has no layer of experts: a module with `num_experts`, whose "
                f"parameters have that many rows, and forward({', '.join(_ARGUMENTS)}), as transformers' MixtralExperts"
            )
        for name in layers:
            count: Any = model.get_submodule(name).num_experts
            if count % size:
                allowed = ", ".join(str(n) for n in range(1, count + 1) if count % n == 0)
                problems.append(
                    f"parallel.expert: {name} has {count} experts, which {size} does not divide; expert can be "
                    f"{allowed}"
                )
        norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
        if norms:
            problems.append(
                f"parallel.expert: {shorten(norms)} combine(s) the rows of a batch (BatchNorm), and a rank has some of "
                "them only; leave expert out"
            )
        return ExpertPlan(parameter_names(model), layers), problems

    @staticmethod
    def apply(inputs: AxisInputs) -> ExpertParallel:
        return ExpertParallel(inputs)


def holds_experts(module: nn.Module) -> bool:
    """Return True if the parameters are stacked experts, and forward takes tokens and their experts."""
    count, params = getattr(module, "num_experts", None), list(module.parameters())
    return (
        isinstance(count, int)
        and bool(params)
        and all(param.dim() > 1 and len(param) == count for param in params)
        and parameter_names(module)[:3] == _ARGUMENTS
    )


class ExpertParallel(SplitBatch):
    """A model that each rank calls with its rows of a batch, and whose experts are sharded."""

    key = "expert"
    advice = (
        "Rows may not be combined with each other, except in layers of experts and in torch's losses; and rows, not "
        "tokens, are dim 0 of what the model is called with"
    )

    def __init__(self, inputs: AxisInputs) -> None:
        plan: ExpertPlan = inputs.plan
        super().__init__(inputs, ExpertParallelism.dim, plan.names)
        self._layers: list[Any] = [inputs.model.get_submodule(name) for name in plan.layers]
        for layer in self._layers:
            for param in layer.parameters():
                self.split(inputs.optimizer, param, Split(dim=0))
            layer.num_experts //= self.size
            layer.forward = partial(self._dispatch, layer.forward, layer.num_experts)
            layer.is_divided_by_engine = True
        self._hooks = list(self.take_whole_states(inputs.model, inputs.optimizer))

    def _dispatch(self, experts: Callable[..., torch.Tensor], count: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The forward of a layer. (A method of this object, which copies of the model share.)"""
        return dispatch(experts, count, self.group, *args, **kwargs)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        count = self._layers[0].num_experts
        return {"layout": f"1/{self.size} of the rows; {count} experts in each of {len(self._layers)} layers"}

    def undo(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for layer in self._layers:
            del layer.forward, layer.is_divided_by_engine
            layer.num_experts *= self.size
