"""Worker processes of a dataloader when a run is told to end."""

from __future__ import annotations

from collections.abc import Collection
from signal import Signals

from ..data.sharding import ShardedLoader
from ..launching.signals import ShelteredWorker


def shelter_workers(sharded: ShardedLoader, signals: Collection[Signals]) -> None:
    """Let workers outlive `signals`: torchrun and SLURM send them to a whole group of processes, and a DataLoader that
    has lost a worker raises an error."""
    loader = sharded.loader
    if signals and loader.num_workers:
        loader.worker_init_fn = ShelteredWorker(signals, loader.worker_init_fn)
