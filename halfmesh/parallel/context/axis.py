"""The axis `context`: each rank computes its tokens of every sequence, and attends to all of them.

An all-to-all gives each rank all tokens of some heads, which it attends with as one process does; a second one takes
the results back (Ulysses, https://arxiv.org/abs/2309.14509 section 3). If the heads are not divisible by the number of
ranks, each rank gathers all keys and values, and attends with its queries (https://arxiv.org/abs/2407.21783 section
3.3.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ...errors import InputError, shorten
from ...options import Names, Options, PositiveInt
from ...utils.tensors import parameter_names
from ...utils.torch_private import RUNNING_STATISTICS, has_no_memory
from .. import collectives
from ..axis import Axis, AxisInputs, PlanInputs
from ..batch_shard.calls import SplitBatch
from ..batch_shard.shard import TOKENS, BatchShard
from ..models.transformers import find_context_problem, whole_sequence_arguments

_HEADS, _TOKENS = 1, 2  # of [batch, heads, sequence, features of a head]


def attend(
    sequence: BatchShard,
    attention: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> torch.Tensor:
    """`attention`, which is torch's scaled_dot_product_attention, of this rank's queries with all keys and values.

    Args:
        query, key, value: [batch, heads, tokens of this rank, features of a head].
        attn_mask: for full sequences.

    Raises:
        InputError: the attention is not that of a sequence with itself, or the mask was made for other lengths.
    """
    if attn_mask is not None and has_no_memory(attn_mask) and attn_mask.shape[-2] == sequence.own:
        attn_mask = None  # transformers makes masks of placeholders, as if sequences were joined in one
    _refuse_other_shapes(sequence, (query, key, value), attn_mask)
    query, key, value = (_as_computed(x) for x in (query, key, value))
    options |= {"dropout_p": dropout_p}
    size, rank, group = sequence.size, sequence.rank, sequence.group
    if query.shape[_HEADS] % size or key.shape[_HEADS] % size:
        key, value = (collectives.all_gather_sequence(x, _TOKENS, group) for x in (key, value))
        if attn_mask is not None:
            mask = attn_mask if attn_mask.shape[-2] == 1 else sequence.cut(attn_mask, attn_mask.dim() - 2)
            return attention(query, key, value, attn_mask=mask, **options)
        if not is_causal:
            return attention(query, key, value, **options)
        seen = (rank + 1) * sequence.own  # no token attends to a later one
        key, value = (x.narrow(_TOKENS, 0, seen) for x in (key, value))
        return attention(query, key, value, attn_mask=_causal(sequence.own, seen, query.device), **options)
    query, key, value = (collectives.exchange(x, _HEADS, _TOKENS, group) for x in (query, key, value))
    if attn_mask is not None and attn_mask.dim() > 2 and attn_mask.shape[-3] > 1:
        attn_mask = attn_mask.chunk(size, -3)[rank]
    whole = attention(query, key, value, attn_mask=attn_mask, is_causal=is_causal, **options)
    return collectives.exchange(whole, _TOKENS, _HEADS, group)


def _as_computed(x: torch.Tensor) -> torch.Tensor:
    """`x` in autocast's dtype for attention, before it is sent: rotary embeddings return it in fp32."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


def _causal(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """The mask of the last `queries` of `keys` tokens. Kernels support torch's form of it, without memory."""
    if _get_current_dispatch_mode() is None:
        return causal_lower_right(queries, keys)
    return torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)  # a mode sees tensors only


def _refuse_other_shapes(sequence: BatchShard, inputs: Sequence[torch.Tensor], mask: torch.Tensor | None) -> None:
    own, length = sequence.own, sequence.full_size
    wrong = any(x.dim() != 4 or x.shape[_TOKENS] != own for x in inputs)
    if mask is not None:
        wrong |= mask.dim() < 2 or mask.shape[-1] != length or mask.shape[-2] not in (1, length)
    if wrong:
        shapes = ", ".join(str(list(x.shape)) for x in inputs)
        masked = "" if mask is None else f" and a mask of shape {list(mask.shape)}"
        raise InputError(
            f"scaled_dot_product_attention was called with queries, keys and values of shapes {shapes}{masked}; with "
            f"context={sequence.size} they have to be [batch, heads, {own}, features], this rank's tokens of one "
            f"sequence, and a mask has to be [..., {length}, {length}] or [..., 1, {length}], of whole sequences "
            "(name the argument that it comes from in parallel.context.non_split, or use is_causal=True)"
        )


