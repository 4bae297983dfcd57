"""Evaluation: the loaders, the mean loss over batches and data ranks, predictions, and tensors of all ranks."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ..data.loader import EngineDataLoader
from ..data.sharding import ShardedLoader, loader_in
from ..engine.engine import Engine
from ..engine.executor import even_out
from ..engine.pipeline_handles import Handle
from ..errors import InputError
from ..parallel.comm import is_simulated
from ..parallel.mesh import ParallelContext
from ..utils.tensors import leaves_of, map_tensors, tensors_of
from .batch import TARGETS, Outcome

CHUNK = 64 * 2**20
"""Bytes that are sent at once."""
_VALUES = (str, int, float, np.generic, np.ndarray)
"""The types of values in an output besides tensors."""


def shard_dataloader(engine: Engine, dataloader: DataLoader[Any]) -> EngineDataLoader:
    """A loader for evaluation, as `initialize` makes from its eval_dataloader: this data rank's samples, each counted
    once (no padding), in batches on the engine's device. All ranks must call it together.

    Raises:
        InputError: not a DataLoader.
    """
    if not isinstance(loader_in(dataloader), DataLoader):
        raise InputError(
            f"{type(dataloader).__name__} is not a DataLoader; wrap it: DataLoader(dataset, batch_size=...)"
        )
    loader = ShardedLoader(dataloader, engine.context, training=False)
    return even_out(EngineDataLoader(loader, engine.context, engine.config.seed), engine)


def choose_train_loader(engine: Engine, train: Any) -> Any:
    """The engine's dataloader, or `train`: batches that the user has sharded.

    Raises:
        InputError: a DataLoader that is not the engine's, from which every rank would get the same batches.
    """
    if train is None:
        return engine.dataloader
    if isinstance(loader_in(train), (DataLoader, Dataset)):
        raise InputError(
            f"fit was given a {type(train).__name__} that is not sharded over the data ranks; pass it to initialize as "
            "the dataloader instead (fit also accepts an iterable of batches that are already on the device)"
        )
    return train


def choose_eval_loader(engine: Engine, dataloader: Any) -> Any:
    """The engine's eval_dataloader, or `dataloader`, sharded; None if there is neither."""
    if dataloader is None:
        return engine.eval_dataloader if engine.has_eval_dataloader else None
    has_samples = isinstance(loader_in(dataloader), (DataLoader, Dataset))
    return shard_dataloader(engine, dataloader) if has_samples else dataloader


class MeanLoss:
    """Mean loss over batches and data ranks. The device is only read in `take`.

    Args:
        by_rows: weight batches by their samples (evaluation), instead of equally (training, as `engine.step` does).
            With `loss_reduction="sum"` the total is then divided by the number of samples.
    """

    def __init__(self, engine: Engine, by_rows: bool = False) -> None:
        self._context, self._reduction, self._by_rows = engine.context, engine.config.loss_reduction, by_rows
        self._reset()

    def _reset(self) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        self._weight: Any = 0.0

    def add(self, outcome: Outcome) -> None:
        """Add the loss of a batch, if this rank has it."""
        loss = outcome.loss
        if isinstance(loss, Handle):
            loss = loss.value()
        if loss is None:
            return
        weight: Any = outcome.rows if self._by_rows else 1
        alpha = 1 if self._reduction == "sum" else weight
        if self._reduction == "weighted":
            (loss, weight), alpha = map(_detached, loss), 1
        self._total.add_(_detached(loss), alpha=alpha)
        self._weight = self._weight + weight

    def take(self) -> float | None:
        """The mean since the last call; None without batches. A collective of all ranks."""
        context = self._context
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
    mine = []
    with evaluating(engine):
        for batch in loader:
            output = _call(engine, batch)
            if context.counts_outputs:
                mine.append(map_tensors(lambda tensor: tensor.detach().cpu(), output))
    everyone = gather_tensors((context.dp_rank, mine) if mine else None, context)
    by_rank = dict(given for given in everyone if given is not None)
    if context.dp_size > 1 and loader.loader.splits_samples:
        by_rank = {rank: [row for output in theirs for row in _rows(output)] for rank, theirs in by_rank.items()}
    turns = itertools.zip_longest(*(by_rank[rank] for rank in sorted(by_rank)))
    return _joined([output for turn in turns for output in turn if output is not None])


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """Evaluation mode without gradients. At the end, each module returns to its former mode."""
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


def _rows(output: Any) -> list[Any]:
    """The output of each sample."""
    sizes = {tensor.shape[0] if tensor.dim() else 0 for tensor in tensors_of(output)}
    if len(sizes) != 1 or 0 in sizes:
        raise InputError(
            "predict joins outputs along the first dim, which must be the batch's where data ranks take turns in "
            f"samples, but the sizes of one output are {sorted(sizes)}; return tensors with one row for each sample "
            "from the model"
        )
    return [map_tensors(lambda tensor, row=row: tensor[row : row + 1], output) for row in range(*sizes)]  # type: ignore[misc]


def _joined(pieces: list[Any]) -> Any:
    """The pieces joined along the first dim, or the list of them if they do not fit."""
    if not pieces:
        raise InputError("the DataLoader gave predict no samples; give it one that is not empty")

    def kind(piece: Any) -> tuple[str, list[torch.Size], bool]:
        tensors = tensors_of(piece)
        has_rows = len({tensor.shape[:1] for tensor in tensors}) == 1 and tensors[0].dim() > 0
        return repr(leaves_of(piece, _VALUES)), [tensor.shape[1:] for tensor in tensors], has_rows

    kinds = [kind(piece) for piece in pieces]
    if not kinds[0][-1] or kinds != kinds[:1] * len(pieces):
        return pieces
    joined = iter([torch.cat(parts) for parts in zip(*map(tensors_of, pieces), strict=True)])
    return map_tensors(lambda tensor: next(joined), pieces[0])


def gather_tensors(value: Any, context: ParallelContext) -> list[Any]:
    """The `value` of each rank, by rank, on all of them: nested tensors on the CPU, of any shapes.

    One rank sends at a time, in chunks: so a device holds one of these, and not what all ranks have.
    """
    if context.size == 1 or is_simulated():
        return context.everyone(value)
    # Copies: pickle would include all of the memory that a view refers to.
    copied = map_tensors(lambda tensor: tensor.detach().clone(), value)
    own = torch.frombuffer(bytearray(pickle.dumps(copied)), dtype=torch.uint8)
    found = []
    for rank, size in enumerate(context.everyone(len(own))):
        content = own if rank == context.rank else torch.empty(size, dtype=torch.uint8)
        for chunk in content.split(CHUNK):
            sent = chunk.to(context.device)
            dist.broadcast(sent, rank)
            chunk.copy_(sent)
        received: Any = content.numpy()  # a buffer, which numpy's types do not say
        found.append(pickle.loads(received))
    return found
