"""Gives the tensors of a deferred model their values: each rank makes, or receives, what it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ...errors import InputError, readable, shorten
from ...utils.tensors import replace_data
from ...utils.torch_private import has_grad_hooks
from ..mesh import ParallelContext
from .meta import convert_to_meta, forget, named_tensors, recorded

Cut = Callable[[torch.Tensor], torch.Tensor]

_Built = tuple[list[str], list[str], bool]
"""What a rank has built: names of tensors without memory, digests of how they are made, and `from_rank0`."""

Source = Callable[[str, torch.Tensor, bool], torch.Tensor | None]
"""Called with the name of a tensor, one like it on the meta device, and whether this rank needs its value. Returns the
whole value if it does. All ranks ask for all tensors in the same order."""


class Materializer:
    """Gives the tensors of a model their values.

    Args:
        tensors: on the meta device, by their names in the whole model.
        source: of values, which go to the device of `context`.

    Attributes:
        description: where the values come from, for the effective plan.
        check: is called with the name and value of each tensor of this rank; raises if the value cannot be used.
    """

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], source: Source, context: ParallelContext, description: str
    ) -> None:
        self.description = description
        self._left = dict(tensors)
        self._shapes = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        self._source: Source | None = source
        self._context = context
        self._problems: list[str] = []
        self._held: set[int] = set()
        self._cuts: Mapping[Any, Cut] = {}
        self.check: Callable[[str, torch.Tensor], None] = lambda name, value: None

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
        self._source = None  # it may hold large tensors
        for problem in (problem for theirs in self._context.everyone(self._problems) for problem in theirs):
            raise InputError(problem)

    def _make_next(self) -> int:
        name = next(iter(self._left))
        tensor = self._left.pop(name)
        wanted = id(tensor) in self._held
        assert self._source is not None
        whole = self._source(name, self._shapes.pop(name), wanted)
        if whole is not None:
            value = self._cuts[tensor](whole) if tensor in self._cuts else whole
            if value.untyped_storage().nbytes() > value.numel() * value.element_size():
                value = value.clone(memory_format=torch.preserve_format)
            try:
                self.check(name, value)
            except InputError as error:
                self._problems.append(str(error))
            _give(name, tensor, value.to(self._context.device, tensor.dtype))
        return id(tensor)


def make_materializer(model: nn.Module, context: ParallelContext) -> Materializer | None:
    """What gives the tensors of `model` their values; None if they have them. All ranks together.

    Raises:
        InputError: on all ranks, if they have not built the same.
    """
    tensors = {name: tensor for name, tensor in named_tensors(model) if recorded(tensor) is not None}
    marks = {name: mark for name, tensor in tensors.items() if (mark := recorded(tensor)) is not None}
    recordings = list({id(mark.recording): mark.recording for mark in marks.values()}.values())
    from_rank0 = any(recording.from_rank0 for recording in recordings)
    digests = [] if from_rank0 or context.size == 1 else [recording.digest() for recording in recordings]
    everyone: list[_Built] = context.everyone((list(marks), digests, from_rank0))
    if not any(names for names, _, _ in everyone):
        return None
    if everyone[-1][2] and not everyone[0][0]:
        _refuse_differences(everyone[1:], 1)
        for recording in recordings:
            recording.end()
        return _from_first(model, everyone[-1][0], context)
    _refuse_differences(everyone, 0)
    for recording in recordings:
        recording.end()
        recording.seeds = context.from_first(recording.seeds)  # ranks differ in them if the user has not seeded torch
    description = f"made where they are held, one of {len(tensors)} tensors at a time"

    def run_again(name: str, like: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        return marks[name].value() if wanted else None

    return Materializer(tensors, run_again, context, description)


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


def _from_first(model: nn.Module, names: Sequence[str], context: ParallelContext) -> Materializer:
    tensors = dict(named_tensors(model))
    missing = context.from_first([name for name in names if name not in tensors])
    if missing:
        raise InputError(
            f"rank 0 built a model without {shorten(missing)}, which the other ranks have; build the same on all ranks"
        )
    hooked = context.from_first([name for name in names if has_grad_hooks(tensors[name])])
    if hooked:
        raise InputError(
            f"{shorten(hooked)} have hooks on the gradient on rank 0, which would be lost; register them after "
            "initialize"
        )
    sent: dict[str, torch.Tensor] = {name: tensors[name] for name in names}
    values: dict[str, torch.Tensor] = {}
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
    if context.rank == 0:
        for name, tensor in sent.items():
            values[name] = tensor.data
            _give(name, tensor, torch.empty_like(tensor, device="meta"))
    description = f"built by rank 0, which had all {readable(size)} of them in host memory, and sent one by one"

    def send(name: str, like: torch.Tensor, wanted: bool) -> torch.Tensor | None:
        value = values.pop(name, None)
        if value is None:
            value = torch.empty_like(like, device=context.device)
        context.broadcast(value)
        return value if wanted else None

    return Materializer(sent, send, context, description)


def _refuse_differences(everyone: Sequence[_Built], first: int) -> None:
    names, digests, _ = everyone[0]
    other = [first + i for i, theirs in enumerate(everyone) if theirs[0] != names]
    if other:
        raise InputError(
            f"rank(s) {other} built other tensors without memory than rank {first}; build the model under "
            "halfmesh.deferred_init() on all ranks, or on none"
        )
    other = [first + i for i, theirs in enumerate(everyone) if theirs[1] != digests]
    if other:
        raise InputError(
            f"rank(s) {other} would make other values than rank {first}: what the build asks of random numbers, or "
            "takes from outside (python's or numpy's random numbers, a file), differs; call torch.manual_seed with the "
            "same seed on all ranks before (and seed the others), or build under "
            "halfmesh.deferred_init(from_rank0=True)"
        )


def _give(name: str, tensor: torch.Tensor, value: torch.Tensor) -> None:
    try:
        replace_data(tensor, value)
    except RuntimeError as error:
        raise InputError(
            f"{name} of the deferred model cannot be given its value ({error}); build the model as usual"
        ) from error
    forget(tensor)
