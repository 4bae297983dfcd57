"""How one module is divided over a tensor group: the styles that a plan gives to modules by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import InputError, RegistryError
from . import collectives
from .registries import TENSOR_STYLES
from .split import Split
from .tensor_axis import TensorAxis
from .tensor_layers import SEQUENCE_DIM, ColwiseLinear, DividedLayer, RowwiseLinear, VocabEmbedding

Undo = Callable[[], None]

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


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


class Colwise(Style):
    """A Linear by its output features. The output stays divided, for a `rowwise` layer to take.

    Attributes:
        blocks: how many projections are fused into one weight, one below the other; each is divided by itself.
        gathers: whether the output is made whole.
    """

    blocks = 1
    gathers: ClassVar[bool] = False

    @property
    def opens_fork(self) -> bool:
        return not self.gathers

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if (problem := _not_plain(module, nn.Linear)) is not None:
            yield problem
        else:
            yield from find_undivided("output features", module.weight.shape[0], size, self.blocks)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        names = ("weight", "bias") if module.bias is not None else ("weight",)
        return {name: Split(0, self.blocks) for name in names}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        undo = change(module, ColwiseLinear, axis=axis, in_region=in_region, gathers=self.gathers)
        return both(undo, divide_attributes(module, ("out_features",), axis.size))


class FusedColwise(Colwise):
    """`colwise` of several projections in one weight (qkv: 3, gate and up: 2).

    Args:
        blocks: how many.
    """

    def __init__(self, blocks: int | str) -> None:
        self.blocks = int(blocks)
        if self.blocks < 1:
            raise ValueError(f"{blocks} projections cannot be fused; give 1 or more")


class ColwiseGather(Colwise):
    """`colwise` whose output is made whole: for a head."""

    gathers = True


class Rowwise(Style):
    """A Linear by its input features, after a `colwise` one. Its output is summed, and whole.

    Attributes:
        splits_input: whether the input is whole, too.
    """

    splits_input: ClassVar[bool] = False

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        if (problem := _not_plain(module, nn.Linear)) is not None:
            yield problem
        else:
            yield from find_undivided("input features", module.weight.shape[1], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return {"weight": Split(1)}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        undo = change(module, RowwiseLinear, axis=axis, in_region=in_region, splits=self.splits_input)
        return both(undo, divide_attributes(module, ("in_features",), axis.size))

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return () if module.bias is None or not in_region else (module.bias,)  # added to a divided sequence


class RowwiseSplit(Rowwise):
    """`rowwise` whose input is whole."""

    splits_input = True


class Vocab(Style):
    """An Embedding by its words, or the Linear head that turns features back into words (its output is made whole).

    A weight that both share stays shared.
    """

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        kind = nn.Linear if isinstance(module, nn.Linear) else nn.Embedding
        if (problem := _not_plain(module, kind)) is not None:
            yield problem
            return
        for setting in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(module, setting, None):
                yield f"{setting} is set, which is not defined for part of the words; leave it out"
        yield from find_undivided("words", module.weight.shape[0], size)

    def splits(self, module: nn.Module) -> dict[str, Split]:
        return ColwiseGather().splits(module) if isinstance(module, nn.Linear) else {"weight": Split(0)}

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        if isinstance(module, nn.Linear):
            return ColwiseGather().install(module, axis, in_region)
        undo = change(module, VocabEmbedding, axis=axis, in_region=in_region)
        return both(undo, divide_attributes(module, ("num_embeddings",), axis.size))


class Heads(Style):
    """The module's numbers that count heads (or features of all heads) become this rank's.

    `heads()` says that there is nothing to count: the module takes the number from its activations' shape.

    Args:
        attributes: names of whole numbers of the module.
    """

    def __init__(self, *attributes: str) -> None:
        self.attributes = attributes

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        for attribute in self.attributes:
            count = getattr(module, attribute, None)
            if not isinstance(count, int):
                yield f"it has no whole number named {attribute!r} (found: {count!r})"
            else:
                yield from find_undivided(attribute, count, size)

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        return divide_attributes(module, self.attributes, axis.size)


class ConfigHeads(Style):
    """A number of heads in the model's `config` is divisible. Its modules take it from their activations' shape.

    Args:
        name: of the number.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def find_problems(self, module: Any, size: int) -> Iterator[str]:
        yield from find_undivided(f"config.{self._name}", getattr(module.config, self._name), size)


