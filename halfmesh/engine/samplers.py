"""Which samples a data rank sees."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler

from ..errors import InputError


class ShardedSampler(Sampler[Any]):
    """Every `size`-th item of another sampler, beginning with the `rank`-th.

    Joined over the ranks, one batch of each is one batch of the unsharded order. The order is drawn with the same
    seed on every rank, and anew for each epoch.

    Args:
        inner: a sampler of samples or of batches.
        pad: repeat items from the beginning so that every rank gets the same number (training: a rank that runs out
            would hang the others). False leaves a ragged end (evaluation: nothing is counted twice).
    """

    def __init__(self, inner: Iterable[Any], rank: int, size: int, seed: int, pad: bool) -> None:
        self.inner, self.rank, self.size, self.seed, self.pad = inner, rank, size, seed, pad
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):  # the ranks' own generators differ, for dropout
            torch.manual_seed(self.seed + self.epoch)
            items = list(self.inner)
        if self.pad and items:
            items = list(itertools.islice(itertools.cycle(items), -(-len(items) // self.size) * self.size))
        return iter(items[self.rank :: self.size])

    def __len__(self) -> int:
        if not isinstance(self.inner, Sized):
            raise TypeError(f"{type(self.inner).__name__} has no length")
        total = len(self.inner)
        return -(-total // self.size) if self.pad else len(range(self.rank, total, self.size))


class StridedBatches:
    """Every `size`-th batch of a loader over an IterableDataset, which each rank reads whole.

    The last, incomplete round of batches is filled by repeating its first ones if `pad`, so that all ranks get the
    same number.
    """

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, pad: bool) -> None:
        self.loader, self.rank, self.size, self.pad = loader, rank, size, pad

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self.loader)
        while round_ := list(itertools.islice(batches, self.size)):
            if self.rank < len(round_):
                yield round_[self.rank]
            elif self.pad:
                yield round_[self.rank % len(round_)]

    def __len__(self) -> int:
        total = len(self.loader)
        return -(-total // self.size) if self.pad else len(range(self.rank, total, self.size))


def shard_loader(loader: DataLoader[Any], rank: int, size: int, seed: int, pad: bool) -> Iterable[Any]:
    """A loader like `loader` that yields the part of data rank `rank` of `size`; the batch size stays.

    `loader` itself is left alone. Its workers are seeded by rank, so that random augmentation differs.

    Raises:
        InputError: the loader already has a distributed sampler for another rank or number of ranks.
    """
    if size == 1 or _is_sharded(loader, rank, size):
        return loader
    sharded = copy.copy(loader)  # keeps what a subclass of DataLoader adds
    sharded.generator = torch.Generator().manual_seed(seed + rank)
    if isinstance(loader.dataset, IterableDataset):
        return StridedBatches(sharded, rank, size, pad)

    def put(attribute: str, sampler: Any) -> None:
        object.__setattr__(sharded, attribute, sampler)  # DataLoader forbids it on a finished loader; this is a copy

    batches = loader.batch_sampler
    if batches is None or type(batches) is BatchSampler:
        sampler = ShardedSampler(loader.sampler if batches is None else batches.sampler, rank, size, seed, pad)
        put("sampler", sampler)
        if batches is not None:
            put("batch_sampler", BatchSampler(sampler, batches.batch_size, batches.drop_last))
    else:
        put("batch_sampler", ShardedSampler(batches, rank, size, seed, pad))
    return sharded


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler of `loader` that wants to know which epoch begins."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    told: list[int] = []
    for sampler in candidates:
        if sampler is not None and hasattr(sampler, "set_epoch") and id(sampler) not in told:
            sampler.set_epoch(epoch)
            told.append(id(sampler))


def generators(loader: Any) -> list[torch.Generator]:
    """The random generators that decide the order of `loader` and the seeds of its workers."""
    owners = [loader]
    for owner in owners:  # grows: a loader has samplers, a sharded sampler has one inside
        inner = (getattr(owner, name, None) for name in ("loader", "sampler", "batch_sampler", "inner"))
        owners += [each for each in inner if each is not None]
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None}
    return list(found.values())


def _is_sharded(loader: DataLoader[Any], rank: int, size: int) -> bool:
    """Whether a sampler of the user's own already gives this data rank its part."""
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        theirs = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if None in theirs:
            continue
        if theirs != (size, rank):
            raise InputError(
                f"the dataloader's {type(sampler).__name__} has num_replicas={theirs[0]}, rank={theirs[1]}, but this "
                f"is data rank {rank} of {size}; leave the sampler out (initialize shards the data), or build it "
                f"with num_replicas={size}, rank={rank}"
            )
        return True
    return False
