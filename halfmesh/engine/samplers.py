"""Which samples a data rank sees."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from .. import torch_private
from ..errors import InputError
from .checkpoint import random_state, set_random_state
from .transfer import copied, reuses_memory

Agree = Callable[[str], bool]
"""A collective: whether all ranks were given the same text."""


class ShardedSampler(Sampler[Any]):
    """Every `size`-th item of another sampler, beginning with the `rank`-th.

    Joined over the ranks, one batch of each is one batch of the unsharded order. The order is drawn with the same
    seed on every rank, and anew for each epoch.

    Args:
        inner: a sampler of samples or of batches; one without a length may be endless.
        pad: repeat items from the beginning so that every rank gets the same number (training: a rank that runs out
            would hang the others). False leaves a ragged end (evaluation: nothing is counted twice).
        agree: whether all ranks were given the same text; asked once an epoch, to find an order that is not the same
            on every rank. None does not ask.

    Raises:
        InputError: the ranks draw different orders.
    """

    def __init__(
        self, inner: Iterable[Any], rank: int, size: int, seed: int, pad: bool, agree: Agree | None = None
    ) -> None:
        self.inner, self.rank, self.size, self.seed, self.pad = inner, rank, size, seed, pad
        self.epoch = 0
        self._agree = agree

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(self.epoch)
        randomness = OwnRandomness(self.seed + self.epoch)
        check = _Check(self._agree, self.epoch, type(self.inner).__name__)
        if not isinstance(self.inner, Sized):
            return _every(self.inner, self.rank, self.size, self.pad, randomness, check)
        with randomness:
            items = list(self.inner)
        check(repr(items))
        if self.pad and items:
            items = list(itertools.islice(itertools.cycle(items), -(-len(items) // self.size) * self.size))
        return iter(items[self.rank :: self.size])

    def __len__(self) -> int:
        if not isinstance(self.inner, Sized):
            raise TypeError(f"{type(self.inner).__name__} has no length")
        return _share(len(self.inner), self.rank, self.size, self.pad)


class StridedBatches:
    """Every `size`-th batch of a loader over an IterableDataset, which each rank reads whole.

    Args:
        agree: whether all ranks were given the same text; asked once an epoch, about the first round of batches, to
            find data that is not the same on every rank. None does not ask.

    Raises:
        InputError: the ranks read different data.
    """

    def __init__(
        self, loader: DataLoader[Any], rank: int, size: int, seed: int, pad: bool, agree: Agree | None
    ) -> None:
        self.loader, self.rank, self.size, self.seed, self.pad = loader, rank, size, seed, pad
        self.epoch = 0
        self._agree = agree

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of this epoch from now on."""
        self.epoch = epoch
        if hasattr(self.loader.dataset, "set_epoch"):
            self.loader.dataset.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        check = _Check(self._agree, self.epoch, type(self.loader.dataset).__name__)
        # The batches of a round are read one after the other, before one of them is handed out.
        batches = map(copied, self.loader) if reuses_memory(self.loader) else self.loader
        return _every(batches, self.rank, self.size, self.pad, OwnRandomness(self.seed + self.epoch), check)

    def __len__(self) -> int:
        return _share(len(self.loader), self.rank, self.size, self.pad)


class OwnRandomness:
    """A scope in which python's, numpy's and torch's generators draw from a sequence of their own.

    Leaving it puts back what was there; entering it again goes on. So the order of the data does not depend on what
    else a rank draws (the ranks' generators differ, for dropout).
    """

    def __init__(self, seed: int) -> None:
        self.state: dict[str, Any] | None = None
        """Where the sequence is, between two scopes; None before the first."""
        self._seed = seed

    def __enter__(self) -> None:
        self._outside = random_state(torch.device("cpu"))
        if self.state is not None:
            set_random_state(self.state, torch.device("cpu"))
        else:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.random.default_generator.manual_seed(self._seed)

    def __exit__(self, *_: object) -> None:
        self.state = random_state(torch.device("cpu"))
        set_random_state(self._outside, torch.device("cpu"))


def shard_loader(
    loader: DataLoader[Any],
    rank: int,
    size: int,
    seed: int,
    pad: bool,
    agree: Agree | None = None,
    copies: int = 1,
) -> Iterable[Any]:
    """A loader like `loader` that yields the part of data rank `rank` of `size`; the batch size stays.

    `loader` itself is left alone. Its workers are seeded by rank, so that random augmentation differs.

    Args:
        agree: see `StridedBatches`.
        copies: how many ranks see each part; where it is more than 1, they draw the same order, also of a single part.

    Raises:
        InputError: the loader already has a distributed sampler for another rank or number of ranks.
    """
    if _is_sharded(loader, rank, size) or size * copies == 1:
        return loader
    sharded = torch_private.without_workers(loader)  # a copy keeps what a subclass of DataLoader adds
    if isinstance(loader.dataset, IterableDataset):
        sharded.generator = torch.Generator().manual_seed(seed)  # workers that shuffle must do it alike
        return StridedBatches(sharded, rank, size, seed, pad, agree)
    sharded.generator = torch.Generator().manual_seed(seed + rank)

    def put(attribute: str, sampler: Any) -> None:
        object.__setattr__(sharded, attribute, sampler)  # DataLoader forbids it on a finished loader; this is a copy

    batches = loader.batch_sampler
    if batches is None or type(batches) is BatchSampler:
        sampler = ShardedSampler(loader.sampler if batches is None else batches.sampler, rank, size, seed, pad, agree)
        put("sampler", sampler)
        if batches is not None:
            put("batch_sampler", BatchSampler(sampler, batches.batch_size, batches.drop_last))
    else:
        put("batch_sampler", ShardedSampler(batches, rank, size, seed, pad, agree))
    return sharded


