"""The styles that divide sequences, and what all styles are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch
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