class ContextParallel(SplitBatch):
    """A model that each rank calls with its tokens of every sequence. It holds all parameters."""

    key = "context"
    sharded_dim = TOKENS
    advice = (
        "Tokens may only be combined by torch.nn.functional.scaled_dot_product_attention, and positions only be taken "
        "from the argument position_ids (or positions; pass it if they do not count from 0): no convolution, mean or "
        "shift along the sequence, no arange(length). Shift targets of whole sequences before the call: "
        "F.pad(ids, (0, 1), value=-100)[:, 1:]"
    )
    functions = MappingProxyType({F.scaled_dot_product_attention: attend})

    def __init__(self, inputs: AxisInputs) -> None:
        super().__init__(inputs, ContextParallelism.dim)
        self._positions, self.non_split = inputs.plan
        self._device = inputs.context.device

    def prepare(self, model: nn.Module, given: dict[str, Any], shard: BatchShard) -> dict[str, Any]:
        given = whole_sequence_arguments(model, given)
        if given.get(self._positions) is None:
            given[self._positions] = torch.arange(shard.full_size, device=self._device).expand(shard.rows, -1)
        return given

    def describe(self, params: Mapping[str, nn.Parameter], sizes: Mapping[str, int], options: Any) -> dict[str, str]:
        return {"layout": f"1/{self.size} of the tokens of each sequence"}


_POSITIONS = ("position_ids", "positions")
_MIXES_TOKENS = (*RUNNING_STATISTICS, nn.RNNBase)


class ContextOptions(Options):
    """`parallel = dict(context=2)`, or `dict(context=dict(size=2, non_split=("bias",)))`."""

    size: PositiveInt = 1
    """The number of ranks over which each sequence is sharded."""
    non_split: Names = ("attention_mask", "key_padding_mask", "src_key_padding_mask", "attn_mask", "mask")
    """Arguments of the model that every rank gets unsharded: masks, which attention needs for all tokens."""


class ContextParallelism(Axis):
    """`parallel.context`."""

    dim = "cp"
    options = ContextOptions
    splits_params = False
    same_rng = False
    cost = "attention exchanges heads for tokens, four times a layer, and gradients are summed over the group, too"

    @staticmethod
    def find_key_problems(config: Any) -> Iterator[tuple[str, str]]:
        if config.compile.enabled:
            message = "attention waits for other ranks, which compiled code would not; leave compile out, or context"
            yield "compile", message

    @staticmethod
    def plan(inputs: PlanInputs) -> tuple[Any, list[str]]:
        """The name of the argument that takes positions, and those that every rank gets unsharded."""
        model, names = inputs.model, parameter_names(inputs.model)
        problems = []
        if mixing := [name for name, module in model.named_modules() if isinstance(module, _MIXES_TOKENS)]:
            problems.append(
                f"parallel.context: the tokens of a sequence are combined other than by attention in "
                f"{shorten(mixing)} (BatchNorm, InstanceNorm, RNN), and a rank has some of them only; leave context out"
            )
        if problem := find_context_problem(model):
            problems.append(f"parallel.context: {problem}")
        positions = next((name for name in _POSITIONS if name in names), None)
        if positions is None:
            problems.append(
                f"parallel.context: {type(model).__name__}.forward has no argument position_ids, so each rank would "
                "count its tokens from 0; add one (int64 [batch, sequence]) for its embeddings; halfmesh passes it"
            )
        return (positions, inputs.options.non_split), problems

    @staticmethod
    def apply(inputs: AxisInputs) -> ContextParallel:
        return ContextParallel(inputs)
