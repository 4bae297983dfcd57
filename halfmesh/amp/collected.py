"""The gradients of an update, and how they are laid out: looked at once, and remembered until it changes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import NoReturn

import torch

from ..errors import InputError
from ..shard import ParamShard

_layout, _dtype = attrgetter("layout"), attrgetter("dtype")

# A plain CPU norm of 40 M fp32 elements is 6e-3 too low; in chunks of this many elements the error is 3e-7.
CHUNK = 65536

Forms = tuple[list[torch.layout], list[torch.dtype], list[tuple[int, ...] | None]]


def forms(tensors: Sequence[torch.Tensor]) -> Forms:
    """Layout, dtype and strides of each: what gradients must have in common with what they belong to, for fused
    kernels. With `map`, because this is done at each step."""
    layouts = list(map(_layout, tensors))
    try:
        strides: list[tuple[int, ...] | None] = list(map(torch.Tensor.stride, tensors))
    except RuntimeError:  # compressed sparse ones have none
        strides = [tensor.stride() if tensor.layout is torch.strided else None for tensor in tensors]
    return layouts, list(map(_dtype, tensors)), strides


@dataclass(slots=True)
class Kind:
    """Gradients of one layout that are alike."""

    weight: float
    """Of their shards."""
    dtype: torch.dtype
    places: list[int] | None
    """Which they are; None: all."""
    sizes: list[int]
    """Of how many elements."""
    whole: bool
    """Whether a norm takes them as they are: contiguous, none empty or of more than `CHUNK` elements."""


class Layout:
    """What gradients of the same shards, of the same forms, have in common.

    Attributes:
        shards: whose gradients these are, in this order.
        forms: of each gradient.
        fits: whether they are attached to what the optimizer holds, to all of it, in its forms.
        is_sparse: whether one of them is.
        kinds: see `Gradients.find_kinds`; None: nobody has asked yet.
    """

    def __init__(self, shards: list[ParamShard], forms: Forms, fits: bool) -> None:
        self.shards = shards
        self.fits = fits
        self.forms = forms
        self.is_sparse = bool(set(forms[0]) - {torch.strided})
        self.kinds: list[Kind] | None = None


def _kinds(shards: Sequence[ParamShard], tensors: Sequence[torch.Tensor]) -> Iterator[Kind]:
    places: dict[tuple[float, torch.dtype, torch.device], list[int]] = {}
    for place, (shard, tensor) in enumerate(zip(shards, tensors, strict=True)):
        places.setdefault((shard.weight, tensor.dtype, tensor.device), []).append(place)
    for (weight, dtype, _), own in places.items():
        alike = [tensors[place] for place in own]
        sizes = [tensor.numel() for tensor in alike]
        contiguous = all(tensor.layout is torch.strided and tensor.is_contiguous() for tensor in alike)
        whole = contiguous and min(sizes) > 0 and max(sizes) <= CHUNK
        yield Kind(weight, dtype, None if len(places) == 1 else own, sizes, whole)


class Gradients:
    """Those of an update, or of a backward. An iterator gives pairs of a shard and its local gradient.

    Attributes:
        layout: how they are laid out; it is the same object for as long as nothing of it changes.
        tensors: in the order of `layout.shards`.
    """

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: Layout, tensors: list[torch.Tensor]) -> None:
        self.layout = layout
        self.tensors = tensors

    @classmethod
    def of(cls, pairs: Iterable[tuple[ParamShard, torch.Tensor]]) -> Gradients:
        """From pairs of a shard and its local gradient."""
        held = list(pairs)
        tensors = [tensor for _, tensor in held]
        return cls(Layout([shard for shard, _ in held], forms(tensors), False), tensors)

    def __iter__(self) -> Iterator[tuple[ParamShard, torch.Tensor]]:
        return zip(self.layout.shards, self.tensors, strict=True)

    def find_kinds(self) -> list[Kind]:
        """The gradients by their shard's weight, their dtype and device; mostly one kind."""
        self.layout.kinds = list(_kinds(self.layout.shards, self.tensors))
        return self.layout.kinds

    def take(self) -> list[torch.Tensor]:
        """All of them; nothing is left here, so that each can be freed when it is used."""
        tensors, self.tensors = self.tensors, []
        return tensors

    def refuse_sparse(self) -> NoReturn:
        """Raise InputError, with the first gradient that is sparse."""
        name, layout = next((shard.name, grad.layout) for shard, grad in self if grad.layout != torch.strided)
        raise InputError(
            f"the gradient of {name!r} is sparse ({layout}), which loss scaling, clipping and the gradient norm do not "
            "support; build its layer with sparse=False"
        )
