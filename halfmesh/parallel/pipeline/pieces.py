"""A model's forward as pieces, one after another: the smallest things that a stage can be made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn


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


@dataclass(frozen=True)
class Piece:
    """A step of a model's forward.

    Attributes:
        name: how messages and the plan call it; the name of its module where it is one.
        uses: names of the modules, parameters and buffers that it works with; what is below them belongs to it, too.
        run: called as run(model, call, carry): takes what the piece before returned (None in the first) and returns
            what the next one takes, the model's output in the last. Tensors may be anywhere in lists, tuples, dicts
            and dataclasses. It must take modules from `model`, never from where else: it runs on copies, too.
        looks_into: names of modules whose plain attributes (numbers, flags, words) count in `prepare`.
        prepare: called as prepare(model, call) with a whole model, before calls of a new kind.
    """

    name: str
    uses: tuple[str, ...]
    run: Callable[[nn.Module, Call, Any], Any] = field(repr=False)
    looks_into: tuple[str, ...] = field(default=(), repr=False)
    prepare: Callable[[nn.Module, Call], None] | None = field(default=None, repr=False)


class Partitioner(Protocol):
    """What is registered in PARTITIONERS: it says how the models that it knows are made of pieces."""

    def pieces_of(self, model: nn.Module) -> Sequence[Piece] | None:
        """The pieces in the order of the forward, or None where it does not know the model.

        Raises:
            InputError: it knows the model, and that it cannot be cut.
        """
        ...
