"""The styles that divide sequences, attention with its heads sharded, and what all styles are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import InputError
from .. import collectives
from ..registries import TENSOR_STYLES
from ..shard_spec import Split
from .layers import SEQUENCE_DIM, ShardedLayer, TensorAxis


class Style:
    """A style: shards one module. The defaults do nothing.

    Attributes:
        is_region: the module gathers the sequence at its input (sequence parallelism), so that layers in it do not copy
            their input, and reduce-scatter their output.
        opens_fork: modules that follow it within the parent module work on sharded features.
        attributes: names of integers of the module, which are divided by the number of ranks.
    """

    is_region: ClassVar[bool] = False
    opens_fork: ClassVar[bool] = False
    attributes: tuple[str, ...] = ()

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        """The reasons why `module` cannot be sharded over `size` ranks in this way."""
        yield from ()

    def splits(self, module: nn.Module) -> dict[str, Split]:
        """The direct parameters of the module that are sharded, by name."""
        return {}

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        """Replicated parameters that work on this rank's shard of the activations: their gradients are summed over the
        ranks."""
        return ()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        """Make `module` work with its parameters, which are shards now.

        It may get another class and other attributes.

        Returns:
            The handles of the hooks that were registered.
        """
        return ()


def parse_style(text: str) -> Style:
    """The style that `text` names: "colwise", "fused_colwise(3)", "heads(num_heads, attn_dim)".

    Raises:
        RegistryError: there is no such style.
        InputError: it does not take these arguments.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None:
        raise InputError(f"{text!r} is not a style; write a name, or a name with arguments: 'fused_colwise(3)'")
    arguments = [part.strip() for part in (found[2] or "").split(",") if part.strip()]
    kind: type[Style] = TENSOR_STYLES.get(found[1])
    try:
        return kind(*arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"the style {text!r} does not take these arguments: {error}") from error


def convert(module: nn.Module, layer: type[ShardedLayer], **attributes: Any) -> None:
    """Make `module` a `layer` with these attributes."""
    module.__class__ = layer
    for name, value in attributes.items():
        setattr(module, name, value)


def find_indivisible(what: str, count: int, size: int, blocks: int = 1) -> Iterator[str]:
    """A message if `count` of `what`, in `blocks` blocks, cannot be split into `size` equal shards."""
    if count % (blocks * size):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        allowed = [n for n in range(1, count + 1) if count % (blocks * n) == 0]
        can_be = f"; tensor can be {', '.join(map(str, allowed[:8]))}" if allowed else ""
        yield f"{count} {what}{each} are not divisible by tensor={size}{can_be}"


_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class Sequence(Style):
    """Replicated parameters on this rank's shard of the activations: norms and dropout between the sharded layers
    (sequence parallelism), or a norm over each head's features. Dropout draws different numbers on each rank."""

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return module.parameters()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        def fork(layer: nn.Module, _: Any) -> None:
            if layer.training:
                axis.fork.open()

        for layer in module.modules():
            if isinstance(layer, _DROPOUT):
                yield layer.register_forward_pre_hook(fork)
                yield layer.register_forward_hook(lambda *_: axis.fork.close(), always_call=True)


class SequenceBegin(Style):
    """Shards activations along the sequence, from this module's input on: shape [batch, sequence, ...]."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        def split(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            length = args[0].shape[SEQUENCE_DIM]
            if length % axis.size:
                raise InputError(
                    f"sequence_parallel=True needs a sequence length that tensor={axis.size} divides, and this one is "
                    f"{length}; pad it to {-(-length // axis.size) * axis.size}, or set sequence_parallel=False"
                )
            return collectives.split(args[0], SEQUENCE_DIM, axis.group), *args[1:]

        return [module.register_forward_pre_hook(split)]


class SequenceEnd(Sequence):
    """`sequence`, and gathers this module's output."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        def gather(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return collectives.gather(output, SEQUENCE_DIM, axis.group)

        return [*super().install(module, axis, in_region), module.register_forward_hook(gather)]


class GatherSequence(Style):
    """A module between sharded sequences that gathers the sequence, and shards features instead.

    Args:
        argument: the name of the activations, if they are passed by name; else they are the first argument.
    """

    is_region = True

    def __init__(self, argument: str = "") -> None:
        self._argument = argument

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (collectives.all_gather_sequence(args[0], SEQUENCE_DIM, axis.group), *args[1:]), kwargs
            whole = collectives.all_gather_sequence(kwargs[self._argument], SEQUENCE_DIM, axis.group)
            return args, {**kwargs, self._argument: whole}

        return [module.register_forward_pre_hook(gather, with_kwargs=True)]


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
