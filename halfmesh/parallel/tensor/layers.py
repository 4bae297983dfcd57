"""Sharded layers, attention with sharded heads, and the tensor axis that they share. A layer is sharded by a change of
its class. Its parameters (now this rank's shards), hooks and name stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from ...utils.torch_private import edit_stamp, in_shapes_only
from .. import collectives
from ..axis import AppliedAxis
from ..mesh import ParallelContext
from ..rng import RandomFork
from .colwise import SEQUENCE_DIM, SharedInput
from .logits import ShardedLogits, local_ids


class TensorAxis(AppliedAxis):
    """The tensor axis for its layers. All sharded layers of an engine share one, and so do copies of the model.

    Attributes:
        group: the `size` ranks, of which this is `rank`.
        device: this rank's.
        fork: random numbers that differ between the ranks, open where activations are sharded.
    """

    def __init__(self, context: ParallelContext) -> None:
        super().__init__(context, "tp", "tensor group")
        self.group = context.group("tp")
        self.device = context.device
        self.fork = RandomFork(self.rank, context.device)
        self._shared: tuple[Any, ...] | None = None

    def share(self, x: torch.Tensor) -> SharedInput | None:
        """`x` as the input of layers that each give a partial gradient of it: of q, k and v the same; None if it needs
        no gradient."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return None
        stamp = edit_stamp(x)
        if self._shared is None or self._shared[0] is not x or self._shared[1] != stamp:
            self._shared = x, stamp, SharedInput(x, self.group)
        return self._shared[2]

    @torch.compiler.disable
    def copy_to_tp(self, x: torch.Tensor) -> torch.Tensor:
        """`x` for a layer that gives a partial gradient."""
        shared = self.share(x)
        return x if shared is None else shared.whole

    @torch.compiler.disable
    def gather_sequence(self, x: torch.Tensor) -> torch.Tensor:
        """The ranks' shards of the sequence concatenated, for layers that each give a partial gradient. Backward
        gathers them again for `ShardedLayer.colwise`."""
        if not (x.requires_grad and torch.is_grad_enabled()):
            return collectives.all_gather_sequence(x, SEQUENCE_DIM, self.group)
        shared = SharedInput(x, self.group, gathers=True)
        whole = shared.branch()
        whole.tp_input = shared  # type: ignore[attr-defined]
        return whole

    @torch.compiler.disable
    def end_tp_region(self, *_: Any) -> None:
        """End a region of sharded activations: the ranks draw the same random numbers again, and the shared input is
        forgotten. Also a hook before or after a forward."""
        self.fork.close()
        self._shared = None


