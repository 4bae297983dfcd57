"""Reads a launcher's environment (torchrun, SLURM, Open MPI) and sets device, seeds and process group."""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ..config.composition import Setup, batch_size
from ..config.config import Config
from ..config.load import find_unchecked, load_config
from ..data.sharding import ShardedLoader, loader_in
from ..distributed.env import OPENMPI, SLURM, ProcessEnv, RankNames, coordinates_of, find_process
from ..distributed.failures import recorded_for_torchrun
from ..distributed.process_group import ALONE, OwnedGroup, make_group, wait_for_threads_at_exit
from ..errors import InputError
from ..parallel.mesh import ParallelContext
from ..parallel.registries import DATA_STRATEGIES
from ..utils.log import get_logger

GLOO_NCCL = "cpu:gloo,cuda:nccl"  # the backend of groups that also send from the host
# The group that the engines of this process share, if one of them made it: torch too has one for each process.
_shared: list[OwnedGroup] = []
_launched: list[Launch] = []  # the last launch of this process, until it is closed


@dataclass(frozen=True)
class Launch:
    """The result of a launch function; `initialize` takes it as its config.

    Attributes:
        config: the config, as loaded.
        device: the device that this process trains on.
        rank: the rank of this process, from 0.
        world_size: the number of processes.
        local_rank: the rank of this process on its machine, from 0.
        group: the process group that was created; None if none was.
    """

    config: Config
    device: torch.device
    rank: int
    world_size: int
    local_rank: int
    group: OwnedGroup | None = None

    @property
    def dp_size(self) -> int:
        """The number of data ranks: processes, or groups of them, that see different data."""
        return self.config.parallel.dims(self.world_size).dp

    @property
    def dp_rank(self) -> int:
        """The data rank of this process, from 0. All ranks that compute the same samples have the same."""
        return coordinates_of(self.rank, self.config.parallel.dims(self.world_size).sizes)["dp"]

    def updates_per_epoch(self, dataloader: DataLoader[Any], *, sharded: bool = False) -> int:
        """The number of optimizer updates in an epoch of a training DataLoader, with batches divided over the data
        ranks and accumulated as `initialize` does. The last update may have fewer batches.

        Args:
            sharded: as in `initialize`.

        Raises:
            InputError: not a DataLoader, or one without a length.
        """
        return count_updates(dataloader, Setup.of(self.config, self.world_size), self.device, sharded)

    def close(self) -> None:
        """Destroy the process group if this launch created it, and restore the exception hook."""
        _launched[:] = [launch for launch in _launched if launch is not self]
        if self.group is not None:
            self.group.close()

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        # With an error in flight the watch has to stay, to report it; and destroying a broken group may block.
        if kind is None:
            self.close()


def launch(
    config: Any,
    rank: int,
    world_size: int,
    host: str,
    port: int,
    *,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    verbose: bool = True,
) -> Launch:
    """Join `world_size` processes at `host:port`, where rank 0 listens.

    Args:
        config: a path, dict or Config, as for `initialize`.
        backend: defaults to "nccl" for CUDA and "gloo" for the CPU.
        local_rank: index of this process on its machine; defaults to `rank` modulo the number of GPUs.
        seed: seeds Python, NumPy and torch identically on all ranks; defaults to `config.seed`.
        device: defaults to cuda:local_rank if there is CUDA, else to the CPU.

    Raises:
        LaunchError: the numbers do not fit together, the device or backend does not exist, or no group forms within
            `config.timeout`.
    """
    if local_rank is None:
        local_rank = rank % max(1, torch.cuda.device_count() or world_size)
    ProcessEnv(rank, world_size, local_rank)  # rejects impossible numbers
    address = (host, port) if host else None  # None: in torchrun's variables
    with recorded_for_torchrun():
        loaded = read_config(config)
        loaded = loaded if seed is None else loaded.replace(seed=seed)
        chosen = choose_device(device, local_rank)
        names = loaded.parallel.dims(world_size).rank_names
        group = make_group(rank, names, address, chosen, loaded.timeout, backend or choose_backend(loaded, chosen))
    random.seed(loaded.seed)
    np.random.seed(loaded.seed)
    torch.manual_seed(loaded.seed)
    if verbose:
        how = dist.get_backend() if dist.is_initialized() else "no process group"
        get_logger().info("world size %d (%s), device %s, seed %d", world_size, how, chosen, loaded.seed)
    _launched[:] = [Launch(loaded, chosen, rank, world_size, local_rank, group)]
    return _launched[0]


def launch_from_torch(
    config: Any,
    *,
    backend: str | None = None,
    seed: int | None = None,
    device: torch.device | str | None = None,
    verbose: bool = True,
) -> Launch:
    """Launch under torchrun, or as a single process if torchrun's variables are missing (`python train.py`).

    Arguments and errors as in `launch`.
    """
    return _launch_as(find_process(), config, "", 0, backend=backend, seed=seed, device=device, verbose=verbose)


def launch_from_slurm(config: Any, host: str, port: int, **options: Any) -> Launch:
    """Launch under srun; `host` and `port` are those of rank 0. `options` and errors as in `launch`."""
    return _launch_as(SLURM.read(), config, host, port, **options)


