"""Reads a launcher's environment (torchrun, SLURM, Open MPI) and sets device, seeds and process group."""

from __future__ import annotations

import argparse
import os
import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ..config.composition import Setup, batch_size
from ..config.config import Config
from ..config.load import find_unchecked, load_config
from ..data.sharding import ShardedLoader, loader_in
from ..distributed.env import OPENMPI, SLURM, TORCHRUN, ProcessEnv, RankNames, coordinates_of, find_process
from ..distributed.failures import recorded_for_torchrun
from ..distributed.process_group import Address, OwnedGroup, make_group, wait_for_threads_at_exit
from ..errors import InputError, LaunchError, counted
from ..parallel.mesh import ParallelContext
from ..parallel.registries import DATA_STRATEGIES
from ..utils.log import get_logger

GLOO_NCCL = "cpu:gloo,cuda:nccl"
"""The backend of groups that also send from the host."""
_shared: list[OwnedGroup] = []
"""The group that the engines of this process share, if one of them made it: torch too has one for each process."""
_launched: list[Launch] = []
"""The last launch of this process, until it is closed."""


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
    return _launch(
        config, ProcessEnv(rank, world_size, local_rank), Address(host, port), backend, seed, device, verbose
    )


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
    return _launch(config, find_process(), None, backend, seed, device, verbose)


def launch_from_slurm(config: Any, host: str, port: int, **options: Any) -> Launch:
    """Launch under srun; `host` and `port` are those of rank 0. `options` and errors as in `launch`."""
    process = SLURM.read()
    return launch(config, process.rank, process.world_size, host, port, local_rank=process.local_rank, **options)


def launch_from_openmpi(config: Any, host: str, port: int, **options: Any) -> Launch:
    """Launch under Open MPI's mpirun; `host` and `port` are those of rank 0. `options` and errors as in `launch`."""
    process = OPENMPI.read()
    return launch(config, process.rank, process.world_size, host, port, local_rank=process.local_rank, **options)


def ensure_process_group(config: Config, device: torch.device, names: RankNames, alone: bool) -> OwnedGroup | None:
    """The process group that torchrun's variables ask for: created here, or by an earlier call. The caller has to
    `join` and to `close` it.

    None if there was nothing to create: a world of 1, or there is the group of a launch or of the user.

    Args:
        names: of the ranks, in messages about those that failed.
        alone: create one for a world of 1, too.

    Raises:
        LaunchError: the user's group lacks a backend that the config needs.
    """
    backend = choose_backend(config, device)
    if dist.is_initialized():
        wait_for_threads_at_exit()
        if backend == GLOO_NCCL and dist.get_world_size() > 1 and "cpu:" not in (there := dist.get_backend_config()):
            raise LaunchError(
                f"parallel.data={config.parallel.data.strategy!r} sums gradients in host memory, which your process "
                f"group cannot do ({there}): create it with init_process_group({GLOO_NCCL!r}), or let initialize "
                "create it"
            )
        return next((group for group in _shared if group.is_there), None)
    process = find_process()
    address = Address("localhost", 0) if alone and process.world_size == 1 else None  # 0: any port
    group = make_group(process, address, device, config.timeout, backend, names, alone)
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
            "initialize got no config, and would ignore the one that this process launched with; pass the launch, as "
            "in initialize(..., config=launch), or config={} for fp32 and data parallelism"
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
    `local_rank` is torchrun's LOCAL_RANK, or 0, unless given.

    Raises:
        LaunchError: this process sees no such GPU.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    chosen = torch.device(("cuda" if gpus else "cpu") if device is None else device)
    if chosen.type != "cuda":
        return chosen
    index = chosen.index
    if index is None:
        local_rank = int(os.environ.get(TORCHRUN.local_rank, 0)) if local_rank is None else local_rank
        index = 0 if gpus == 1 else local_rank
    if index >= gpus:
        origin = f"local rank {local_rank}" if chosen.index is None else f"device={str(device)!r}"
        raise LaunchError(
            f"{origin} needs GPU {index}, but this process sees {gpus} (numbered from 0); start at most "
            f"{counted(gpus, 'rank')} per machine, or pass device='cpu'"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def count_updates(dataloader: Any, setup: Setup, device: torch.device, sharded: bool) -> int:
    """See `Launch.updates_per_epoch`. It needs no process group."""
    if not isinstance(loader_in(dataloader), DataLoader):
        raise InputError(
            f"updates_per_epoch takes a torch DataLoader, but got a {type(dataloader).__name__}; pass the one that you "
            "give initialize"
        )
    context = ParallelContext(setup.dims, device)
    if not dist.is_initialized():
        context.rank = find_process().rank
    loader = ShardedLoader(dataloader, context, training=True, sharded=sharded)
    batches = loader.length
    if batches is None:
        dataset = type(loader.given.dataset).__name__
        raise InputError(
            f"the number of updates per epoch is unknown: {dataset}, or its sampler, has no length; give the dataset a "
            "__len__, or set the length of the run in updates (max_steps)"
        )
    return -(-batches // setup.accumulate(batch_size(dataloader)).config.gradient_accumulation)


def get_default_parser() -> argparse.ArgumentParser:
    """A parser with the options that the launch functions need (`--config`, `--set`, `--host`, `--port`,
    `--world-size`, `--rank`, `--local-rank`, `--backend`); you can add options.

    `--set` is for `load_config(args.config, args.overrides)`, whose result the launch functions take as config."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", help="the config file (.py, .yaml or .json)")
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="set a key of the config, such as parallel.tensor=2 or fp16.mode=naive; repeatable",
    )
    parser.add_argument("--host", help="the address of rank 0 (not needed under torchrun)")
    parser.add_argument("--port", type=int, help="the port of rank 0 (not needed under torchrun)")
    parser.add_argument("--world_size", "--world-size", type=int, help="the number of processes on all machines")
    parser.add_argument("--rank", type=int, help="the rank of this process, from 0")
    parser.add_argument(
        "--local_rank", "--local-rank", type=int, help="the rank of this process on its machine, from 0"
    )
    parser.add_argument("--backend", help="the communication backend (default: nccl for CUDA, gloo for the CPU)")
    return parser


def _launch(
    config: Any,
    process: ProcessEnv,
    address: Address | None,
    backend: str | None,
    seed: int | None,
    device: torch.device | str | None,
    verbose: bool,
) -> Launch:
    with recorded_for_torchrun():
        loaded = read_config(config)
        loaded = loaded if seed is None else loaded.replace(seed=seed)
        chosen = choose_device(device, process.local_rank)
        names = loaded.parallel.dims(process.world_size).rank_names
        backend = backend or choose_backend(loaded, chosen)
        group = make_group(process, address, chosen, loaded.timeout, backend, names)
    _set_seeds(loaded.seed)
    if verbose:
        how = dist.get_backend() if dist.is_initialized() else "no process group"
        get_logger().info("world size %d (%s), device %s, seed %d", process.world_size, how, chosen, loaded.seed)
    _launched[:] = [Launch(loaded, chosen, process.rank, process.world_size, process.local_rank, group)]
    return _launched[0]


def _set_seeds(seed: int) -> None:
    import numpy as np

    random.seed(seed)
    np.random.seed(seed % 2**32)  # numpy takes 32 bits
    torch.manual_seed(seed)
