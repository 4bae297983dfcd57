"""Joins the ranks' descriptions of their state to the full model's, and sends only those that changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ..distributed.env import ranks_by_value
from ..parallel.comm import is_simulated
from ..parallel.mesh import ParallelContext
from ..parallel.shard_spec import Shape
from .agreement import gather_results

T = TypeVar("T")


class Box(NamedTuple):
    """A box of a tensor, and the rank that writes it."""

    rank: int
    at: Shape
    sizes: Shape


class WholeTensor(NamedTuple):
    """A tensor of the full model, and the boxes that it consists of."""

    shape: Shape
    dtype: torch.dtype
    boxes: list[Box]


Distinct = Sequence[tuple[list[int], Any]]
"""The different values of the ranks, each with the ranks that have it, in order of the first of these."""


def find_tensors(described: Distinct, spread: bool) -> dict[str, WholeTensor]:
    """All tensors, from shape, dtype and boxes of the shards of each rank, by name. A box that several ranks hold is
    written by the first of them; with `spread` by the one that has the least to write so far."""
    load = [0] * sum(len(ranks) for ranks, _ in described)
    found = {}
    for name in dict.fromkeys(name for _, shards in described for name in shards):
        holders: dict[tuple[Shape, Shape], list[int]] = {}
        for ranks, shards in described:
            if name in shards:
                shape, dtype, held = shards[name]
                for box in held:
                    holders.setdefault(box, []).extend(ranks)
        boxes = []
        for (at, sizes), ranks in holders.items():
            writer = min(sorted(ranks), key=load.__getitem__) if spread else min(ranks)
            load[writer] += torch.Size(sizes).numel() * dtype.itemsize
            boxes.append(Box(writer, at, sizes))
        found[name] = WholeTensor(shape, dtype, boxes)
    return found


def join_groups(by_rank: Distinct) -> list[list[str]]:
    """The parameters of each group in the full model, from those that each rank holds."""
    joined = [dict[str, None]() for _ in max((groups for _, groups in by_rank), key=len)]
    for _, groups in by_rank:
        for known, names in zip(joined, groups, strict=False):
            known.update(dict.fromkeys(names))
    return [list(names) for names in joined]


class JoinedForms:
    """Joins what ranks describe. Ranks compare digests: the descriptions are sent and joined only if that of some rank
    has changed since the last call. The first of the ranks with equal ones sends them."""

    def __init__(self) -> None:
        self._known, self._joined = b"", None  # the digest of all ranks' digests

    def gather(
        self,
        context: ParallelContext,
        what: str,
        describe: Callable[[], tuple[Any, T]],
        join: Callable[[Distinct], Any],
    ) -> tuple[Any, list[T]]:
        """Return the result of `join` for the first values of `describe`, which are equal if their `repr` is; and the
        second ones of all ranks. All ranks call it together, with the arguments and errors of `gather_results`."""
        own = list[Any]()

        def compare() -> tuple[bytes, bytes, T]:
            form, rest = describe()
            own.append(form)
            return hashlib.sha256(repr(form).encode()).digest(), self._known, rest

        digests, known, rests = zip(*gather_results(context, what, compare), strict=True)
        key = hashlib.sha256(b"".join(digests)).digest()
        if any(theirs != key for theirs in known):  # of every rank: one may have been interrupted the last time
            holders = ranks_by_value(dict(enumerate(digests)))
            sends = holders[digests[context.rank]][0] == context.rank or is_simulated()
            sent = context.everyone(own[0] if sends else None)
            self._known, self._joined = b"", join([(ranks, sent[ranks[0]]) for ranks in holders.values()])
            self._known = key
        return self._joined, list(rests)
