"""What the last training forward was called with, so that this batch can be computed once more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..engine.handles import Handle, replace
from ..tensors import map_tensors, tensors_of

CHANGED = "the loop made another loss of the criterion's, of which the gradients were looked at by themselves"
NO_LOSS = "only the forward was looked at: the loss was computed in the loop, not by engine.criterion(engine(...), ...)"
LET_GO = object()
"""In the place of a criterion's value that was there, and is not kept any more."""
UNKNOWN = (
    "engine.eval() came between the criterion and backward: the loss that was looked at is the criterion's value, "
    "whether backward was given that or another one"
)


@dataclass(frozen=True)
class Place:
    """Where a tensor is in an output: the item, and how it views that one. `shape` None: the item itself."""

    item: int
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0

    def of(self, output: list[torch.Tensor]) -> torch.Tensor:
        now = output[self.item]
        if self.shape is None:
            return now
        return now.as_strided(self.shape, self.stride, now.storage_offset() + self.offset)


@dataclass(frozen=True)
class Arguments:
    """The criterion's, with the place of each tensor in the output; None: it is none of that.

    Attributes:
        layouts: shape, stride and dtype of the output's tensors.
    """

    given: Any
    places: list[Place | None]
    layouts: list[Any]

    def without_graph(self) -> Arguments:
        places = iter(self.places)
        empty = torch.empty(0)
        given = map_tensors(lambda t: t if next(places) is None else empty, self.given) if self.places else None
        return Arguments(given, self.places, self.layouts)


@dataclass(frozen=True)
class OwnLoss:
    """Which of an output's `count` tensors the loss was: None if it was the output as a whole, -1 if none of them."""

    item: int | None
    count: int


class LastBatch:
    """References to what the engine's calls were given, replaced by the next training forward.

    With accumulation, or several backwards for one update, it is the last of them.

    Attributes:
        call: args and kwargs of the last forward in training mode.
        output: what it returned, while it is needed to find it among the criterion's arguments.
        criterion: args and kwargs of the criterion's last call; without the first, if that is the output. `Arguments`
            after `let_go`, if it is not.
        takes_output: whether the criterion's first argument was the output.
        value: what the criterion returned.
        loss, loss_id: what `backward` was given, if that is not `value`; `OwnLoss` after `let_go`.
    """

    __slots__ = ("call", "criterion", "loss", "loss_id", "output", "takes_output", "value")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """There was no forward."""
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self.output: Any = None
        self.criterion: tuple[tuple[Any, ...], dict[str, Any]] | Arguments | None = None
        self.takes_output = False
        self.value: Any = None
        self.loss: Any = None
        self.loss_id = 0

    def note_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward begins. Old outputs go before it makes new ones; its own goes into `output`."""
        self.call = args, kwargs
        self.output = self.criterion = self.value = self.loss = None

    def note_criterion(self, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> None:
        """The criterion has returned `value`."""
        self.takes_output = args[0] is self.output if args else False
        self.criterion = (args[1:] if self.takes_output else args), kwargs
        self.value = value

    def note_loss(self, loss: Any, loss_id: int, retain_graph: bool) -> None:
        """A backward begins."""
        self.loss_id = loss_id
        if loss is not self.value:
            self.loss = loss
        elif self.takes_output and not retain_graph:  # what the criterion was given is known without it
            self.output = self.value = None

    def let_go(self) -> None:
        """Keep what is needed to compute the batch once more, and no graph."""
        if isinstance(self.output, Handle):  # has none
            return
        if self.criterion is not None and not self.takes_output and not isinstance(self.criterion, Arguments):
            self.criterion = _arguments(self).without_graph()
        elif self.takes_output:
            self.criterion = _without_graph(self.criterion)
        if self.loss is not None and not isinstance(self.loss, OwnLoss):
            self.loss = _place_of_loss(self)
        self.call = _without_graph(self.call)
        self.output = None
        self.value = None if self.value is None or self.loss is not None else LET_GO

    @property
    def kind(self) -> str:
        """What can be computed once more; to be compared over the ranks."""
        return f"{self.call is not None} {self.criterion is not None} {self.takes_output} {self.loss_id}"


def copied(tree: Any) -> Any:
    """`tree` with copies of its tensors, which are on their own: a forward may change its inputs in place, and no
    gradient goes on into what made them."""
    return map_tensors(lambda t: t.detach().clone().requires_grad_(t.requires_grad), tree)


def criterion_arguments(batch: LastBatch, output: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The criterion's arguments, with what `output` has in the place of the output of then; None if the loop computed
    some of them from the output."""
    if batch.criterion is None:
        return None
    if not isinstance(batch.criterion, Arguments):
        args, kwargs = batch.criterion
        if batch.takes_output:
            return (output, *copied(args)), copied(kwargs)
        if isinstance(batch.output, Handle):
            args, kwargs = replace(copied([args, kwargs]), batch.output, output)
            return args, kwargs
    then = batch.criterion if isinstance(batch.criterion, Arguments) else _arguments(batch)
    new = tensors_of(output)
    if not any(then.places) or len(then.layouts) != len(new):
        return None
    viewed = [place for place in then.places if place is not None and place.shape is not None]
    if any(_layout(new[place.item]) != then.layouts[place.item] for place in viewed):
        return None
    places = iter(then.places)

    def exchange(tensor: torch.Tensor) -> torch.Tensor:
        place = next(places)
        return copied(tensor) if place is None else place.of(new)

    args, kwargs = map_tensors(exchange, then.given)
    return args, kwargs


def own_loss(batch: LastBatch, output: Any) -> Any:
    """The loss that the model returns, of `output`; None if what backward was given is not among it."""
    if batch.loss is None:
        return None
    if batch.loss is batch.output:
        return output
    then = batch.loss if isinstance(batch.loss, OwnLoss) else _place_of_loss(batch)
    if then.item is None:
        return output
    new = tensors_of(output)
    return new[then.item] if then.item >= 0 and then.count == len(new) else None


def _place_of_loss(batch: LastBatch) -> OwnLoss:
    old = tensors_of(batch.output)
    if batch.loss is batch.output:
        return OwnLoss(None, len(old))
    return OwnLoss(next((i for i, tensor in enumerate(old) if tensor is batch.loss), -1), len(old))


def _arguments(batch: LastBatch) -> Arguments:
    """The criterion's arguments; without places if the loop computed some of them from the output."""
    old, given = tensors_of(batch.output), list(batch.criterion or ())  # type: ignore[arg-type]
    tensors = tensors_of(given)
    places = [_place(tensor, old) for tensor in tensors]
    if any(place is None and tensor.grad_fn is not None for place, tensor in zip(places, tensors, strict=True)):
        places = []
    return Arguments(given, places, [_layout(tensor) for tensor in old])


def _place(tensor: torch.Tensor, output: list[torch.Tensor]) -> Place | None:
    """Itself, or a view. None: something else."""
    for item, before in enumerate(output):
        if tensor is before:
            return Place(item)
        shares_memory = tensor.untyped_storage() is before.untyped_storage()
        if shares_memory and tensor.grad_fn is not None and tensor.dtype == before.dtype:
            offset = int(tensor.storage_offset() - before.storage_offset())
            return Place(item, tuple(tensor.shape), tuple(tensor.stride()), offset)
    return None


def _layout(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype


def _without_graph(tree: Any) -> Any:
    return map_tensors(lambda t: t if t.grad_fn is None else t.detach().requires_grad_(), tree)
