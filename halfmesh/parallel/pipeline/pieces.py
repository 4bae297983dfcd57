"""Describes a model's forward as a sequence of pieces, which are grouped into pipeline stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from ...errors import InputError
from ...utils.tensors import map_tensors
from ..modules import comes_from


@dataclass
class Call:
    """The arguments of one call of a pipelined model: a microbatch, or a batch to evaluate. All stages have them.

    Attributes:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    _kept: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the result of `make()` for `key`. The first piece of a stage runs it, later ones reuse the result."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]


def signature_of(call: Call) -> str:
    """Return a key that is equal for calls with the same shapes, dtypes and plain values."""
    return repr(map_tensors(lambda t: (tuple(t.shape), t.dtype, t.requires_grad), (call.args, dict(call.kwargs))))


@dataclass(frozen=True)
class Piece:
    """One step of a model's forward. A pipeline stage consists of one or more pieces.

    Attributes:
        name: its name in messages and in the plan. If it is one module, the name of that module.
        uses: the names of the modules, parameters and buffers that it uses, with everything below them.
        run: called as `run(model, call, activations)` with the output of the previous piece (None for the first piece).
            It returns the input of the next piece; the last piece returns the model's output. Tensors may be anywhere
            in lists, tuples, dicts and dataclasses. It must take modules from `model` only, because it also runs on
            copies.
        prepare: called as `prepare(model, call)` with a full model, before calls with new shapes, dtypes or values.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Call, Any], Any] = field(repr=False)
    prepare: Callable[[nn.Module, Call], None] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class BlockPartition:
    """Splits a model that consists of a beginning, a list of blocks and an end. It splits before each block and before
    the end.

    Args:
        layers: the model's classes, or their full names ("package.module.Class") if they may not be installed. A
            derived class matches if it inherits `forward` and `methods`.
        blocks: the name of the `ModuleList` or `Sequential` that holds the blocks.
        begin: called as `begin(model, ...)` with the model's arguments. Returns the input of the first block.
        end: called as `end(model, x)` with the output of the last block. Returns the model's output.
        end_uses: the names of the modules and parameters that `end` uses. All others, outside `blocks` and
            `shared_uses`, belong to `begin`.
        methods: the names of other methods of the model that determine how its modules are used.
        parts: the classes that modules within the model must have, by the names of these modules.
        share: called as `share(model, ...)` with the model's arguments, once in each stage that has blocks. Returns the
            arguments that all blocks get in addition to x, such as a mask.
        shared_uses: the names of the modules that `share` uses.
        block: called as `block(module, x, shared)` for each block. By default `module(x)`.
        find_problem: called with the model. Returns the reason why it cannot be split, or None.
    """

    layers: tuple[type[nn.Module] | str, ...]
    blocks: str
    begin: Callable[..., Any]
    end: Callable[[Any, Any], Any]
    end_uses: tuple[str, ...]
    methods: tuple[str, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)
    share: Callable[..., Any] | None = None
    shared_uses: tuple[str, ...] = ()
    block: Callable[[Any, Any, Any], Any] = lambda module, x, shared: module(x)
    find_problem: Callable[[Any], str | None] = lambda model: None

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """Return the pieces in the order of the forward, or None if the model does not match this partition.

        Raises:
            InputError: the model matches, but `find_problem` reported that it cannot be split.
        """
        own = all(
            not hasattr(model, name) or comes_from(model, self.layers, name) for name in ("forward", *self.methods)
        )
        if not own or not all(comes_from(model.get_submodule(name), (kind,)) for name, kind in self.parts.items()):
            return None
        if (problem := self.find_problem(model)) is not None:
            raise InputError(f"the model ({type(model).__name__}): {problem}")
        kinds = (model.named_modules, model.named_parameters, model.named_buffers)
        names = [name for named in kinds for name, _ in named(remove_duplicate=False)]
        blocks = children_of(model.get_submodule(self.blocks))
        end_uses = tuple(name for name in self.end_uses if name in names)
        return [
            Piece("the beginning", self._rest(names), lambda m, call, x: self.begin(m, *call.args, **call.kwargs)),
            *(self._block_piece(f"{self.blocks}.{name}") for name in blocks),
            Piece("the end", end_uses, lambda m, call, x: self.end(m, x)),
        ]

    def _rest(self, names: Sequence[str]) -> tuple[str, ...]:
        """The modules of `begin`: the largest ones that contain nothing used elsewhere, and single parameters."""
        taken = (self.blocks, *self.end_uses, *self.shared_uses)

        def is_split(name: str) -> bool:
            return not name or any(other.startswith(f"{name}.") for other in taken)

        own = (name for name in names if name not in taken and not is_split(name))
        return tuple(name for name in own if is_split(name.rpartition(".")[0]))

    def _block_piece(self, name: str) -> Piece:
        def run(model: nn.Module, call: Call, activations: Any) -> Any:
            share = self.share and partial(self.share, model, *call.args, **call.kwargs)
            shared = call.once("shared", share) if share else None
            return self.block(model.get_submodule(name), activations, shared)

        return Piece(name, (name, *self.shared_uses), run)


def children_of(module: nn.Module) -> list[str]:
    """The names of its children. (`named_children` leaves out the second name of a module.)"""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
