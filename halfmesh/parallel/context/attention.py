"""The tokens that a rank has of every sequence, and their attention to all tokens.

An all-to-all gives each rank all tokens of some heads, which it attends with as one process does; a second one takes
the results back (Ulysses, https://arxiv.org/abs/2309.14509 section 3). If the heads of the queries are not divisible by
the number of ranks, each rank gathers all keys and values, and attends with its queries, or with as many others
(https://arxiv.org/abs/2407.21783 section 3.3.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...errors import InputError
from ...utils.torch_private import has_no_memory, without_override
from .. import collectives

_Attention = Callable[..., torch.Tensor]
_HEADS, _TOKENS = 1, 2  # of [batch, heads, sequence, features of a head]


@dataclass(frozen=True)
class Sequences:
    """Sequences of which each rank of a group has equally many consecutive tokens, in order of rank.

    Attributes:
        rows: the number of sequences.
        length: tokens of a whole sequence.
    """

    group: dist.ProcessGroup
    rows: int
    length: int

    @property
    def own(self) -> int:
        """This rank's tokens of each sequence."""
        return self.length // self.group.size()

    def is_whole(self, tensor: torch.Tensor) -> bool:
        """Return True if `tensor` has all tokens: [batch, sequence, ...]."""
        return tensor.dim() > 1 and tensor.shape[1] == self.length

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's tokens, contiguous (for `view(-1)`)."""
        return whole.narrow(1, self.group.rank() * self.own, self.own).contiguous()

    def cut_if_whole(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's tokens of a tensor that has all; else `tensor`."""
        return self.cut(tensor) if self.is_whole(tensor) else tensor

    def join_if_own(self, tensor: torch.Tensor) -> torch.Tensor:
        """All tokens of a tensor that has this rank's; else `tensor`. What each rank computes of all gives each its
        tokens' part of the gradient, which is averaged over the ranks afterwards."""
        if tensor.dim() < 2 or tensor.shape[1] != self.own:
            return tensor
        return collectives.scale_gradient(collectives.gather(tensor, 1, self.group), self.group.size())


def attend(
    group: dist.ProcessGroup,
    attention: _Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """Compute `attention` (torch's scaled_dot_product_attention) of this rank's queries with all keys and values.

    Args:
        query, key, value: [batch, heads, tokens of this rank, features of a head].
        attn_mask: the mask of full sequences.

    Raises:
        InputError: the attention is not that of a sequence with itself, or the mask was made for other lengths.
    """
    size, rank, own = group.size(), group.rank(), query.shape[-2]
    if attn_mask is not None and has_no_memory(attn_mask) and attn_mask.shape[-2] == own:
        attn_mask = None  # transformers makes masks of placeholders, as if sequences were joined in one
    _reject_other_shapes(size, (query, key, value), attn_mask)
    if torch.is_autocast_enabled(kind := query.device.type):  # before they are sent: rotary embeddings return fp32
        query, key, value = (x.to(torch.get_autocast_dtype(kind)) for x in (query, key, value))
    attention = partial(attention, dropout_p=dropout_p, **options)
    if query.shape[_HEADS] % size == 0:
        if (times := size // math.gcd(size, key.shape[_HEADS])) > 1:  # for the ranks whose queries attend to a head
            key, value = (x.repeat_interleave(times, _HEADS) for x in (key, value))
        query, key, value = (collectives.exchange(x, _HEADS, _TOKENS, group) for x in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
            attn_mask = attn_mask.chunk(size, -3)[rank]
        whole = attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal)
        return collectives.exchange(whole, _TOKENS, _HEADS, group)
    key, value = (collectives.all_gather_sequence(x, _TOKENS, group) for x in (key, value))
    if is_causal and attn_mask is None:
        return _attend_head_tail(group, attention, query, key, value)
    if attn_mask is not None and attn_mask.shape[-2] > 1:
        attn_mask = attn_mask.narrow(-2, rank * own, own)
    return attention(query, key, value, attn_mask=attn_mask)


def _attend_head_tail(
    group: dist.ProcessGroup, attention: _Attention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> torch.Tensor:
    """Causal attention of this rank's queries with the keys and values of whole sequences.

    Late queries see more keys than early ones. So each rank computes the first half of its own queries, and the second
    half of those of its mirror rank, size - 1 - rank. All ranks then compute equally many pairs."""
    size, rank, own = group.size(), group.rank(), query.shape[_TOKENS]
    mirror = size - 1 - rank
    rows = [query.shape[0] if other == mirror else 0 for other in range(size)]
    first, second = query.tensor_split([own - own // 2], _TOKENS)

    def attend_until(end: int, query: torch.Tensor) -> torch.Tensor:
        keys, values = (x.narrow(_TOKENS, 0, end) for x in (key, value))
        mask = _causal(query.shape[_TOKENS], end, query.device)
        return attention(query, keys, values, attn_mask=mask)

    first = attend_until(rank * own + first.shape[_TOKENS], first)
    theirs = attend_until((mirror + 1) * own, collectives.send_rows(second, rows, rows, group))
    return torch.cat([first, collectives.send_rows(theirs, rows, rows, group)], _TOKENS)


def _causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """The mask of the last `queries` of `keys` tokens. Kernels support torch's form of it, without memory."""
    if _get_current_dispatch_mode() is None:
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)  # a mode sees tensors only


def _reject_other_shapes(size: int, inputs: Sequence[torch.Tensor], mask: torch.Tensor | None) -> None:
    own = inputs[0].shape[-2]
    length = own * size
    is_right = all(x.dim() == 4 and x.shape[_TOKENS] == own for x in inputs)
    if not is_right or (mask is not None and mask.shape[-2:] not in ((length, length), (1, length))):
        shapes = [list(x.shape) for x in (*inputs, mask) if x is not None]
        raise InputError(
            f"attention got {shapes}; with context={size} q, k and v must be [batch, heads, tokens, features] for this "
            f"rank's tokens, a mask [..., {length}, {length}] or [..., 1, {length}] (see parallel.context.non_split)"
        )


def attend_in_layer(layer: Any, query: torch.Tensor, *args: Any, **options: Any) -> Any:
    """`layer`, which is torch's multi_head_attention_forward, with masks of whole sequences. It would not take them for
    this rank's tokens, so that only its attention gets them.

    Raises:
        InputError: the weights of attention are asked for.
    """
    if options["need_weights"]:
        raise InputError("with parallel.context no rank has the attention weights; pass need_weights=False")
    mask, padding, heads = options["attn_mask"], options["key_padding_mask"], args[3]
    masks = []
    if padding is not None or not options["is_causal"]:  # else torch reads no mask
        options |= {"attn_mask": None, "key_padding_mask": None, "is_causal": False}
        if mask is not None:
            masks.append(mask if mask.dim() == 2 else mask.unflatten(0, (-1, heads)))
        if padding is not None:
            masks.append(padding[:, None, None])
    zero = query.new_zeros(())
    whole: Any = sum(zero.where(~x, -torch.inf) if x.dtype == torch.bool else x for x in masks) if masks else None

    def attention(query: Any, key: Any, value: Any, _: Any, dropout_p: float, is_causal: bool) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, whole, dropout_p, is_causal)

    return without_override(layer, scaled_dot_product_attention=attention)(query, *args, **options)
