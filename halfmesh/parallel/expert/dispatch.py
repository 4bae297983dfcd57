"""Sends tokens to the ranks of their experts, and the experts' results back."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from .. import collectives
from ..objects import is_simulated

_Experts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def dispatch(
    experts: _Experts,
    count: int,
    group: dist.ProcessGroup,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """The weighted sum of each token's experts, of which each rank of `group` has `count`, in order of rank.

    The host waits for the numbers of tokens: they are the sizes of the messages.

    Args:
        experts: this rank's; called with tokens, the expert of each, and its weight (1).
        hidden_states: [tokens of this rank, features].
        top_k_index: int64 [tokens, k]: the experts of each token, among those of all ranks.
        top_k_weights: [tokens, k].

    Returns:
        Like `hidden_states`.
    """
    k = top_k_index.shape[-1]
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
    if is_simulated(group):  # a dry run, which has no values: the same number to each
        even = [len(ranks) // size + (rank < len(ranks) % size) for rank in range(size)]
        return even, even
    sent = torch.bincount(ranks, minlength=size)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return sent.tolist(), received.tolist()
