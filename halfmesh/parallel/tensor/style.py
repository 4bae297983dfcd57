"""The contract of a style, which shards one module over the tensor axis; and helpers of styles."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from ...errors import InputError
from ..registries import TENSOR_STYLES
from ..shard_spec import Split
from .layers import ShardedLayer, TensorAxis


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

        It may get another class and other attributes; `TensorParallel.undo` restores the former ones.

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