class Off(Style):
    """Attributes of the module that are switched off: short cuts that go round its divided layers.

    Args:
        attributes: their names.
    """

    def __init__(self, *attributes: str) -> None:
        self._attributes = attributes

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        before = {name: getattr(module, name) for name in self._attributes if hasattr(module, name)}
        return _set(module, before, dict.fromkeys(before, False))


class Sequence(Style):
    """Whole parameters on activations of which this rank has a part: norms and dropout between the divided layers
    (sequence parallelism), or a norm over each head's features.

    Dropout drops elements of this rank's own.
    """

    def partial(self, module: Any, in_region: bool) -> Iterable[nn.Parameter]:
        return module.parameters()

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        def fork(layer: nn.Module, _: Any) -> None:
            if layer.training:
                axis.fork.open()

        hooks = []
        for layer in module.modules():
            if isinstance(layer, _DROPOUT):
                hooks.append(layer.register_forward_pre_hook(fork))
                hooks.append(layer.register_forward_hook(lambda *_: axis.fork.close(), always_call=True))
        return _removal(hooks)


class SequenceBegin(Style):
    """From this module's input on, activations are divided along the sequence: shape [batch, sequence, ...]."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        def divide(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            length = args[0].shape[SEQUENCE_DIM]
            if length % axis.size:
                raise InputError(
                    f"a sequence of {length} cannot be divided by tensor={axis.size}, as sequence_parallel=True has "
                    f"to; pad it to {-(-length // axis.size) * axis.size}, or set sequence_parallel=False"
                )
            return collectives.split(args[0], SEQUENCE_DIM, axis.group), *args[1:]

        return _removal([module.register_forward_pre_hook(divide)])


class SequenceEnd(Sequence):
    """`sequence`, and this module's output is whole again."""

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        def gather(_: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
            return collectives.gather(output, SEQUENCE_DIM, axis.group)

        return both(super().install(module, axis, in_region), _removal([module.register_forward_hook(gather)]))


class Region(Style):
    """A module between divided sequences, within which the sequence is whole and features are divided.

    Args:
        argument: the name of the activations, where they are passed by name; else they are the first argument.
    """

    is_region = True

    def __init__(self, argument: str = "") -> None:
        self._argument = argument

    def install(self, module: nn.Module, axis: TensorAxis, in_region: bool) -> Undo:
        def gather(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (collectives.gather_in(args[0], SEQUENCE_DIM, axis.group), *args[1:]), kwargs
            whole = collectives.gather_in(kwargs[self._argument], SEQUENCE_DIM, axis.group)
            return args, {**kwargs, self._argument: whole}

        return _removal([module.register_forward_pre_hook(gather, with_kwargs=True)])


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
    before = {name: getattr(module, name) for name in names}
    return _set(module, before, {name: count // size for name, count in before.items()})


def _set(module: nn.Module, before: dict[str, Any], values: dict[str, Any]) -> Undo:
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


def _removal(hooks: Iterable[Any]) -> Undo:
    def undo() -> None:
        for hook in hooks:
            hook.remove()

    return undo


def _not_plain(module: nn.Module, kind: type[nn.Module]) -> str | None:
    """Why `module` does not compute what `kind` computes from parameters of its own."""
    if not isinstance(module, kind) or type(module).forward is not kind.forward:
        return f"it is a {type(module).__name__}, and this style is for torch.nn.{kind.__name__}"
    if "weight" not in dict(module.named_parameters(recurse=False, remove_duplicate=False)):
        return "its weight is computed from others (parametrized), and cannot be cut; remove the parametrization"
    return None


def find_undivided(what: str, count: int, size: int, blocks: int = 1) -> Iterator[str]:
    """A message if `count` of `what`, in `blocks` blocks, has no `size` equal parts."""
    if count % (blocks * size):
        each = f" in {blocks} blocks" if blocks > 1 else ""
        allowed = [n for n in range(1, count + 1) if count % (blocks * n) == 0]
        words = f"tensor can be {', '.join(map(str, allowed[:8]))}" if allowed else "it cannot be divided so at all"
        yield f"{count} {what}{each} are not divisible by tensor={size}; {words}"
