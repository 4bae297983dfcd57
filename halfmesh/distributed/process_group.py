"""Creates the process group of a launch, and starts its failure watch."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import LaunchError
from .env import ProcessEnv, RankNames
from .failures import FailureWatch


@dataclass(frozen=True)
class Address:
    """The address at which rank 0 listens."""

    host: str
    port: int


_numbers = itertools.count()  # of the groups that this process has created; the same count on all ranks
_hosted: dict[Address, dist.Store] = {}
"""The stores of rank 0, which it keeps until the program ends. If a store closed with its group, a rank that is early
for the next group at the same address could connect to the closing one, and wait there."""


class OwnedGroup:
    """A process group that was made here, with its failure watch. The `close` of its last user destroys it."""

    def __init__(self, failures: FailureWatch) -> None:
        self.failures = failures
        self._group: dist.ProcessGroup | None = dist.group.WORLD
        self._users: set[object] = set()

    @property
    def is_there(self) -> bool:
        """True if it still is the group of this process: a user may have made another one meanwhile."""
        return dist.is_initialized() and dist.group.WORLD is self._group

    def join(self, user: object) -> None:
        """From now on `user` needs the group."""
        self._users.add(user)

    def leave(self, user: object) -> None:
        """`user` needs it no longer. The group stays, for whoever comes next, and to report an error in flight."""
        self._users.discard(user)

    def close(self, user: object = None) -> None:
        """Destroy the group, unless others than `user` need it. May be called twice."""
        self.leave(user)
        if not self._users:
            self.failures.remove()
            if self.is_there:
                dist.destroy_process_group()
            self._group = None  # the last reference to it ends its threads


def make_group(
    process: ProcessEnv,
    address: Address | None,
    device: torch.device,
    timeout_s: float,
    backend: str | None,
    names: RankNames,
    alone: bool = False,
) -> OwnedGroup | None:
    """Join the process group of `process`, at `address` or at the one in torchrun's variables.

    Returns None if there is nothing to create: a world of 1, or a group that the user created.

    Args:
        timeout_s: the time limit for joining, and for a collective, in seconds.
        backend: by default "nccl" for CUDA and "gloo" for the CPU.
        names: the names of the ranks, for messages.
        alone: also create a group for a world of 1.

    Raises:
        LaunchError: no group within `timeout_s`, or no such backend.
    """
    if dist.is_initialized() or (process.world_size == 1 and not alone):
        return None
    wait_for_threads_at_exit()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=timeout_s)
    host = None if address is None and _agent_hosts_store() else 0
    traces = place_flight_records() if "nccl" in backend else ""
    try:
        store = _make_store(process, address, timeout)
        # First, because NCCL connects in init_process_group, and waits without a limit for a rank that has failed.
        failures = FailureWatch(store, process.rank, names, host, timeout_s, traces)
        try:
            failures.meet()
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("default_pg", store),
                rank=process.rank,
                world_size=process.world_size,
                timeout=timeout,
                device_id=device if "nccl" in backend else None,
            )
        except BaseException as error:
            failures.give_up(error)
            raise
        failures.install()
        return OwnedGroup(failures)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{address.host}:{address.port}" if address else "MASTER_ADDR:MASTER_PORT"
        raise LaunchError(
            f"rank {process.rank} of {process.world_size} could not join the {backend} process group at {where} "
            f"within {timeout_s:g} s: {error}. Start all {process.world_size} processes with the same host and port, "
            "which must be free on rank 0's machine. If nodes have several addresses, "
            f"{'NCCL' if 'nccl' in backend else 'GLOO'}_SOCKET_IFNAME names the interface that the others reach"
        ) from error


def place_flight_records() -> str:
    """The prefix of the files into which NCCL's flight recorder writes each rank's last collectives when one times out:
    `nccl_trace_rank_` in the working directory, unless the user's variables name another place; "" if they turn the
    recorder off. Torch's own place, ~/.cache/torch, is shared by all jobs of a user. (The recorder is on by default:
    2,000 entries in torch's FlightRecorder.hpp, 2.11 and later.)"""
    size = os.environ.get("TORCH_FR_BUFFER_SIZE", os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE"))
    if size == "0" or os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1").lower() in ("0", "false", "n", "no"):
        return ""
    given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE", os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", ""))
    if not given and os.access(".", os.W_OK):
        given = os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.abspath("nccl_trace_rank_")
    return given


def wait_for_threads_at_exit() -> None:
    """Call this once there is a process group, whoever made it. Its threads may outlive `destroy_process_group`: torch
    keeps a group that is made before the first optimizer, as a default argument of functions that it imports then."""
    atexit.unregister(_let_threads_finish)
    atexit.register(_let_threads_finish)


def _let_threads_finish() -> None:
    """Before the interpreter shuts down: let gloo's threads drop the tensors that they still hold.

    A thread that asks for Python's lock during the shutdown is ended, which C++ answers by aborting the process
    ("terminate called without an active exception"), after all of its work is done.
    """
    time.sleep(0.1)


def _make_store(process: ProcessEnv, address: Address | None, timeout: timedelta) -> dist.Store:
    """A part of the store at `address` that only this group uses: a store outlives a group, whose ranks' addresses
    would be taken for those of the next one."""
    part = f"group_{next(_numbers)}"
    if address is None and _agent_hosts_store():  # it also outlives ranks that --max-restarts starts again
        alone = os.environ.get("GROUP_WORLD_SIZE") == "1"  # agents of several machines count restarts differently
        part = f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'any'}/{part}"
    where = address or Address(os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0)))
    if where not in _hosted:
        if address is None:
            _hosted[where], _, _ = next(dist.rendezvous("env://", process.rank, process.world_size, timeout=timeout))
        else:
            host = address.host.strip("[]")  # an IPv6 address as in a URL
            is_host = process.rank == 0
            _hosted[where] = dist.TCPStore(host, address.port, process.world_size, is_host, timeout=timeout)
    _hosted[where].set_timeout(timeout)
    return dist.PrefixStore(part, _hosted[where])


def _agent_hosts_store() -> bool:
    """Return True if torchrun keeps the store, which then outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
