"""Styles of sequence parallelism, which shards activations along the sequence between the layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from .. import collectives
from .layers import SEQUENCE_DIM, TensorAxis
from .style import Style

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