def _share(total: int, rank: int, size: int, pad: bool) -> int:
    """How many of `total` items a rank gets."""
    return -(-total // size) if pad else len(range(rank, total, size))


def _every(
    items: Iterable[Any], rank: int, size: int, pad: bool, randomness: OwnRandomness, check: _Check
) -> Iterator[Any]:
    """The `rank`-th of each `size` items. If `pad`, the last round is filled by repeating its first ones."""
    with randomness:  # a stream may draw its order here already
        iterator = iter(items)
    for round_ in itertools.count():
        with randomness:
            turn = list(itertools.islice(iterator, size))
        if round_ == 0:
            check(turn)
        if rank < len(turn):
            yield turn[rank]
        elif pad and turn:
            yield turn[rank % len(turn)]
        if len(turn) < size:
            return


class _Check:
    """Asks the other ranks whether they see the same data."""

    def __init__(self, agree: Agree | None, epoch: int, source: str) -> None:
        self._agree, self._epoch, self._source = agree, epoch, source

    def __call__(self, data: Any) -> None:
        if self._agree is not None and not self._agree(f"epoch {self._epoch}: {_digest(data)}"):
            raise InputError(
                f"the {self._source} gives different data on each rank, or was iterated on some ranks only, so some "
                "samples would be seen twice and others never. Seed what it draws alike on all ranks (initialize "
                "shards the data), and iterate engine.dataloader on all of them; if it shards itself, do not pass it "
                "to initialize but iterate its loader in the loop"
            )


def _digest(tree: Any) -> str:
    """A short text that is the same for the same numbers and words; other objects are not looked at."""
    hashed = hashlib.sha256()

    def add(leaf: Any) -> None:
        if isinstance(leaf, Mapping):
            add(list(leaf.items()))
        elif isinstance(leaf, (list, tuple)):
            for item in leaf:
                add(item)
        elif isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.numel():
            add(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(leaf, np.ndarray) and leaf.dtype != object:
            add(leaf.tobytes())
        elif isinstance(leaf, (str, bytes, int, float)):
            hashed.update(repr(leaf).encode())

    add(tree)
    return hashed.hexdigest()


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler of `loader` that wants to know which epoch begins."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    candidates = [loader, getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
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
        owners += [each for each in inner if each is not None and not any(each is owner for owner in owners)]
    found = {id(g): g for g in (getattr(owner, "generator", None) for owner in owners) if g is not None}
    return list(found.values())


def set_generators(loader: Any, states: Iterable[torch.Tensor], own: bool) -> None:
    """Give the `generators` of `loader` these states. Not `own`: they are another rank's, whose workers' seeds must not
    be repeated here; what the samplers draw from is the same on all."""
    for generator, state in zip(generators(loader), states, strict=False):
        if own or generator is not getattr(loader, "generator", None):
            generator.set_state(state.cpu())


class Share(NamedTuple):
    """What of an order of the data one batch of every data rank is.

    Attributes:
        order: "in order", "seed 1024", or "own" where it depends on what this rank draws. "seed 1024, 1 generator(s)"
            where samplers draw from generators of their own, whose state has to be the same, too.
        step: how many items of it all data ranks take together.
    """

    order: str
    step: int

    def same_place(self, other: Share, batches: int, own: bool = True) -> int | None:
        """How many batches of this share see what `batches` of the `other` have seen; None if none do.

        Args:
            own: whether the other is of the same rank of the same layout, with its random numbers.
        """
        if self == other and (own or self.order != "own"):
            return batches
        if self.order != other.order or self.order == "own" or batches * other.step % self.step:
            return None
        return batches * other.step // self.step


def share(loader: Any) -> Share:
    """What of an order `loader`, as `shard_loader` gives it, takes at a time."""
    if isinstance(loader, StridedBatches):
        return Share(f"batches, seed {loader.seed}", loader.size)
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, ShardedSampler):
        return Share(f"batches, {_seeds(batches)}", batches.size)
    sampler, size = getattr(loader, "sampler", None), getattr(batches, "batch_size", None) or 1
    if isinstance(sampler, ShardedSampler):
        in_order = isinstance(sampler.inner, SequentialSampler)
        return Share("in order" if in_order else _seeds(sampler), size * sampler.size)
    if isinstance(sampler, SequentialSampler) and type(batches) in (BatchSampler, type(None)):
        return Share("in order", size)
    return Share("own", size)


def _seeds(sampler: ShardedSampler) -> str:
    count = len(generators(sampler))
    return f"seed {sampler.seed}" + (f", {count} generator(s)" if count else "")


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
