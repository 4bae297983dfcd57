"""Gives the tensors of a deferred model their values: each rank makes what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...errors import InputError
from ...utils.tensors import replace_data
from ..mesh import ParallelContext
from ..rank_checks import same_on_ranks
from .creation import Recorded, convert_to_meta, forget, named_tensors, recorded

Cut = Callable[[torch.Tensor], torch.Tensor]


class Materializer:
    """Gives the tensors of a model their values.

    Args:
        tensors: on the meta device, by their names in the whole model.
        values: where the whole value of each is recorded. Values go to the device of `context`.
        check: is called with the name and value of each tensor of this rank; raises if the value cannot be used.

    Attributes:
        description: where the values come from, for the effective plan.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        values: Mapping[str, Recorded],
        context: ParallelContext,
        check: Callable[[str, torch.Tensor], None],
    ) -> None:
        self.description = f"made where they are held, one of {len(tensors)} tensors at a time"
        self._left = dict(tensors)
        self._values = dict(values)
        self._context = context
        self._problems: list[str] = []
        self._held: set[int] = set()
        self._cuts: Mapping[Any, Cut] = {}
        self._check = check

    def begin(self, model: nn.Module, blocks: Sequence[str], cuts: Mapping[nn.Parameter, Cut] | None) -> None:
        """The model is sharded: this rank needs the tensors that it has now.

        Args:
            blocks: names of modules of the whole model whose tensors are made before the others, in this order.
            cuts: for each sharded parameter a function from the whole tensor to this rank's shard.
        """
        self._held = {id(tensor) for _, tensor in named_tensors(model)}
        self._cuts = cuts or {}
        first = {n: t for block in blocks for n, t in self._left.items() if n.startswith(f"{block}.")}
        self._left = first | self._left

    def make(self, module: nn.Module) -> None:
        """Make the tensors of `module`, and those that come before them."""
        waiting = {id(tensor) for _, tensor in named_tensors(module)} & {id(tensor) for tensor in self._left.values()}
        while waiting:
            waiting.discard(self._make_next())

    def finish(self) -> None:
        """Make the other tensors. All ranks together.

        Raises:
            InputError: on all ranks, if a value cannot be used.
        """
        while self._left:
            self._make_next()
        for problem in (problem for theirs in self._context.everyone(self._problems) for problem in theirs):
            raise InputError(problem)

    def _make_next(self) -> int:
        name = next(iter(self._left))
        tensor = self._left.pop(name)
        recorded_value = self._values.pop(name)  # a recording may hold large tensors
        if id(tensor) in self._held:
            whole = recorded_value.value()
            value = self._cuts[tensor](whole) if tensor in self._cuts else whole
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                value = value.clone(memory_format=torch.preserve_format)
            try:
                self._check(name, value)
            except InputError as error:
                self._problems.append(str(error))
            _give(name, tensor, value.to(self._context.device, tensor.dtype))
        return id(tensor)


def make_materializer(
    model: nn.Module, context: ParallelContext, check: Callable[[str, torch.Tensor], None]
) -> Materializer | None:
    """Make the source of values for the tensors of `model`; None if they have them. All ranks together.

    Args:
        check: see `Materializer`.

    Raises:
        InputError: on all ranks, if they have not built the same.
    """
    tensors = {name: tensor for name, tensor in named_tensors(model) if recorded(tensor) is not None}
    marks = {name: mark for name, tensor in tensors.items() if (mark := recorded(tensor)) is not None}
    recordings = list({id(mark.recording): mark.recording for mark in marks.values()}.values())
    digests = [] if context.size == 1 else [recording.digest() for recording in recordings]
    same_on_ranks(
        list(marks),
        what="{ranks} built other tensors without memory than rank 0; build the model under halfmesh.deferred_init() "
        "on all ranks, or on none",
    )
    if not marks:
        return None
    same_on_ranks(
        digests,
        what="{ranks} would make other values than rank 0: what the build asks of random numbers, or takes from "
        "outside (python's or numpy's random numbers, a file), differs; call torch.manual_seed with the same seed on "
        "all ranks before (and seed the others), or build the model as usual",
    )
    for recording in recordings:
        recording.end()
        recording.seeds = context.from_first(recording.seeds)  # ranks differ in them if the user has not seeded torch
    return Materializer(tensors, marks, context, check)


def materialize(model: nn.Module, optimizer: Any = None) -> None:
    """Give the tensors of `model` that have no memory the values that one process makes. Others stay as they are.

    Raises:
        InputError: a tensor cannot be made separately.
    """
    convert_to_meta(model, optimizer, ExitStack())
    for name, tensor in named_tensors(model):
        if (mark := recorded(tensor)) is not None:
            mark.recording.end()
            _give(name, tensor, mark.value())


def _give(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    try:
        replace_data(tensor, value)
    except RuntimeError as error:
        raise InputError(
            f"{name} of the deferred model cannot be given its value ({error}); build the model as usual"
        ) from error
    forget(tensor)