class ShardedLayer(nn.Module):
    """The base of sharded layers.

    Attributes:
        axis: the ranks that hold the shards.
        in_region: a module around this one gathers and reduces along the sequence (sequence parallelism).
        product: computes a linear layer's product, as `torch.nn.functional.linear`; a precision may set another.
    """

    is_divided_by_engine = True
    axis: TensorAxis
    in_region: bool
    product: Callable[..., torch.Tensor] = staticmethod(F.linear)

    @torch.compiler.disable
    def colwise(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product with some rows of a weight; the gradient of `x` is summed over the ranks."""
        shared = getattr(x, "tp_input", None) if self.in_region else self.axis.share(x)
        if shared is None or not torch.is_grad_enabled():
            return self.product(x, weight, bias)
        if self.product is F.linear and weight.requires_grad:
            return shared.linear(weight, bias)
        return self.product(x if self.in_region else shared.whole, weight, bias)


class ColwiseLinear(ShardedLayer, nn.Linear):
    """A linear layer of which this rank computes some output features: rows of the weight.

    Attributes:
        gathers: True if the output is gathered.
        keeps_logits: True if it is not gathered in training. Then only `torch.nn.functional.cross_entropy` takes it.
        transposed: True if the weight is [in, out], as in transformers' Conv1D.
    """

    gathers: bool
    keeps_logits: bool
    transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.colwise(x, self.weight.t() if self.transposed else self.weight, self.bias)
        if self.keeps_logits and self.training and torch.is_grad_enabled() and not in_shapes_only():
            return ShardedLogits.of(output, self.axis.group)
        if self.gathers:
            return collectives.gather(output, -1, self.axis.group)
        if self.training:
            self.axis.fork.open()  # up to the rowwise layer that follows, each rank drops different features
        return output


class RowwiseLinear(ShardedLayer, nn.Linear):
    """A linear layer of which this rank has some input features: columns of the weight. Outputs are summed over the
    ranks, then the bias is added, which is replicated.

    Attributes:
        splits: the input is replicated, so that this rank takes its shard of it.
        transposed: the weight is [in, out], as in transformers' Conv1D.
    """

    splits: bool
    transposed: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.axis.end_tp_region()
        group, weight = self.axis.group, self.weight.t() if self.transposed else self.weight
        if self.splits:
            x = collectives.split(x, -1, group)
        output = self.product(x, weight)
        if self.in_region:
            output = collectives.reduce_scatter_sequence(output, SEQUENCE_DIM, group)
        else:
            output = collectives.reduce_from_tp(output, group)
        return output if self.bias is None else output + self.bias.to(output.dtype)


class VocabEmbedding(ShardedLayer, nn.Embedding):
    """An embedding of which this rank holds some vocabulary entries. Ids of other ranks give zeros, and outputs are
    summed over the ranks."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        entries = self.weight.shape[0]
        local, elsewhere = local_ids(ids, entries, self.axis.group)
        padding = None if self.padding_idx is None else self.padding_idx - self.axis.rank * entries
        output = F.embedding(local, self.weight, padding if padding in range(entries) else None)
        return collectives.reduce_from_tp(output.masked_fill(elsewhere.unsqueeze(-1), 0), self.axis.group)


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
            raise InputError("is_causal=True is only a hint about attn_mask: pass attn_mask as well")
        q, k, v = (self._heads(x, row) for row, x in enumerate((query, key, value)))
        causal = is_causal and key_padding_mask is None and not need_weights  # then torch takes the hint for the mask
        mask = None if causal else self._mask(key_padding_mask, attn_mask, q.dtype)
        if self.training:
            self.axis.fork.open()  # up to out_proj, each rank drops weights of its heads
        dropout, weights = self.dropout if self.training else 0.0, None
        if need_weights:
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            attended = weights @ v
            if average_attn_weights:
                weights = collectives.reduce_from_tp(weights.mean(1) / self.axis.size, self.axis.group)
            else:
                weights = collectives.gather(weights, 1, self.axis.group)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))  # [batch, length, features]
        if query.dim() == 2:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if self.batch_first else output.transpose(0, 1), weights

    def _heads(self, x: torch.Tensor, row: int) -> torch.Tensor:
        """Queries (row 0), keys (1) or values (2) of this rank's heads: [batch, heads, length, features of a head]."""
        weight = self.in_proj_weight.chunk(3)[row]
        bias = None if self.in_proj_bias is None else self.in_proj_bias.chunk(3)[row]
        projected = self.colwise(x, weight, bias)
        if x.dim() == 2:
            projected = projected.unsqueeze(0)
        elif not self.batch_first:
            projected = projected.transpose(0, 1)
        return projected.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _mask(
        self, key_padding: torch.Tensor | None, mask: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Both masks as one that is added to the scores of this rank's heads. In a bool mask, True masks out."""
        if key_padding is not None:
            key_padding = key_padding.view(-1, 1, 1, key_padding.shape[-1])
        if mask is not None and mask.dim() == 3:  # one for each head of each sample
            mask = mask.unflatten(0, (-1, self.axis.size, self.num_heads))[:, self.axis.rank]
        whole: torch.Tensor | None = None
        for each in (key_padding, mask):
            if each is not None:
                added = torch.where(each, -torch.inf, 0.0) if each.dtype == torch.bool else each
                whole = added.to(dtype) if whole is None else whole + added.to(dtype)
        return whole
