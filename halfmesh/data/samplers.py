"""Which samples a data rank sees: its part of the order that the user's own loader would draw in one process."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, SequentialSampler

from ..engine._torch import without_workers
from ..errors import InputError
from ..parallel.context import ParallelContext
from ..parallel.random import SharedRandomness
from .transfer import copied, reuses_memory, workers

Agree = Callable[[str], bool]
"""A collective: whether all ranks were given the same text."""
_IN_ORDER = (SequentialSampler, range, list, tuple)


class ShardedSampler(Sampler[Any]):
    """Every `size`-th item of another sampler, beginning with the `rank`-th.

    Joined over the ranks, one batch of each is one batch of the unsharded order, which `draw` draws as the user's own
    loader would.

    Args:
        inner: a sampler of samples or of batches; one without a length may be endless.
        pad: repeat items from the beginning so that every rank gets the same number (training: a rank that runs out
            would hang the others). False leaves a ragged end (evaluation: nothing is counted twice).
        agree: whether all ranks were given the same text; asked once an epoch, to find an order that is not the same
            on every rank. None does not ask.

    Attributes:
        generator: of the user's loader.
        stays: whether the workers of the user's loader stay from epoch to epoch.
    """

    generator: torch.Generator | None = None
    stays = False

    def __init__(self, inner: Iterable[Any], rank: int, size: int, pad: bool, agree: Agree | None = None) -> None:
        self.inner, self.rank, self.size, self.pad = inner, rank, size, pad
        self.epoch = 0
        self._agree = agree
        self._items: Iterator[Any] | None = None
        self._has_begun = False

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is."""
        self.epoch = epoch

    def draw(self, randomness: SharedRandomness) -> None:
        """Draw the order of the next iteration; of a sampler without a length its first round.

        Raises:
            InputError: the ranks draw different orders.
        """
        check = _Check(self._agree, self.epoch, type(self.inner).__name__)
        with randomness:
            if not (self.stays and self._has_begun):
                draw_seed(self.generator)
            self._has_begun = True
            items = list(self.inner) if isinstance(self.inner, Sized) else iter(self.inner)
        if not isinstance(items, list):
            rounds = _every(items, self.rank, self.size, self.pad, check, randomness)
            self._items = itertools.chain(list(itertools.islice(rounds, 1)), rounds)
            return
        check(repr(items))
        if self.pad and items:
            items = list(itertools.islice(itertools.cycle(items), -(-len(items) // self.size) * self.size))
        self._items = iter(items[self.rank :: self.size])

    def __iter__(self) -> Iterator[Any]:
        items, self._items = self._items, None
        return items if items is not None else itertools.islice(self.inner, self.rank, None, self.size)

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

    def __init__(self, loader: DataLoader[Any], rank: int, size: int, pad: bool, agree: Agree | None) -> None:
        self.loader, self.rank, self.size, self.pad = loader, rank, size, pad
        self.epoch = 0
        self._agree = agree

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        check = _Check(self._agree, self.epoch, type(self.loader.dataset).__name__)
        # The batches of a round are read one after the other, before one of them is handed out.
        batches = map(copied, self.loader) if reuses_memory(self.loader) else iter(self.loader)
        return _every(batches, self.rank, self.size, self.pad, check)

    def __len__(self) -> int:
        return _share(len(self.loader), self.rank, self.size, self.pad)


def shard_loader(loader: DataLoader[Any], context: ParallelContext, training: bool) -> Iterable[Any]:
    """A loader like `loader` that yields this data rank's part; the batch size stays. `loader` itself is left alone.

    Args:
        training: pad the parts, so that no rank runs out before the others.

    Raises:
        InputError: the loader already has a distributed sampler for another rank or number of ranks.
    """
    rank, size = context.dp_rank, context.dp_size
    shards_itself = _is_sharded(loader, rank, size)
    if context.size == 1:
        return loader
    agree = context.agree if training and not shards_itself else None
    rank, size = (0, 1) if shards_itself else (rank, size)
    sharded = without_workers(loader)  # a copy keeps what a subclass of DataLoader adds
    if isinstance(loader.dataset, IterableDataset):
        return StridedBatches(sharded, rank, size, training, agree)

    def put(attribute: str, sampler: Any) -> None:
        object.__setattr__(sharded, attribute, sampler)  # DataLoader forbids it on a finished loader; this is a copy

    batches: Any = loader.batch_sampler
    joins = type(batches) is BatchSampler
    inner = batches.sampler if joins else loader.sampler if batches is None else batches
    sampler = ShardedSampler(inner, rank, size, training, agree)
    sampler.generator, sampler.stays = loader.generator, loader.persistent_workers
    sharded.generator = torch.Generator()  # its workers' seeds, which differ between data ranks: `seed_workers`
    if joins or batches is None:
        put("sampler", sampler)
    if batches is not None:
        put("batch_sampler", BatchSampler(sampler, batches.batch_size, batches.drop_last) if joins else sampler)
    return sharded


def _share(total: int, rank: int, size: int, pad: bool) -> int:
    """How many of `total` items a rank gets."""
    return -(-total // size) if pad else len(range(rank, total, size))


def _every(
    items: Iterator[Any],
    rank: int,
    size: int,
    pad: bool,
    check: _Check,
    randomness: AbstractContextManager[Any] = nullcontext(),  # noqa: B008 - it has no state
) -> Iterator[Any]:
    """The `rank`-th of each `size` items, which are drawn within `randomness`. If `pad`, the last round is filled by
    repeating its first ones."""
    for round_ in itertools.count():
        with randomness:
            turn = list(itertools.islice(items, size))
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


def draw_seed(generator: torch.Generator | None) -> int:
    """As a DataLoader draws the seed of its workers, before its sampler draws anything, also where it has none."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator))


def find_sharded(loader: Any) -> ShardedSampler | None:
    """The sampler of `loader` that gives this data rank's part, if `shard_loader` has put one there."""
    samplers = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    return next((sampler for sampler in samplers if isinstance(sampler, ShardedSampler)), None)


def _parts(loader: Any) -> list[Any]:
    """What decides the order of `loader`: itself and its samplers."""
    parts = [loader]
    for part in parts:  # grows: a loader has samplers, a sharded sampler has one inside
        inner = (getattr(part, name, None) for name in ("loader", "sampler", "batch_sampler", "inner"))
        parts += [each for each in inner if each is not None and not any(each is part for part in parts)]
    return parts


def is_random(loader: Any) -> bool:
    """Whether the order of `loader` may depend on random numbers."""
    samplers = [part for part in _parts(loader) if not isinstance(part, (DataLoader, ShardedSampler))]
    return is_stream(loader) or not all(type(part) in (*_IN_ORDER, BatchSampler) for part in samplers)


def is_stream(loader: Any) -> bool:
    """Whether the order of `loader` is its dataset's own."""
    return isinstance(loader, StridedBatches) or isinstance(getattr(loader, "dataset", None), IterableDataset)


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler of `loader`, and a stream, that wants to know which epoch begins."""
    parts = _parts(loader)
    for part in [*parts, *(part.dataset for part in parts if is_stream(part) and isinstance(part, DataLoader))]:
        if hasattr(part, "set_epoch"):
            part.set_epoch(epoch)


def seed_workers(loader: Any, seed: int) -> None:
    """Begin the random numbers of the workers of a sharded loader."""
    if find_sharded(loader) is not None:
        loader.generator.manual_seed(seed)


def generators(loader: Any) -> list[torch.Generator]:
    """The torch generators that decide the order of `loader`, in the same sequence in every layout."""
    parts = _parts(loader)[0 if find_sharded(loader) is None else 1 :]  # a sharded loader's own seeds its workers only
    found = {id(g): g for g in (getattr(part, "generator", None) for part in parts)}
    return [generator for generator in found.values() if isinstance(generator, torch.Generator)]


def set_generators(loader: Any, states: Iterable[torch.Tensor]) -> None:
    """Give the `generators` of `loader` these states."""
    for generator, state in zip(generators(loader), states, strict=False):
        generator.set_state(state.cpu())


class Share(NamedTuple):
    """What of the order of the data one batch of every data rank is. The order is the same in every layout.

    Attributes:
        items: what the order consists of: "samples", or "batches" of a batch sampler; with the number of ranks where
            the user's sampler shards it.
        step: how many of them all data ranks take together.
    """

    items: str
    step: int

    def same_place(self, other: Share, batches: int, own: bool) -> int | None:
        """How many batches of this share see what `batches` of the `other` have seen; None if none do.

        Args:
            own: whether the other is of the same rank of the same layout.
        """
        if self == other or (own and other.items == "own"):  # as older checkpoints of one process call it
            return batches
        seen = batches * other.step
        is_same = self.items == {"in order": "samples"}.get(other.items, other.items)
        return seen // self.step if is_same and seen % self.step == 0 else None


def share(loader: Any) -> Share:
    """What of its order `loader`, as `shard_loader` gives it, takes at a time."""
    if isinstance(loader, StridedBatches):
        whole = share(loader.loader)
        return Share(whole.items, whole.step * loader.size)
    batches, size = getattr(loader, "batch_sampler", None), getattr(loader, "batch_size", None) or 1
    if is_stream(loader) and workers(loader) > 1:  # which give their batches in turn
        return Share(f"batches of {size} from {workers(loader)} workers", 1)
    sampler = find_sharded(loader)
    items = "samples" if type(batches) in (BatchSampler, type(None)) else "batches"
    copies = max((getattr(part, "num_replicas", None) or 1 for part in _parts(loader)), default=1)
    of = f" of {copies} ranks" if copies > 1 else ""
    return Share(items + of, size * (1 if sampler is None else sampler.size))


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
