"""What a launcher (torchrun, SLURM, Open MPI) tells each process about its place, read from the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ..errors import LaunchError


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, and which on its machine."""

    rank: int
    world_size: int
    local_rank: int


@dataclass(frozen=True)
class Launcher:
    """The variables by which a launcher tells each process its place; alternatives are separated by "|"."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    function: str
    command: str
    others: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        return (self.rank, self.world_size, self.local_rank, *self.others)

    def missing(self) -> list[str]:
        return [name for name in self.variables if _read(name) is None]


TORCHRUN = Launcher(
    "torchrun",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "launch_from_torch(config)",
    "torchrun --nproc-per-node N train.py",
    ("MASTER_ADDR", "MASTER_PORT"),
)
SLURM = Launcher(
    "SLURM",
    "SLURM_PROCID",
    "SLURM_NPROCS|SLURM_NTASKS",
    "SLURM_LOCALID",
    "launch_from_slurm(config, host, port)",
    "srun --ntasks N python train.py",
)
OPENMPI = Launcher(
    "Open MPI",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "launch_from_openmpi(config, host, port)",
    "mpirun -np N python train.py",
)
# Set by these launchers for each process that they start, and not in the shell around it.
STARTED_BY = {"SLURM_STEP_NUM_TASKS": SLURM, "OMPI_COMM_WORLD_SIZE": OPENMPI}


def torchrun_place() -> Place:
    """torchrun's variables, or the place in an existing group, or a world of one."""
    missing = TORCHRUN.missing()
    if len(missing) < len(TORCHRUN.variables):
        return read_place(TORCHRUN)
    if dist.is_initialized():
        rank = dist.get_rank()
        return Place(rank, dist.get_world_size(), rank % max(1, torch.cuda.device_count()))
    for variable, launcher in STARTED_BY.items():
        if os.environ.get(variable, "1") not in ("", "1"):
            raise LaunchError(
                f"{variable}={os.environ[variable]}: {launcher.name} started several processes, each of which would "
                f"train alone; use {launcher.function} instead, or start with {TORCHRUN.command}"
            )
    return Place(0, 1, 0)


def read_place(launcher: Launcher) -> Place:
    """The place that `launcher` gave this process.

    Raises:
        LaunchError: variables that are missing, no whole numbers, or do not fit together.
    """
    missing = launcher.missing()
    if missing:
        names = ", ".join(name.replace("|", " or ") for name in missing)
        running = [other for other in (TORCHRUN, SLURM, OPENMPI) if other is not launcher and not other.missing()]
        hint = f"; this looks like {running[0].name}: use {running[0].function}" if running else ""
        raise LaunchError(
            f"{names} missing from the environment: {launcher.function} works in a process started by {launcher.name}, "
            f"such as: {launcher.command}{hint}"
        )
    rank = read_int(launcher.rank, at_least=0)
    world_size = read_int(launcher.world_size, at_least=1)
    check_place(rank, world_size, f" ({launcher.rank}, {launcher.world_size.partition('|')[0]})")
    return Place(rank, world_size, read_int(launcher.local_rank, at_least=0))


def check_place(rank: int, world_size: int, source: str = "") -> None:
    """Raise LaunchError unless 0 <= rank < world_size."""
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"rank {rank} of world size {world_size}{source} is impossible: ranks go from 0 to world size - 1; give "
            "each process its own rank, and all the same world size"
        )


def _read(names: str) -> str | None:
    """The first of the variables in `names` ("A|B") that is set."""
    return next((os.environ[name] for name in names.split("|") if name in os.environ), None)


def read_int(names: str, at_least: int) -> int:
    """The variable as a number. Raises LaunchError with the value if it is none."""
    value = _read(names) or ""
    try:
        number = int(value)
    except ValueError:
        number = at_least - 1
    if number < at_least:
        raise LaunchError(
            f"{names.partition('|')[0]}={value!r} in the environment: expected a whole number of at least {at_least}; "
            "the launcher sets it, so unset your own value"
        )
    return number
