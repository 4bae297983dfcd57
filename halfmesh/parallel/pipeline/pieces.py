"""A model's forward as pieces, one after another: the smallest things that a stage can be made of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from ...errors import InputError
from ...tensors import map_tensors
from ..modules import comes_from


@dataclass
class Call:
    """What the model is called with: one microbatch of it, or a batch to evaluate. All ranks of a pipeline have it."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """What `make` gives, made by the first piece of a stage that asks for it and kept for the others."""
        kept = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def afresh(self) -> Call:
        """The same call, with nothing kept."""
        return Call(self.args, self.kwargs)


def signature_of(call: Call) -> str:
    """The same for calls with the same shapes, dtypes and plain values."""
    return repr(map_tensors(lambda t: (tuple(t.shape), t.dtype, t.requires_grad), (call.args, dict(call.kwargs))))


@dataclass(frozen=True)
class Piece:
    """A step of a model's forward.

    Attributes:
        name: how messages and the plan call it; the name of its module where it is one.
        uses: names of the modules, parameters and buffers that it works with; what is below them belongs to it, too.
        run: called as run(model, call, activations): takes what the piece before returned (None in the first) and
            returns what the next one takes, the model's output in the last. Tensors may be anywhere in lists, tuples,
            dicts and dataclasses. It must take modules from `model`, never from where else: it runs on copies, too.
        prepare: called as prepare(model, call) with a whole model, before calls of a new kind.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Call, Any], Any] = field(repr=False)
    prepare: Callable[[nn.Module, Call], None] | None = field(default=None, repr=False)


class Partitioner(Protocol):
    """What is registered in PARTITIONERS: it says how the models that it knows are made of pieces."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """The pieces in the order of the forward, or None where it does not know the model.

        Raises:
            InputError: it knows the model, and that it cannot be cut.
        """
        ...


def _call_block(block: nn.Module, activations: Any, shared: Any) -> Any:
    return block(activations)


@dataclass(frozen=True)
class BlockPartition:
    """How models of one class are cut: before any of their blocks, after the beginning, and before the end.

    Args:
        layers: the model's classes, or their full names ("package.module.Class") for those that may not be installed.
            A derived class counts if it has the same `forward`, and the same `methods`.
        methods: names of other methods of the model that decide what is computed with which modules.
        parts: modules of the model that have to be of these classes, too, by name.
        blocks: name of the ModuleList or Sequential that holds the blocks.
        begin: called as begin(model, ...) with the model's own arguments; returns what the first block takes.
        end: called as end(model, x) with what the last block returned; returns the model's output.
        end_uses: names of the modules and parameters that `end` works with. All others, outside `blocks` and
            `shared_uses`, are taken to be those of `begin`.
        share: called as share(model, ...) with the model's own arguments, once in each stage that has blocks; returns
            what all blocks take beside x, such as a mask.
        shared_uses: names of the modules that `share` works with.
        block: called as block(module, x, shared) for each block, if it is not just module(x).
        find_problem: says why a model of these classes cannot be cut, if it cannot.
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
    block: Callable[[nn.Module, Any, Any], Any] = _call_block
    find_problem: Callable[[Any], str | None] = lambda model: None

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """The pieces of `model`, in the order of its forward; None if it is not of these classes.

        Raises:
            InputError: `find_problem` says that it cannot be cut.
        """
        if not self._knows(model):
            return None
        if (problem := self.find_problem(model)) is not None:
            raise InputError(f"the model ({type(model).__name__}): {problem}")
        names = children_of(model.get_submodule(self.blocks))
        return [
            Piece("the beginning", tuple(self._rest(model)), self._run_begin),
            *(self._block_piece(f"{self.blocks}.{name}") for name in names),
            Piece("the end", tuple(name for name in self.end_uses if has_name(model, name)), self._run_end),
        ]

    def _knows(self, model: nn.Module) -> bool:
        return (
            comes_from(model, self.layers)
            and all(_has_method_of(model, method, self.layers) for method in self.methods)
            and all(comes_from(model.get_submodule(name), (kind,)) for name, kind in self.parts.items())
        )

    def _rest(self, model: nn.Module) -> Iterator[str]:
        """What nobody else uses: the largest modules that hold none of theirs, and single parameters and buffers."""
        taken = (self.blocks, *self.end_uses, *self.shared_uses)

        def walk(module: nn.Module, prefix: str) -> Iterator[str]:
            own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
            yield from (prefix + name for name, _ in own if prefix + name not in taken)
            for name, child in module.named_children():
                path = prefix + name
                if path in taken:
                    continue
                if any(other.startswith(f"{path}.") for other in taken):
                    yield from walk(child, f"{path}.")
                else:
                    yield path

        return walk(model, "")

    def _block_piece(self, name: str) -> Piece:
        def run(model: nn.Module, call: Call, activations: Any) -> Any:
            shared = None
            if self.share is not None:
                share = self.share
                shared = call.once("shared", lambda: share(model, *call.args, **call.kwargs))
            return self.block(model.get_submodule(name), activations, shared)

        return Piece(name, (name, *self.shared_uses), run)

    def _run_begin(self, model: nn.Module, call: Call, activations: Any) -> Any:
        return self.begin(model, *call.args, **call.kwargs)

    def _run_end(self, model: nn.Module, call: Call, activations: Any) -> Any:
        return self.end(model, activations)


def _has_method_of(model: nn.Module, method: str, kinds: Sequence[type[nn.Module] | str]) -> bool:
    """Whether `model` has its `method`, if any, from one of `kinds`."""
    origin = next((kind for kind in type(model).__mro__ if method in vars(kind)), None)
    return origin is None or origin in kinds or f"{origin.__module__}.{origin.__qualname__}" in kinds


def children_of(module: nn.Module) -> list[str]:
    """The names of its modules. (`named_children` leaves out the second place of one that is there twice.)"""
    return [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]


def has_name(model: nn.Module, name: str) -> bool:
    """Whether the model has a module, parameter or buffer of that name. (A `head` may be None, or missing.)"""
    owner, _, own = name.rpartition(".")
    try:
        return getattr(model.get_submodule(owner), own, None) is not None
    except AttributeError:
        return False