def launch_from_openmpi(config: Any, host: str, port: int, **options: Any) -> Launch:
    """Launch under Open MPI's mpirun; `host` and `port` are those of rank 0. `options` and errors as in `launch`."""
    return _launch_as(OPENMPI.read(), config, host, port, **options)


def _launch_as(process: ProcessEnv, config: Any, host: str, port: int, **options: Any) -> Launch:
    return launch(config, process.rank, process.world_size, host, port, local_rank=process.local_rank, **options)


def ensure_process_group(config: Config, device: torch.device, names: RankNames, alone: bool) -> OwnedGroup | None:
    """The process group that torchrun's variables ask for: created here, or by an earlier call. The caller has to
    `join` and to `close` it.

    None if there was nothing to create: a world of 1, or there is the group of a launch or of the user.

    Args:
        names: of the ranks, in messages about those that failed.
        alone: create one for a world of 1, too.
    """
    if dist.is_initialized():
        wait_for_threads_at_exit()
        return next((group for group in _shared if group.is_there), None)
    process = find_process()
    address = ALONE if alone and process.world_size == 1 else None
    group = make_group(process.rank, names, address, device, config.timeout, choose_backend(config, device))
    _shared[:] = [] if group is None else [group]
    return group


def choose_backend(config: Config, device: torch.device) -> str | None:
    """The backend that the config needs, or None for the usual one of `device`."""
    # Gradients and norms of shards in host memory are reduced there.
    data = config.parallel.data
    on_host = DATA_STRATEGIES.get(data.strategy).steps_on_host(data)
    return GLOO_NCCL if on_host and device.type == "cuda" else None


def reject_forgotten() -> None:
    """Raise InputError if this process has launched with a config that `initialize` is not given: it would train in
    fp32, with data parallelism alone."""
    if any(launch.config != Config() for launch in _launched):
        raise InputError(
            "initialize got no config, and would ignore that of the launch; pass config=launch, or {} for plain fp32"
        )


def read_config(source: Any) -> Config:
    """The config of `source`. Warns if `halfmesh run` has checked another one."""
    config = load_config(source)
    if warning := find_unchecked(config, source):
        get_logger().warning("%s", warning)
    return config


def expected_world_size() -> int:
    """The size of the process group, or of the one that torchrun's variables ask for; 1 without either.

    Raises:
        LaunchError: the variables contradict each other.
    """
    return dist.get_world_size() if dist.is_initialized() else find_process().world_size


def choose_device(device: torch.device | str | None = None, local_rank: int | None = None) -> torch.device:
    """`device`, or cuda:local_rank where there is CUDA, else the CPU; becomes the current CUDA device.

    If a process sees one GPU only (`srun --gpus-per-task=1`), that one, for any local rank.
    `local_rank` is torchrun's LOCAL_RANK unless given; without it, the rank in an existing process group modulo the
    GPUs, or 0.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = torch.device(("cuda" if gpus else "cpu") if device is None else device)
    if chosen.type != "cuda":
        return chosen
    index = chosen.index
    if index is None:
        rank = dist.get_rank() if dist.is_initialized() else 0  # of a group that no torchrun has started
        index = int(os.environ.get("LOCAL_RANK", rank % max(1, gpus))) if local_rank is None else local_rank
        index = 0 if gpus == 1 else index
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def count_updates(dataloader: Any, setup: Setup, device: torch.device, sharded: bool) -> int:
    """See `Launch.updates_per_epoch`. It needs no process group."""
    context = ParallelContext(setup.dims, device)
    if not dist.is_initialized():
        context.rank = find_process().rank
    loader = loader_in(dataloader)
    is_torchs = isinstance(loader, DataLoader)
    batches = ShardedLoader(dataloader, context, training=True, sharded=sharded).length if is_torchs else None
    if batches is None:
        kind = type(loader.dataset if is_torchs else dataloader).__name__
        raise InputError(
            f"the number of updates per epoch is unknown: {kind} is no torch DataLoader, or a dataset without a length "
            "(or with such a sampler); pass the DataLoader that you give initialize, or count in updates (max_steps)"
        )
    return -(-batches // setup.accumulate(batch_size(dataloader)).config.gradient_accumulation)


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with the options that the launch functions need (`--config`, `--set`, `--host`, `--port`,
    `--world-size`, `--rank`, `--local-rank`, `--backend`); you can add options.

    `--set` is for `load_config(args.config, args.overrides)`, whose result the launch functions take as config."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="the config file (.py, .yaml or .json)")
    what = "set a key of the config, such as parallel.tensor=2 or fp16.mode=naive; repeatable"
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="KEY=VALUE", help=what)
    parser.add_argument("--host", help="the address of rank 0 (not needed under torchrun)")
    parser.add_argument("--backend", help="the communication backend (default: nccl for CUDA, gloo for the CPU)")
    for name, what in {
        "port": "the port of rank 0 (not needed under torchrun)",
        "world_size": "the number of processes on all machines",
        "rank": "the rank of this process, from 0",
        "local_rank": "the rank of this process on its machine, from 0",
    }.items():
        parser.add_argument(*sorted({f"--{name}", f"--{name.replace('_', '-')}"}), dest=name, type=int, help=what)
    return parser
