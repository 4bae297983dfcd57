"""torch's multi-head attention with its heads sharded over the tensor axis."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from .. import collectives
from ..shard_spec import Split
from .layers import ShardedLayer, TensorAxis
from .sequence_styles import Style, convert, find_indivisible


class Attention(Style):
    """Shards the heads of a `torch.nn.MultiheadAttention`, whose `out_proj` has to be `rowwise`."""

    opens_fork = True
    attributes = ("num_heads",)

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if type(module).forward is not nn.MultiheadAttention.forward:
            yield f"it is a {type(module).__name__}, and this style is for torch.nn.MultiheadAttention; choose another"
            return
        if module.in_proj_weight is None:
            yield "this style does not support kdim and vdim; leave it whole, or build it without them"
        if module.bias_k is not None or module.add_zero_attn:
            yield "this style does not support add_bias_kv and add_zero_attn; leave it whole, or build it without them"
        yield from find_indivisible("heads", module.num_heads, size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        names = ("in_proj_weight",) if module.in_proj_bias is None else ("in_proj_weight", "in_proj_bias")
        return {name: Split(0, 3) for name in names}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        convert(module, ShardedAttention, axis=axis, in_region=in_region)
        return ()


class ShardedAttention(ShardedLayer, nn.MultiheadAttention):
    """A `torch.nn.MultiheadAttention` of which this rank computes some heads. Arguments and results are the same."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,  # a hint in addition to the mask
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if is_causal and attn_mask is None:
            raise InputError(
                f"{self.plan_entry}: is_causal=True is a hint that attn_mask is causal, and there is no attn_mask; "
                "pass torch.nn.Transformer.generate_square_subsequent_mask(length)"
            )
        batched = query.dim() == 3
        q, k, v = (self._heads(x, row, batched) for row, x in enumerate((query, key, value)))
        causal = is_causal and key_padding_mask is None and not need_weights  # then torch takes the hint for the mask
        mask = None if causal else self._mask(key_padding_mask, attn_mask, q.dtype)
        if self.training:
            self.axis.fork.open()  # up to out_proj, each rank drops weights of its heads
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = weights @ v
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))  # [batch, length, features]
        if not batched:
            output = output.squeeze(0)
        elif not self.batch_first:
            output = output.transpose(0, 1)
        return output, self._gather_weights(weights, batched, average_attn_weights) if need_weights else None

    def _heads(self, x: torch.Tensor, row: int, batched: bool) -> torch.Tensor:
        """Queries (row 0), keys (1) or values (2) of this rank's heads: [batch, heads, length, features of a head]."""
        weight = self.in_proj_weight.chunk(3)[row]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[row]
        projected = F.linear(x if self.in_region else self.axis.copy_to_tp(x), weight, bias)
        if not batched:
            projected = projected.unsqueeze(0)
        elif not self.batch_first:
            projected = projected.transpose(0, 1)
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, key_padding: torch.Tensor | None, mask: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Both masks as one that is added to the scores of this rank's heads. In a bool mask, True masks out."""
        masks = []
        if key_padding is not None:
            key_padding = key_padding if key_padding.dim() == 2 else key_padding.unsqueeze(0)
            masks.append(_additive(key_padding, dtype)[:, None, None, :])
        if mask is not None:
            mask = _additive(mask, dtype)
            if mask.dim() == 3:  # one for each head of each sample
                mask = mask.unflatten(0, (-1, self.axis.size, self.num_heads))[:, self.axis.rank]
            masks.append(mask)
        return sum(masks[1:], masks[0]) if masks else None

    def _gather_weights(self, weights: torch.Tensor, batched: bool, average: bool) -> torch.Tensor:
        """The attention weights that torch returns: their mean over all heads, or those of each head."""
        if average:
            weights = collectives.reduce_from_tp(weights.mean(1) / self.axis.size, self.axis.group)
        else:
            weights = collectives.gather(weights, 1, self.axis.group)
        return weights if batched else weights.squeeze(0)


def _additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))
