"""What a style is: how one module is divided over a tensor group. The parts that styles are made of."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from ...errors import InputError, RegistryError
from ..registries import TENSOR_STYLES
from ..shard_spec import Split
from .layers import DividedLayer, TensorAxis


class Style:
    """What happens to one module. The defaults do nothing.

    Attributes:
        is_region: whether the sequence is made whole at the module's entrance (sequence parallelism), so that layers
            within neither copy their input nor make their output whole.
        opens_fork: whether what follows within the parent module works on divided features.
    """

    is_region: ClassVar[bool] = False
    opens_fork: ClassVar[bool] = False

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        """Why `module` cannot be divided by `size` in this way."""
        yield from ()

    def splits(self, module: nn.Module) -> dict[str, Split]:
        """The module's own parameters that are cut, by name."""
        return {}

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        """Parameters that every rank has whole, while it sees only a part of what they work on: their gradients have
        to be summed over the ranks."""
        return ()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Iterable[Any]:
        """Make `module` work on its parts. Its parameters are cut already. It may get another class and attributes,
        which are given back in the end; hooks are returned."""
        return ()


def parse_style(text: str) -> Style:
    """The style that `text` names: "colwise", "fused_colwise(3)", "heads(num_heads, attn_dim)".

    Raises:
        InputError: there is no such style, or not with these arguments.
    """
    found = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if found is None:
        raise InputError(f"{text!r} is not a style; write a name, or a name with arguments: 'fused_colwise(3)'")
    name, arguments = found[1], [part.strip() for part in (found[2] or "").split(",") if part.strip()]
    try:
        style = TENSOR_STYLES.get(name)
    except RegistryError as error:
        raise InputError(str(error)) from error
    try:
        return style(*arguments)
    except (TypeError, ValueError) as error:
        raise InputError(f"the style {text!r} does not take these arguments: {error}") from error


def change(module: nn.Module, new: type[DividedLayer], **attributes: Any) -> None:
    """Make `module` one of class `new`, with these attributes."""
    module.__class__ = new
    for name, value in attributes.items():
        setattr(module, name, value)


def divide_attributes(module: nn.Module, names: Iterable[str], size: int) -> None:
    """Make whole numbers of `module` those of one of `size` ranks."""
    for name in names:
        setattr(module, name, getattr(module, name) // size)


def find_undivided(what: str, count: int, size: int, blocks: int = 1) -> Iterator[str]:
    """A message if `count` of `what`, in `blocks` blocks, has no `size` equal parts."""
    if count % (blocks * size):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        allowed = [n for n in range(1, count + 1) if count % (blocks * n) == 0]
        words = f"tensor can be {', '.join(map(str, allowed[:8]))}" if allowed else "it cannot be divided so at all"
        yield f"{count} {what}{each} are not divisible by tensor={size}; {words}"
