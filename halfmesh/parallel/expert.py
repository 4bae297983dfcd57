"""The axis `expert`: each rank holds some of the experts, and halfmesh sends tokens to the ranks of their experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..options import Options, PositiveInt
from ..utils.tensors import parameter_names
from ..utils.torch_private import DATA_NEEDED, in_shapes_only
from . import collectives
from .axis import AppliedAxis, Axis, AxisInputs, PlanInputs
from .shard_spec import Split


def dispatch(
    layer: Any,
    experts: Callable[..., torch.Tensor],
    axis: ExpertParallel,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, of which each rank of `axis` has some, in order of rank.

    Three all-to-alls: of numbers, tokens and results. The host waits for the numbers, once: they are the sizes of the
    messages. Gradients of experts come from the losses of all ranks of the axis, and are their mean.

    Args:
        layer: this rank's experts.
        experts: its forward; called with tokens, the expert of each, and its weight (1).
        hidden_states: [tokens of this rank, features].
        top_k_index: int64 [tokens, k]: the experts of each token, among those of all ranks.
        top_k_weights: [tokens, k].

    Returns:
        Like `hidden_states`.
    """
    group, count, k = axis.group, layer.num_experts, top_k_index.shape[-1]
    order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
    token = order // k
    sent, received, kinds = _count_tokens(top_k_index.flatten(), count, group)
    own = collectives.send_rows(hidden_states[token], sent, received, group)
    own = collectives.scale_gradient(own, group.size())
    ones = torch.ones_like(kinds, dtype=top_k_weights.dtype)
    try:
        done = experts(own, kinds[:, None], ones[:, None])
    except DATA_NEEDED:  # without values, as of a loop over experts; the shape is known
        done = torch.empty_like(own)
    if torch.is_grad_enabled() and not done.requires_grad:
        # Without tokens the graph may end here, and this rank must send in backward like the others.
        done = done + sum(tensor[:0].sum() for tensor in (own, *layer.parameters()))
    done = collectives.scale_gradient(done, 1 / group.size())  # for the experts, as far as `own`
    back = collectives.send_rows(done, received, sent, group)
    weighted = back * top_k_weights.flatten()[order, None]
    # Not index_add_, which adds the rows of a token on CUDA in whatever order its threads arrive.
    by_token = torch.empty_like(weighted).index_copy_(0, order, weighted).unflatten(0, top_k_index.shape)
    return by_token.sum(1).to(hidden_states.dtype)


def _count_tokens(
    experts: torch.Tensor, count: int, group: dist.ProcessGroup
) -> tuple[list[int], list[int], torch.Tensor]:
    """The numbers of tokens that this rank sends to each rank, and receives from it; and for each token received the
    index of its expert, of this rank's `count`.

    Args:
        experts: the expert of each of this rank's tokens, among those of all ranks.
    """
    size = group.size()
    if in_shapes_only():  # a dry run, which has no values: the same number to each
        even = [len(experts) // size + (rank < len(experts) % size) for rank in range(size)]
        return even, even, torch.zeros_like(experts)
    sent = torch.bincount(experts, minlength=size * count).view(size, count)  # by rank and expert
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    to, of = torch.stack([sent.sum(1), received.sum(1)]).tolist()
    kinds = torch.arange(count, device=sent.device).repeat(size)
    return to, of, kinds.repeat_interleave(received.flatten(), output_size=sum(of))


NO_EXPERTS = "has no expert layer"
_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


def holds_experts(module: nn.Module) -> bool:
    """Return True if the parameters are stacked experts, and forward takes tokens and their experts."""
    count, params = getattr(module, "num_experts", None), list(module.parameters())
    are_stacked = bool(params) and all(param.dim() > 1 and len(param) == count for param in params)
    return isinstance(count, int) and are_stacked and parameter_names(module)[:3] == _ARGUMENTS


class ExpertParallel(AppliedAxis):
    """A model of which each data rank holds some of the experts. Each rank has its own rows, and sends their tokens."""

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs.context, "ep")
        self.group = inputs.context.group(self.dim)
        self._layers: list[Any] = [inputs.model.get_submodule(name) for name in inputs.plan]
        for layer in self._layers:
            for param in layer.parameters():
                self.split(inputs.optimizer, param, Split(dim=0))
            for module in layer.modules():  # an adapter may hold the layer
                if hasattr(module, "num_experts"):
                    module.num_experts //= self.size
            layer.forward = partial(dispatch, layer, layer.forward, self)
            layer.is_divided_by_engine = True
        self.take_whole_states(inputs.model, inputs.optimizer)

    def replicas(self, param: nn.Parameter) -> float:
        return 1 / self.size if param in self.splits else 1

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        count = self._layers[0].num_experts
        return {"layout": f"{count} experts in each of {len(self._layers)} layers; rows of each data rank's own"}


class ExpertOptions(Options):
    """The keys of `parallel.expert`: `parallel = dict(expert=2)`."""

    size: PositiveInt = 1
    """The number of data ranks over which the experts of each layer are sharded."""


class ExpertParallelism(Axis):
    """`parallel.expert`."""

    dim, replica_dim = "ep", "edp"
    options = ExpertOptions
    same_rng = False
    cost = "each expert layer sends tokens to their experts and back, and the host waits for the counts"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if getattr(config.parallel.data, "hybrid", None) is not None:
            yield "parallel.data.hybrid", "experts lie on other ranks than the other weights; remove hybrid, or expert"
        if config.compile.enabled:
            yield "compile", "compiled code cannot send numbers of tokens that change; remove compile, or expert"

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[list[str], list[str]]:
        """The names of the modules that hold experts."""
        model, size, problems = inputs.model, inputs.options.size, list[str]()
        found = [name for name, module in model.named_modules() if holds_experts(module)]
        layers = [name for name in found if not any(name.startswith(f"{outer}.") for outer in found)]  # of adapters
        if not layers:
            needs = f"a module with `num_experts`, and forward({', '.join(_ARGUMENTS)})"
            problems.append(f"parallel.expert: {type(model).__name__} {NO_EXPERTS}: {needs}")
        for name in layers:
            count: Any = model.get_submodule(name).num_experts
            if count % size:
                fits = [n for n in range(1, count + 1) if count % n == 0]
                problems.append(f"parallel.expert: {size} does not divide the {count} experts of {name}: {fits} do")
        return layers, problems

    apply = ExpertParallel
