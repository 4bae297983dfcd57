"""Shards the user's loader: each data rank reads its shard of the order that the loader draws in one process."""

from __future__ import annotations

import copy
import hashlib
import itertools
from collections.abc import Iterator, Sized
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset
from torch.utils.data import sampler as samplers

from ..errors import InputError
from ..parallel.comm import same_on_ranks
from ..parallel.mesh import ParallelContext
from ..parallel.rng import SharedRNG
from ..utils.tensors import add_tensor, tensors_of

_IN_ORDER = (samplers.SequentialSampler, range, list, tuple)
_RANDOM = (samplers.RandomSampler, samplers.SubsetRandomSampler, samplers.WeightedRandomSampler)
_COUNTED = (*_IN_ORDER, *_RANDOM, DistributedSampler)
"""Samplers that yield exactly as many items as their length. A subclass, or a user's sampler, may differ."""


_DRAWN = 1024
"""Items of a sampler that are drawn at a time, or one batch of all ranks."""


class DataOrder(NamedTuple):
    """The units in which the order of the data is counted. The order is the same in every layout; batches are not.

    Attributes:
        unit: "samples", or "batches" of a batch sampler; with the number of ranks if the user's sampler shards it.
        step: the units that one batch takes on all data ranks together.
    """

    unit: str
    step: int

    def convert(self, other: DataOrder, batches: int) -> int | None:
        """The number of batches here with as many units as `batches` of the `other`; None if that is not an integer."""
        seen = batches * other.step
        return seen // self.step if self.unit == other.unit and seen % self.step == 0 else None


