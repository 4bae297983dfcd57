"""What a user's loader is: around which DataLoader it stands, and whether its data is a data rank's own already."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ..errors import InputError


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
    raise InputError(
        f"the dataloader's {type(holder).__name__} has {name}={theirs[0]}, rank={theirs[1]}, but this is data rank "
        f"{rank} of {size}; give it these (launch.dp_rank, launch.dp_size), or all of the data: initialize shards it"
    )


def shards_itself(loader: DataLoader[Any], rank: int, size: int) -> bool:
    """Return True if the user's sampler already gives this data rank its shard."""
    batches = loader.batch_sampler
    for sampler in (loader.sampler, batches, getattr(batches, "sampler", None)):
        theirs = getattr(sampler, "num_replicas", None), getattr(sampler, "rank", None)
        if None not in theirs:
            return _is_ours(sampler, "num_replicas", theirs, rank, size)
    return False
