"""Evaluation: the loaders, the mean loss over batches and data ranks, and predictions."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from ..config.composition import Setup
from ..data.loader import EngineDataLoader
from ..data.sharding import ShardedLoader
from ..engine.engine import Engine
from ..engine.inputs import refuse_uneven_evaluation
from ..engine.pipeline_handles import Handle
from ..errors import InputError, cut
from ..utils.tensors import count_rows, leaves_of, map_tensors, tensors_of
from .batch import TARGETS, Outcome


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
    if Setup.of(engine.config, context.size).strategy.shards_model:
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


class MeanLoss:
    """Mean loss over batches and data ranks. The device is only read in `take`.

    Args:
        by_rows: weight batches by their samples (evaluation), instead of equally (training, as `engine.step` does).
            With `loss_reduction="sum"` the total is then divided by the number of samples.
    """

    def __init__(self, engine: Engine, by_rows: bool = False) -> None:
        self._engine = engine
        self._by_rows = by_rows
        self._weighted = engine.config.loss_reduction == "weighted"
        self._is_sum = engine.config.loss_reduction == "sum"
        self._reset()

    def _reset(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._engine.context.device)
        self._weight: Any = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add the loss of a batch, if this rank has it."""
        loss = outcome.loss
        if isinstance(loss, Handle):
            loss = loss.value()
        if loss is None:
            return
        if self._weighted:
            loss, weight = loss
            self._weight = self._weight + _detached(weight)
            self._total.add_(_detached(loss))
            return
        weight = outcome.rows if self._by_rows else 1
        self._total.add_(_detached(loss), alpha=1 if self._is_sum else weight)
        self._weight += weight

    def take(self) -> float | None:
        """The mean since the last call; None without batches. A collective of all ranks."""
        context = self._engine.context
        sums = torch.stack([self._total, torch.as_tensor(self._weight).to(self._total)])
        if not context.counts_outputs:  # other ranks count the same batches
            sums.zero_()
        context.all_reduce(sums)
        self._reset()
        total, weight = sums.tolist()
        return total / weight if weight else None


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def predict(engine: Engine, dataloader: Any) -> Any:
    """Outputs for all samples of a DataLoader, in its order, on the CPU and on every rank."""
    loader, context = shard_dataloader(engine, dataloader), engine.context
    splits = context.dp_size > 1 and loader.loader.splits_samples
    batches = iter(loader)
    with evaluating(engine):
        mine = _outputs(engine, itertools.islice(batches, 1))
        if splits:  # at the first batch, also on a rank that has none
            _refuse_unsplittable(itertools.chain(*context.everyone([_look(output) for output in mine])))
        mine += _outputs(engine, batches)
    everyone = context.everyone((context.dp_rank, mine) if mine else None)
    by_rank = dict(given for given in everyone if given is not None)
    ranks = [by_rank.get(rank, []) for rank in range(context.dp_size)]
    if splits:
        _refuse_unsplittable(_look(output) for theirs in ranks for output in theirs)
        ranks = [[row for output in theirs for row in _rows(output)] for theirs in ranks]
    turns = range(max(map(len, ranks)))
    return _joined([theirs[turn] for turn in turns for theirs in ranks if turn < len(theirs)])


def _outputs(engine: Engine, batches: Iterator[Any]) -> list[Any]:
    """This rank's outputs on the CPU, if it counts outputs."""
    outputs = []
    for batch in batches:
        output = _call(engine, batch)
        if engine.context.counts_outputs:
            outputs.append(map_tensors(lambda tensor: tensor.detach().cpu(), output))
    return outputs


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Evaluation mode without gradients. Afterwards each module is in its former mode again."""
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _call(engine: Engine, batch: Any) -> Any:
    """The output for a batch, whose target is left out."""
    if isinstance(batch, Mapping):
        return engine(**{name: value for name, value in batch.items() if name not in TARGETS})
    if isinstance(batch, (tuple, list)):
        return engine(*(batch[:-1] if len(batch) > 1 else batch))
    return engine(batch)


def _look(output: Any) -> tuple[list[int], str]:
    """The first dim of each tensor (0: it has none), and the values that are no tensors."""
    values = leaves_of(output, (str, int, float, np.generic, np.ndarray))
    return [tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(output)], repr(values)


def _is_odd(sizes: list[int]) -> bool:
    """Return True if the output does not have one row for each sample."""
    return len(set(sizes)) != 1 or not sizes[0]


def _refuse_unsplittable(looks: Iterable[tuple[list[int], str]]) -> None:
    looks = list(looks)
    odd = next((sizes for sizes, _ in looks if _is_odd(sizes)), None)
    new = next((values for _, values in looks if values != looks[0][1]), None)
    if odd is not None or new is not None:
        raise InputError(
            "predict joins outputs along the first dim, which has to be the batch's where data ranks take turns in "
            f"samples, but {f'they hold values that change: {cut(new)}' if new else f'their sizes are {odd}'}; let the "
            "model return tensors of one row for each sample"
        )


def _rows(output: Any) -> list[Any]:
    count = count_rows(tensors_of(output))
    return [map_tensors(lambda tensor, row=row: tensor[row : row + 1], output) for row in range(count)]  # type: ignore[misc]


def _joined(pieces: list[Any]) -> Any:
    """The pieces joined along the first dim, or the list of them if their shapes do not fit."""
    if not pieces:
        raise InputError("predict was given no sample; give it a DataLoader that is not empty")
    kinds = {(_look(piece)[1], *(tensor.shape[1:] for tensor in tensors_of(piece))) for piece in pieces}
    if len(kinds) > 1 or any(_is_odd(_look(piece)[0]) for piece in pieces):
        return pieces
    joined = iter([torch.cat(parts) for parts in zip(*map(tensors_of, pieces), strict=True)])
    return map_tensors(lambda tensor: next(joined), pieces[0])
