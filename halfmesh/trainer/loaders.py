"""The batches that a trainer uses, sharded over the data ranks."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader, Dataset

from ..data.loader import EngineDataLoader
from ..data.sharding import ShardedLoader
from ..engine.engine import Engine
from ..engine.inputs import refuse_uneven_evaluation
from ..engine.parallel_plans import data_strategy
from ..errors import InputError


def shard_dataloader(engine: Engine, dataloader: DataLoader[Any]) -> EngineDataLoader:
    """A loader for evaluation, as `initialize` makes from its eval_dataloader: this data rank's samples, each counted
    once (no padding), in batches on the engine's device. All ranks call it together.

    Raises:
        InputError: not a DataLoader; or data ranks would have different numbers of batches under fsdp.
    """
    if not isinstance(dataloader, DataLoader):
        raise InputError(
            f"expected a DataLoader, but a {type(dataloader).__name__} was given; wrap it: "
            "DataLoader(dataset, batch_size=...)"
        )
    context = engine.context
    loader = ShardedLoader(dataloader, context, training=False)
    if data_strategy(engine.config, context.dp_size).shards_model:
        refuse_uneven_evaluation(loader, context)
    return EngineDataLoader(loader, context, engine.config.seed)


def choose_train_loader(engine: Engine, train: Any) -> Any:
    """The engine's dataloader, or `train`: batches that the user has sharded.

    Raises:
        InputError: a DataLoader that is not the engine's, from which every rank would get the same batches.
    """
    if train is None or (engine.has_dataloader and train is engine.dataloader):
        return engine.dataloader
    if isinstance(train, (DataLoader, Dataset)):
        raise InputError(
            f"fit was given a {type(train).__name__} that is not sharded over the data ranks; pass it to initialize as "
            "the dataloader instead (fit also takes an iterable of your own batches, already on the device)"
        )
    return train


def choose_eval_loader(engine: Engine, dataloader: Any) -> Any:
    """The engine's eval_dataloader, or `dataloader`, sharded; None if there is neither."""
    if dataloader is None:
        return engine.eval_dataloader if engine.has_eval_dataloader else None
    if isinstance(dataloader, DataLoader):
        return shard_dataloader(engine, dataloader)
    if isinstance(dataloader, Dataset):
        raise InputError(
            f"{type(dataloader).__name__} is no loader; wrap it: halfmesh.get_dataloader(dataset, batch_size=...)"
        )
    return dataloader
