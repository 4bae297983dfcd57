"""Reads the rank of a process from its launcher (torchrun, SLURM, Open MPI), and names ranks in messages."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import LaunchError

T = TypeVar("T")
_SHOWN = 8  # ranges of ranks in a message


@dataclass(frozen=True)
class ProcessEnv:
    """Which process of how many this is, and which on its machine."""

    rank: int
    world_size: int
    local_rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise LaunchError(
                f"rank {self.rank} is impossible with world size {self.world_size}: ranks go from 0 to world size - 1"
            )


@dataclass(frozen=True)
class Launcher:
    """A launcher, its function here, and the variables that it sets for each process: rank, world size and local rank;
    alternatives are separated by "|"."""

    command: str
    function: str
    variables: tuple[str, str, str]

    def read(self) -> ProcessEnv:
        """This process. Raises LaunchError if a variable is missing or not a number."""
        return ProcessEnv(*map(self._read, self.variables))

    def _read(self, variables: str) -> int:
        names = variables.split("|")
        value = next((os.environ[name] for name in names if name in os.environ), None)
        if value is None or not value.isdecimal():
            raise LaunchError(
                f"{' or '.join(names)} is {'missing from' if value is None else f'{value!r} in'} the environment: "
                f"{self.function} expects a whole number, which its launcher sets; start with: {self.command}"
            )
        return int(value)


_TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_NPROCS|SLURM_NTASKS", "SLURM_LOCALID")
_MPI_VARIABLES = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK")
TORCHRUN = Launcher("torchrun --nproc-per-node N train.py", "launch_from_torch", _TORCH_VARIABLES)
SLURM = Launcher("srun --ntasks N python train.py", "launch_from_slurm", _SLURM_VARIABLES)
OPENMPI = Launcher("mpirun -np N python train.py", "launch_from_openmpi", _MPI_VARIABLES)
# Set by these launchers for each process that they start, and not in the shell around it.
STARTED_BY = {"SLURM_STEP_NUM_TASKS": SLURM, "OMPI_COMM_WORLD_SIZE": OPENMPI}


def find_process() -> ProcessEnv:
    """This process by torchrun's variables, else in an existing process group, else a world of one.

    Raises:
        LaunchError: incomplete variables; or srun or mpirun started several processes, and torchrun none.
    """
    if any(name in os.environ for name in TORCHRUN.variables):
        return TORCHRUN.read()
    if dist.is_initialized():
        rank = dist.get_rank()
        return ProcessEnv(rank, dist.get_world_size(), rank % max(1, torch.cuda.device_count()))
    for variable, launcher in STARTED_BY.items():
        if os.environ.get(variable, "1") not in ("", "1"):
            raise LaunchError(
                f"{variable}={os.environ[variable]}: several processes were started, but each would train alone; call "
                f"{launcher.function} instead, or start with: {TORCHRUN.command}"
            )
    return ProcessEnv(0, 1, 0)


def coordinates_of(rank: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """The coordinate of `rank` on each axis of a mesh of these sizes, outermost first."""
    coordinates = {}
    for axis, size in reversed(list(sizes.items())):
        rank, coordinates[axis] = divmod(rank, size)
    return coordinates


@dataclass(frozen=True)
class RankNames:
    """Names ranks in messages, by number and by coordinates in the mesh.

    Args:
        sizes: the sizes of the mesh's axes, outermost first.
    """

    world_size: int
    sizes: Mapping[str, int] = field(default_factory=dict)

    @property
    def has_coordinates(self) -> bool:
        """True if ranks also have coordinates: not with data parallelism alone, or if the sizes do not fit."""
        return math.prod(self.sizes.values()) == self.world_size > self.sizes.get("dp", 1)

    def name(self, rank: int) -> str:
        """`rank 3`, or `rank 3 (dp 1, tp 1)`; axes of size 1 are left out."""
        if not self.has_coordinates:
            return f"rank {rank}"
        places = coordinates_of(rank, self.sizes)
        return f"rank {rank} ({', '.join(f'{axis} {places[axis]}' for axis in self.sizes if self.sizes[axis] > 1)})"

    def names(self, ranks: Iterable[int]) -> str:
        """Several ranks, in order; more than four of them as `ranks 0-3, 7, 9`."""
        some = sorted(ranks)
        return ", ".join(map(self.name, some)) if self.has_coordinates and len(some) <= 4 else list_ranks(some)


def list_ranks(ranks: Iterable[int]) -> str:
    """`rank 3`, or `ranks 0-3, 7`; of more than `_SHOWN` ranges the first ones."""
    some = sorted(ranks)
    # Consecutive ranks have the same distance from their index.
    groups = itertools.groupby(enumerate(some), lambda item: item[1] - item[0])
    runs = [[rank for _, rank in group] for _, group in groups]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}{', ' if len(run) == 2 else '-'}{run[-1]}" for run in runs]
    rest = sum(map(len, runs[_SHOWN:]))
    return f"rank{'s' * (len(some) != 1)} {', '.join(words[:_SHOWN])}{f' and {rest} more' if rest else ''}"


def ranks_by_value(values: Mapping[int, T]) -> dict[T, list[int]]:
    """The ranks that have each of `values`, given by rank; in order of the first of these."""
    found: dict[T, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return found
