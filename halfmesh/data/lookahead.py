"""Whether the next batch is fetched before the current one is handed out, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from .samplers import ShardedSampler
from .transfer import Transfer, workers

_COUNTED = (
    SequentialSampler,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
    range,
    list,
    tuple,
)
"""They give as many items as their length says. A subclass, or a sampler of somebody's own, may give others."""
_END = object()

Batches = Iterator[tuple[Any, bool]]
"""Each batch, on the device, and whether it is the last."""


def looks_ahead(loader: Any, needs_end: bool) -> bool:
    """Whether a batch of `loader` is handed out only when it is known whether another one follows.

    Workers fetch ahead anyway. Without them nothing is gained, and what the loader does next may depend on the training
    before it: then only where training needs to know the end, and no length says it for sure.
    """
    return bool(workers(loader)) or (needs_end and not _is_counted(loader))


def _is_counted(loader: Any) -> bool:
    if isinstance(loader, DataLoader):
        as_in_torch = type(loader).__iter__ is DataLoader.__iter__ and type(loader).__len__ is DataLoader.__len__
        if not as_in_torch or isinstance(loader.dataset, IterableDataset):
            return False
        return _is_counted(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    if type(loader) is BatchSampler:
        return _is_counted(loader.sampler)
    return _is_counted(loader.inner) if isinstance(loader, ShardedSampler) else type(loader) in _COUNTED


def ahead(fetch: Callable[[Any], Any], transfer: Transfer) -> Batches:
    """The next batch is fetched, and on its way to the device, before the current one is given.

    Args:
        fetch: gives the next batch, on its way, or its argument where there is none.
    """
    batch = fetch(_END)
    while batch is not _END:
        try:
            following = fetch(_END)
        except Exception:  # of the next batch: this one is whole
            yield transfer.finish(batch), False
            raise
        yield transfer.finish(batch), following is _END
        batch = following


def in_turn(fetch: Callable[[Any], Any], transfer: Transfer, is_last: Callable[[], bool]) -> Batches:
    """A batch is fetched when it is asked for. `is_last` is asked when it is there."""
    while (batch := fetch(_END)) is not _END:
        ready = transfer.finish(batch)
        del batch  # it goes before the next one comes
        last = is_last()
        yield ready, last
        del ready
