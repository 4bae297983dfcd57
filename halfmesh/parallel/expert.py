"""The axis `expert`: each rank holds some of the experts, and tokens are sent to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..errors import shorten
from ..options import Options, PositiveInt
from ..utils.tensors import parameter_names
from ..utils.torch_private import BATCH_NORMS, in_shapes_only
from . import collectives
from .axis import Axis, AxisInputs, PlanInputs
from .batch_shard.calls import SplitBatch
from .shard_spec import Split

_Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dispatch(
    experts: _Experts,
    count: int,
    axis: ExpertParallel,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, of which each rank of `axis` has `count`, in order of rank.

    The host waits for the numbers of tokens: they are the sizes of the messages.

    Args:
        experts: this rank's; called with tokens, the expert of each, and its weight (1).
        hidden_states: [tokens of this rank, features].
        top_k_index: int64 [tokens, k]: the experts of each token, among those of all ranks.
        top_k_weights: [tokens, k].

    Returns:
        Like `hidden_states`.
    """
    group, k = axis.group, top_k_index.shape[-1]
    order = top_k_index.flatten().argsort(stable=True)  # by expert, and so by rank
    token, expert = order // k, top_k_index.flatten()[order]
    sent, received = _counts(expert // count, group)
    own = collectives.send_rows(hidden_states[token], sent, received, group)
    own = collectives.scale_gradient(own, group.size())
    kinds = collectives.send_rows(expert % count, sent, received, group)
    ones = torch.ones_like(kinds, dtype=top_k_weights.dtype)
    done = experts(own, kinds[:, None], ones[:, None]) + 0 * own  # also without tokens a rank has to send in backward
    # The loss's gradients are for means over the ranks, but those of experts are complete here.
    back = collectives.send_rows(collectives.scale_gradient(done, 1 / group.size()), received, sent, group)
    weighted = back * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add_(0, token, weighted.to(hidden_states.dtype))


def _counts(ranks: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """The numbers of tokens that this rank sends to each rank, and receives from it."""
    size = group.size()
    if in_shapes_only():  # a dry run, which has no values: the same number to each
        even = [len(ranks) // size + (rank < len(ranks) % size) for rank in range(size)]
        return even, even
    sent = torch.bincount(ranks, minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return sent.tolist(), received.tolist()


_ARGUMENTS = ["hidden_states", "top_k_index", "top_k_weights"]


class ExpertOptions(Options):
    """`parallel = dict(expert=2)`."""

    size: PositiveInt = 1
    """The number of ranks over which the experts of each layer, and each batch, are sharded."""


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
    def plan(inputs: PlanInputs) -> tuple[list[str], list[str]]:
        """The names of the modules that hold experts."""
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
                problems.append(f"parallel.expert: {name} has {count} experts, which {size} does not divide")
        norms = [name for name, module in model.named_modules() if isinstance(module, BATCH_NORMS)]
        if norms:
            problems.append(
                f"parallel.expert: the rows of a batch are combined in {shorten(norms)} (BatchNorm), and a rank has "
                "some of them only; leave expert out"
            )
        return layers, problems

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
        super().__init__(inputs, ExpertParallelism.dim)
        self._layers: list[Any] = [inputs.model.get_submodule(name) for name in inputs.plan]
        for layer in self._layers:
            for param in layer.parameters():
                self.split(inputs.optimizer, param, Split(dim=0))
            layer.num_experts //= self.size
            layer.forward = partial(dispatch, layer.forward, layer.num_experts, self)
            layer.is_divided_by_engine = True
        self.take_whole_states(inputs.model, inputs.optimizer)

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        count = self._layers[0].num_experts
        return {"layout": f"1/{self.size} of the rows; {count} experts in each of {len(self._layers)} layers"}
