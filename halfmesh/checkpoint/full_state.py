"""Joins the ranks' descriptions of their state to the full model's, and sends only those that changed."""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..distributed.env import ranks_by_value
from ..parallel.comm import is_simulated
from ..parallel.mesh import ParallelContext
from ..parallel.shard_spec import Shape
from ..utils.tensors import digest, has_values
from .agreement import gather_results


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


def merge(by_rank: Distinct) -> dict[str, Any]:
    """The ranks' values merged; where several have one, the first rank's."""
    return {key: value for _, own in reversed(by_rank) for key, value in own.items()}


def join_groups(by_rank: Distinct) -> list[list[str]]:
    """The parameters of each group in the full model, from those that each rank holds."""
    joined = [dict[str, None]() for _ in max((groups for _, groups in by_rank), key=len)]
    for _, groups in by_rank:
        for known, names in zip(joined, groups, strict=False):
            known.update(dict.fromkeys(names))
    return [list(names) for names in joined]


class _DigestPickler(pickle.Pickler):
    """Pickles a digest of its bits for a tensor: torch would write the address of its memory. (torch.save would not,
    but takes several times as long for thousands of step counters, which each save compares.)"""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if type(value) not in (torch.Tensor, nn.Parameter) or not has_values(value):
            return None
        if value.is_quantized or value.is_meta:
            return None
        return type(value).__name__, str(value.device), value.requires_grad, digest(value.resolve_conj().resolve_neg())


def stable_bytes(value: Any) -> bytes:
    """Bytes that are equal only if values are; and if values are that the same code made, unless they have tensors that
    are not plain (sparse)."""
    file = io.BytesIO()
    _DigestPickler(file).dump(value)
    return file.getvalue()


class Part(NamedTuple):
    """One part of the state that a rank describes.

    Attributes:
        value: any object that can be sent.
        encode: converts it to bytes that are equal only if values are.
        join: computes the result from the values of all ranks.
    """

    value: Any
    encode: Callable[[Any], bytes]
    join: Callable[[Distinct], Any]


class JoinedParts:
    """Joins the parts that ranks describe. Ranks compare digests: a part is sent and joined only if it changed on a
    rank since the last call. The first of the ranks with equal values sends them."""

    def __init__(self) -> None:
        self._known: dict[int, bytes] = {}  # of each part: the digest of all ranks' digests
        self._joined: dict[int, Any] = {}

    def gather(self, context: ParallelContext, what: str, describe: Callable[[], Sequence[Part]]) -> list[Any]:
        """Return the result of `join` for each part. All ranks call it together, with the arguments and errors of
        `gather_results`."""
        parts = list[Part]()

        def compare() -> tuple[list[bytes], dict[int, bytes]]:
            parts.extend(describe())
            if context.size == 1:
                return [], {}
            return [hashlib.sha256(part.encode(part.value)).digest() for part in parts], self._known

        digests, known = zip(*gather_results(context, what, compare), strict=True)
        if context.size == 1:
            return [part.join([([0], part.value)]) for part in parts]
        by_part = list(zip(*digests, strict=True))
        holders = [ranks_by_value(dict(enumerate(of_ranks))) for of_ranks in by_part]
        keys = {n: hashlib.sha256(b"".join(of_ranks)).digest() for n, of_ranks in enumerate(by_part)}
        # Of every rank: one may have been interrupted the last time.
        changed = [n for n, key in keys.items() if any(theirs.get(n) != key for theirs in known)]
        if changed:
            own = digests[context.rank]
            sent = context.everyone(
                {n: parts[n].value for n in changed if is_simulated() or holders[n][own[n]][0] == context.rank}
            )
            for n in changed:
                self._known.pop(n, None)
                self._joined[n] = parts[n].join([(ranks, sent[ranks[0]][n]) for ranks in holders[n].values()])
                self._known[n] = keys[n]
        return [self._joined[n] for n in keys]
