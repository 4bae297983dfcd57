"""Worker processes of a dataloader when a run is told to end."""

from __future__ import annotations

import copy
from collections.abc import Collection
from signal import Signals
from typing import Any

from torch.utils.data import DataLoader

from ..data.samplers import StridedBatches
from ..engine._torch import without_workers
from ..launching.signals import ShelteredWorker


def shelter_workers(loader: Any, signals: Collection[Signals]) -> Any:
    """`loader`, with workers that outlive `signals`: torchrun and SLURM send them to a whole group of processes, and a
    DataLoader that has lost a worker raises an error. What was given is left alone."""
    if isinstance(loader, StridedBatches):
        strided = copy.copy(loader)
        strided.loader = shelter_workers(loader.loader, signals)
        return strided
    if not signals or not isinstance(loader, DataLoader) or not loader.num_workers:
        return loader
    sheltered = without_workers(loader)
    sheltered.worker_init_fn = ShelteredWorker(signals, loader.worker_init_fn)
    return sheltered
