"""Computes losses of this rank's tokens: counts targets over all ranks, and reads a loss's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ...nn.loss import linear_cross_entropy
from ...utils.torch_private import BACKWARD, without_override
from .attention import attend_in_layer

_CALL_OTHERS = BACKWARD | {F.multi_head_attention_forward}
"""Functions that call some of the replaced ones; backward does if it recomputes activations."""
COUNTING = (F.cross_entropy, F.nll_loss, linear_cross_entropy)
"""Losses whose mean is over the targets that count. The last of their positional arguments is the targets."""

_Attend = Callable[..., torch.Tensor]
_Average = Callable[[torch.Tensor], Any]


class TokensMode(TorchFunctionMode):
    """A scope in which torch's attention and means over targets are those of whole sequences. It keeps nothing of a
    call, so that backward, which may recompute activations, need not follow the forward.

    Args:
        attend: called with torch's scaled_dot_product_attention and its arguments.
        average: the mean over the ranks of a number of targets.
    """

    def __init__(self, attend: _Attend, average: _Average) -> None:
        super().__init__()
        self._attend, self._average = attend, average

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _CALL_OTHERS:
            with self:
                if func is F.multi_head_attention_forward:
                    return attend_in_layer(func, *args, **kwargs)
                return without_override(func)(*args, **kwargs)
        if any(issubclass(kind, torch.fx.Proxy) for kind in types):
            return func(*args, **kwargs)  # a pipeline traces the model
        if func is F.scaled_dot_product_attention:
            return self._attend(func, *args, **kwargs)
        if func in COUNTING:
            return _mean_over_targets(self._average, func, *args, **kwargs)
        return func(*args, **kwargs)


def _mean_over_targets(
    average: _Average, loss: Callable[..., torch.Tensor], *given: Any, **options: Any
) -> torch.Tensor:
    """`loss`, one of `COUNTING`. A mean is divided by the mean of the ranks' counts of targets: the mean over the ranks
    of these losses is the loss of whole sequences."""
    target = given[-1]
    is_old = any(options.get(name) is not None for name in ("size_average", "reduce"))  # deprecated; another mean
    if options["reduction"] != "mean" or is_old or target.is_floating_point():
        return loss(*given, **options)
    losses = loss(*given, **options | {"reduction": "none"})
    total = losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))
    counted, weight = target != options["ignore_index"], options["weight"]
    if weight is not None:  # with no boolean index, for which the host would wait; an ignored index may be no class
        counted = weight[target.where(counted, 0).long()].where(counted, 0)
    count = counted.sum(dtype=total.dtype)
    return (total / average(count)).to(losses.dtype)


# -- graphs ------------------------------------------------------------------------------------------------------------

_Node = torch.autograd.graph.Node
_MARK = "halfmesh.context"
LOSS = "loss"
"""The mark of a loss of whole sequences; an output's is its `Sequences`."""


def mark(tensor: torch.Tensor, what: Any) -> None:
    """Note in the graph what `tensor` is."""
    if tensor.grad_fn is not None:
        node: Any = tensor.grad_fn
        node.metadata[_MARK] = what


def mark_of(node: Any) -> Any:
    """The mark of the tensor that `node` has made; None if it has none."""
    return node.metadata.get(_MARK)


def trace(
    start: Iterable[_Node | None], is_end: Callable[[_Node], Any], most: int | None = None
) -> tuple[list[_Node], list[_Node]]:
    """The nodes of the graph from `start` to where it ends, breadth first, and the ends that were met.

    Args:
        is_end: behind such a node nothing is looked at.
        most: nodes to look at.
    """
    todo, nodes, ends = list(start), dict[_Node, None](), dict[_Node, None]()
    for node in todo:  # which grows
        if node is None or node in nodes or node in ends:
            continue
        if is_end(node):
            ends[node] = None
            continue
        if len(nodes) == most:
            break
        nodes[node] = None
        todo += [following for following, _ in node.next_functions]
    return list(nodes), list(ends)


def trace_losses(losses: Iterable[torch.Tensor], outputs: Iterable[torch.Tensor]) -> tuple[list[_Node], list[_Node]]:
    """`trace` from `losses` to `outputs`."""
    ends = {tensor.grad_fn for tensor in outputs}
    return trace((loss.grad_fn for loss in losses), ends.__contains__, most=256)


def operations(nodes: Iterable[_Node]) -> tuple[str, ...]:
    """By what a loss was made: by other operations it may be another function."""
    return tuple(node.name() for node in nodes)


def is_made_otherwise(nodes: Iterable[_Node], ends: Iterable[_Node]) -> bool:
    """Return True if some of `nodes` also belong to the graph behind `ends`: activations were used, not parameters."""
    made = {node for node in nodes if not hasattr(node, "variable")}
    behind = (following for end in ends for following, _ in end.next_functions)
    return bool(trace(behind, made.__contains__)[1])
