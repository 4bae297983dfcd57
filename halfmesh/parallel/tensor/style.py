"""What a style is: how one module is divided over a tensor group. The parts that styles are made of."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

from torch import nn

from ...errors import InputError, RegistryError
from ..registries import TENSOR_STYLES
from ..shard_spec import Split
from .axis import TensorAxis
from .layers import DividedLayer

Undo = Callable[[], None]


class Style:
    """What happens to one module. The defaults do nothing.

    Attributes:
        is_region: whether the sequence is made whole at the module's entrance (sequence parallelism), so that layers
            within neither copy their input nor make their output whole.
        opens_fork: whether what follows within the parent module works on divided features.
    """

    is_region: ClassVar[bool] = False

    @property
    def opens_fork(self) -> bool:
        return False

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

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        """Make `module` work on its parts. Its parameters are cut already. Returns what undoes it."""
        return lambda: None


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


def change(module: nn.Module, new: type[DividedLayer], **attributes: Any) -> Undo:
    """Make `module` one of class `new`, with these attributes."""
    old = module.__class__
    module.__class__ = new
    for name, value in attributes.items():
        setattr(module, name, value)

    def undo() -> None:
        module.__class__ = old
        for name in attributes:
            delattr(module, name)

    return undo


def divide_attributes(module: nn.Module, names: Iterable[str], size: int) -> Undo:
    """Make whole numbers of `module` those of one of `size` ranks."""
    return set_attributes(module, {name: getattr(module, name) // size for name in names})


def set_attributes(module: nn.Module, values: dict[str, Any]) -> Undo:
    """Give attributes of `module` new values; undone, those of before."""
    before = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)

    def undo() -> None:
        for name, value in before.items():
            setattr(module, name, value)

    return undo


def both(first: Undo, second: Undo) -> Undo:
    """Undoes the second, then the first."""

    def undo() -> None:
        second()
        first()

    return undo


def removal(hooks: Iterable[Any]) -> Undo:
    """Removes the hooks."""

    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def find_undivided(what: str, count: int, size: int, blocks: int = 1) -> Iterator[str]:
    """A message if `count` of `what`, in `blocks` blocks, has no `size` equal parts."""
    if count % (blocks * size):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        allowed = [n for n in range(1, count + 1) if count % (blocks * n) == 0]
        words = f"tensor can be {', '.join(map(str, allowed[:8]))}" if allowed else "it cannot be divided so at all"
        yield f"{count} {what}{each} are not divisible by tensor={size}; {words}"