class ShardedLoader:
    """This data rank's shard of a DataLoader; the batch size stays, and `given` itself is not changed.

    With torch's BatchSampler, data ranks take turns in samples, so that one batch of each rank together make one batch
    of the unsharded order. With another batch sampler, or an IterableDataset, all of which each rank reads, they take
    turns in batches.

    Args:
        training: pad by repeating samples, so that all ranks have the same number of batches (a rank that runs out
            would hang the others), and compare the data that the ranks begin an epoch with. False: no sample is
            repeated.
        sharded: True if the loader already reads only this data rank's data. A distributed sampler, or a dataset with
            the attribute `sharded` or with `rank` and `world_size`, also shows that.

    Attributes:
        given: the user's loader. For timm's PrefetchLoader, the loader in it.
        own_data: True if its dataset shards itself.
        loader: the copy of it that is iterated.
        is_stream: True if it reads an IterableDataset.
        splits_samples: True if data ranks take turns in samples, False if in batches.
        missing: at the end of an epoch without padding, the number of batches that other data ranks had more.
        some_have_none: True if in such an epoch, of a sampler with a length, only some data ranks have a batch.

    Raises:
        InputError: the loader's sampler or dataset is sharded for another rank or number of ranks.
    """

    def __init__(self, given: Any, context: ParallelContext, training: bool, sharded: bool = False) -> None:
        self._prefetcher = None if (inner := loader_in(given)) is given else copy.copy(given)
        self.given = given = inner
        self.training = training
        self.missing, self.some_have_none = 0, False
        self.is_stream = isinstance(given.dataset, IterableDataset)
        self._several = context.size > 1
        self.own_data = sharded or (self._several and is_part(given.dataset, context.dp_rank, context.dp_size))
        is_shard = self.own_data or shards_itself(given, context.dp_rank, context.dp_size)
        self._rank, self._size = (0, 1) if is_shard else (context.dp_rank, context.dp_size)
        self._order_of = f" of {context.dp_size} ranks" if is_shard and context.dp_size > 1 else ""
        self._is_compared = training and self._several and not is_shard
        batches: Any = given.batch_sampler
        self.splits_samples = type(batches) is BatchSampler and not self.is_stream
        self._index_sampler: Any = given.sampler if batches is None else batches
        self._sampler: Any = batches.sampler if type(batches) is BatchSampler else self._index_sampler
        self._samplers: tuple[Any, ...] = self._sampler, getattr(self._sampler, "sampler", None)  # of a batch sampler
        self.loader, self._indices = copy_loader(given), _Indices()
        if context.device.type == "cuda" and given.num_workers:
            self.loader.pin_memory = True  # by a thread of the loader's; without workers `ToDevice` does it
        if self._several and not self.is_stream:
            self._indices.replace(self.loader)
        self._is_shard, self._shorter_by = is_shard, 0

    def compare_lengths(self, context: ParallelContext) -> None:
        """Compare the lengths of loaders that shard themselves. All ranks together.

        Raises:
            InputError: they differ, in training.
        """
        if not (self._is_shard and self._several):
            return
        lengths = context.everyone(self.length)
        if None in lengths or min(lengths) == max(lengths):
            return
        if self.training:
            raise InputError(
                f"the dataloader shards itself, but has {max(lengths)} batches on some ranks and {min(lengths)} on "
                "others, so training would hang; give each data rank the same number"
            )
        self._shorter_by = max(lengths) - lengths[context.rank]

    def prepared(self, batch: Any) -> Any:
        """`batch`, as timm's PrefetchLoader gives it: on its device, normalised, with random erasing."""
        if self._prefetcher is None:
            return batch
        self._prefetcher.loader = [batch]
        return next(iter(self._prefetcher))

    @property
    def is_random(self) -> bool:
        """True if an order that ranks have in common may depend on random numbers."""
        return not self.own_data and (self.is_stream or type(self._sampler) not in _IN_ORDER)

    @property
    def is_counted(self) -> bool:
        """True if its length is exact."""
        return type(self.given) is DataLoader and not self.is_stream and type(self._sampler) in _COUNTED

    @property
    def order(self) -> DataOrder:
        """The unit in which the order is counted, and the units of one batch."""
        size, workers = self.given.batch_size or 1, self.given.num_workers
        if self.is_stream and workers > 1:  # they take turns, so batches depend on their number
            return DataOrder(f"batches of {size} from {workers} workers", self._size)
        samples = type(self.given.batch_sampler) in (BatchSampler, type(None))
        return DataOrder(("samples" if samples else "batches") + self._order_of, size * self._size)

    @property
    def length(self) -> int | None:
        """The number of batches of an epoch on this rank; None if it is not known."""
        try:
            return len(self)
        except (TypeError, NotImplementedError):
            return None

    def __len__(self) -> int:
        if self.is_stream or not self._several:
            return self._share(len(self.loader))
        return self._batches_of(self._share(len(self._sampler)))

    def _batches_of(self, items: int) -> int:
        """The number of batches that this number of items of the sampler makes."""
        batches: Any = self.given.batch_sampler
        return len(BatchSampler(range(items), batches.batch_size, batches.drop_last)) if self.splits_samples else items

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` on the sampler and the dataset that have it."""
        holders: tuple[Any, ...] = self.loader, self.given.dataset, *self._samplers
        for holder in holders:
            if hasattr(holder, "set_epoch"):
                holder.set_epoch(epoch)

    def generators(self) -> list[torch.Generator]:
        """The torch generators that decide the order, in the same sequence in every layout."""
        found = {id(g): g for g in (getattr(holder, "generator", None) for holder in (self.given, *self._samplers))}
        return [generator for generator in found.values() if isinstance(generator, torch.Generator)]

    def batches(self, order: SharedRNG, epoch: int, worker_seed: int, skip: int = 0) -> Iterator[Any]:
        """The batches of an epoch without the first `skip`, which a map-style dataset does not read.

        In one process without `skip`, torch draws everything as in a plain loop. Otherwise the order is drawn here,
        within `order`: some batches at a time if the sampler has a length.

        Args:
            worker_seed: of the workers, if the order is drawn here.

        Raises:
            InputError: the ranks draw different data. All ranks together in training.
        """
        given, self.missing, self.some_have_none = self.given, self._shorter_by, False
        if self.is_stream or not (self._several or (skip and not is_stateful(self.loader))):
            with order:
                batches: Iterator[Any] = iter(self.loader)
                batches = self._turns(batches, epoch) if self._several else batches
                for _ in range(skip):
                    next(batches, None)
            return batches
        loader = self.loader if self._several else copy_loader(self.loader)
        source: Any = self._sampler if self.splits_samples else self._index_sampler
        with order:
            # A BatchSampler calls iter(sampler) at the first batch, after the loader has drawn its workers' seed.
            items = itertools.chain(source) if self.splits_samples else iter(source)
            if loader._iterator is None:  # else persistent workers have their seed
                torch.empty((), dtype=torch.int64).random_(generator=given.generator)
            items = self._share_of(items, epoch, order)
        if self.splits_samples:
            batches_of: Any = given.batch_sampler
            items = iter(BatchSampler(items, batches_of.batch_size, batches_of.drop_last))
        for _ in range(skip):
            next(items, None)
        self._indices.replace(loader)
        self._indices.begin(items, self.length)
        loader.generator = torch.Generator().manual_seed(worker_seed)
        return self._indices.check(loader)

    def _share_of(self, items: Iterator[Any], epoch: int, scope: AbstractContextManager[Any]) -> Iterator[Any]:
        """This rank's item of each round of `size` of a sampler. The items of the first batches are drawn now, all
        others later, within `scope`: a sampler may have no end, even if it has a length."""
        count = self._size * (self.given.batch_size or 1)
        count *= max(1, _DRAWN // count) if isinstance(self._sampler, Sized) else 1
        drawn = list(itertools.islice(items, count))
        self._reject_other_data(hashlib.sha256(repr(drawn).encode()), epoch, self._sampler)
        if not self.training:
            fewest, most = (self._batches_of(n // self._size) for n in (len(drawn), len(drawn) + self._size - 1))
            self.some_have_none = fewest == 0 < most

        def shares(drawn: list[Any]) -> Iterator[Any]:
            first, total = drawn[: self._size], 0
            while drawn:
                total += len(drawn)
                self._count_missing(total)
                if self.training:
                    drawn += itertools.islice(itertools.cycle(first), -len(drawn) % self._size)
                yield from drawn[self._rank :: self._size]
                with scope:
                    drawn = list(itertools.islice(items, count))

        return shares(drawn)

    def _turns(self, items: Iterator[Any], epoch: int) -> Iterator[Any]:
        """This rank's batch of each round of `size` batches of a stream.

        In training a rank without a batch in the last round repeats the one before it. A batch is yielded before the
        next one is read, which may be in the same memory.
        """
        first = list(itertools.islice(items, 1))
        found = hashlib.sha256()
        for tensor in tensors_of(first):
            add_tensor(found, tensor)
        self._reject_other_data(found, epoch, self.given.dataset)
        items, rest = itertools.chain(first, items), 0
        del first
        for total in itertools.count(self._rank, self._size):
            turn = list(itertools.islice(items, rest, rest + self._rank + 1))
            rest = self._size - self._rank - 1  # of this round, to be read before the next
            has_item = len(turn) > self._rank
            if has_item or (turn and self.training):
                yield turn.pop()
            if not has_item:
                self._count_missing(total - self._rank + len(turn))
                return

    def _count_missing(self, total: int) -> None:
        """Set `missing`, of `total` items on all data ranks."""
        if not self.training:
            of_first, mine = -(-total // self._size), len(range(self._rank, total, self._size))
            self.missing = self._shorter_by + self._batches_of(of_first) - self._batches_of(mine)

    def _share(self, total: int) -> int:
        """The number of `total` items that this rank gets."""
        return -(-total // self._size) if self.training else len(range(self._rank, total, self._size))

    def _reject_other_data(self, data: Any, epoch: int, source: Any) -> None:
        """Raise InputError, on all ranks, if some have other `data`, a digest of hashlib."""
        if self._is_compared:
            what = (
                f"the {type(source).__name__} gives different data on each rank, or was iterated on only some ranks "
                "({ranks}). Seed it the same on all ranks; if it shards itself, pass sharded=True to initialize"
            )
            same_on_ranks(f"epoch {epoch}: {data.hexdigest()}", what=what)


class _Indices:
    """Replaces the loader's index sampler; its items are set for each epoch."""

    _count: int | None = None

    def begin(self, items: Iterator[Any], count: int | None) -> None:
        self._items, self._count = items, count
        self._was_asked = self._has_ended = False

    def __len__(self) -> int:
        return self._count  # type: ignore[return-value]  # or raises TypeError, as without a length

    def __iter__(self) -> Iterator[Any]:
        if self._has_ended:
            raise InputError("the dataloader's __iter__ reads its samples twice in one epoch; remove the loop in it")
        self._was_asked, items = True, self._items
        yield from items
        if items is self._items:
            self._has_ended = True

    def check(self, loader: DataLoader[Any]) -> Iterator[Any]:
        """The batches of `loader`. Raises InputError, on all ranks, if it never reads its sampler."""
        batches = iter(loader)
        if type(loader).__iter__ is DataLoader.__iter__:
            return batches
        first = list(itertools.islice(batches, 1))
        if first and not self._was_asked:
            raise InputError(
                f"{type(loader).__name__} overrides __iter__ without using its sampler, so every rank would read all "
                "data; iterate super().__iter__() in it"
            )
        return itertools.chain(first, batches)

    def replace(self, loader: DataLoader[Any]) -> None:
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        object.__setattr__(loader, name, self)  # DataLoader forbids it on a finished loader; this is a copy


# -- a user's loader ---------------------------------------------------------------------------------------------------


def copy_loader(loader: DataLoader[Any]) -> DataLoader[Any]:
    """A shallow copy that starts separate workers, if `loader` keeps some (persistent_workers)."""
    clone = copy.copy(loader)  # keeps attributes of a subclass of DataLoader
    clone._iterator = None
    return clone


def is_stateful(loader: Any) -> bool:
    """Return True if `loader` can save its position, as torchdata's StatefulDataLoader does."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def loader_in(loader: Any) -> Any:
    """The DataLoader in timm's PrefetchLoader; any other loader itself."""
    names = [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(loader).__mro__]
    return loader.loader if ("timm", "PrefetchLoader") in names else loader


def is_part(dataset: Any, rank: int, size: int) -> bool:
    """Return True if `dataset` is this data rank's part of the data: it says so, or is a stream for one rank of several
    (as of Hugging Face's split_dataset_by_node)."""
    if getattr(dataset, "sharded", False) is True:
        return True
    if not isinstance(dataset, IterableDataset):
        return False
    holder = getattr(dataset, "_distributed", None) or dataset
    theirs = getattr(holder, "world_size", None), getattr(holder, "rank", None)
    return all(isinstance(each, int) for each in theirs) and _is_ours(dataset, "world_size", theirs, rank, size)


def _is_ours(holder: Any, name: str, theirs: tuple[Any, Any], rank: int, size: int) -> bool:
    """Return True. Raises InputError if `holder` is sharded for another rank, or number of ranks called `name`."""
    if theirs == (size, rank):
        return True
    problem = f"the dataloader's {type(holder).__name__} has {name}={theirs[0]}, rank={theirs[1]}"
    fix = "give it these numbers (launch.dp_rank, launch.dp_size), or all the data: initialize shards it"
    raise InputError(f"{problem}, but this is data rank {rank} of {size}; {fix}")


def shards_itself(loader: DataLoader[Any], rank: int, size: int) -> bool:
    """Return True if the user's sampler already gives this data rank its shard."""
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        theirs = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if None not in theirs:
            return _is_ours(sampler, "num_replicas", theirs, rank, size)
    return False
