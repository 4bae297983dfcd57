"""Creates the process group of a launch, and starts its failure watch."""

from __future__ import annotations

import atexit
import itertools
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from ..errors import LaunchError
from .env import RankNames
from .failures import FailureWatch

Address = tuple[str, int]  # the host and port at which rank 0 listens
ALONE = "localhost", 0  # of a group of one rank, at any port
_numbers = itertools.count()  # of the groups that this process has created; the same count on all ranks
# The stores of rank 0, which it keeps until the program ends. If a store closed with its group, a rank that is early
# for the next group at the same address could connect to the closing one, and wait there.
_hosted: dict[Address, dist.Store] = {}


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
    rank: int, names: RankNames, address: Address | None, device: torch.device, timeout_s: float, backend: str | None
) -> OwnedGroup | None:
    """Join a process group as `rank`, at `address` or at the one in torchrun's variables.

    Returns None if there is nothing to create: a world of 1 (but at `ALONE`), or a group that the user created.

    Args:
        names: the names of all ranks, for messages.
        timeout_s: the time limit for joining, and for a collective, in seconds.
        backend: by default "nccl" for CUDA and "gloo" for the CPU.

    Raises:
        LaunchError: no group within `timeout_s`, or no such backend.
    """
    size = names.world_size
    if dist.is_initialized() or (size == 1 and address != ALONE):
        return None
    wait_for_threads_at_exit()
    backend = backend or ("nccl" if device.type == "cuda" else "gloo")
    timeout = timedelta(seconds=timeout_s)
    host = None if address is None and _agent_hosts_store() else 0
    try:
        store = _make_store(rank, size, address, timeout)
        # First, because NCCL connects in init_process_group, and waits without a limit for a rank that has failed.
        failures = FailureWatch(store, rank, names, host, timeout_s)
        try:
            failures.meet()
            own, gpu = dist.PrefixStore("default_pg", store), device if "nccl" in backend else None
            dist.init_process_group(backend, None, timeout, size, rank, own, device_id=gpu)
        except BaseException as error:
            failures.give_up(error)
            raise
        failures.install()
        return OwnedGroup(failures)
    except (RuntimeError, ValueError, OSError) as error:
        where = f"{address[0]}:{address[1]}" if address else "MASTER_ADDR:MASTER_PORT"
        raise LaunchError(
            f"rank {rank} of {size} could not join the {backend} process group at {where} within {timeout_s:g} s: "
            f"{error}. Start all {size} processes with the same host and port, "
            "which must be free on rank 0's machine; NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME chooses the interface"
        ) from error


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


def _make_store(rank: int, size: int, address: Address | None, timeout: timedelta) -> dist.Store:
    """A part of the store at `address` that only this group uses: a store outlives a group, whose ranks' addresses
    would be taken for those of the next one."""
    part = f"group_{next(_numbers)}"
    if address is None and _agent_hosts_store():  # it also outlives ranks that --max-restarts starts again
        alone = os.environ.get("GROUP_WORLD_SIZE") == "1"  # agents of several machines count restarts differently
        part = f"restart_{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if alone else 'any'}/{part}"
    where = address or (os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", 0)))
    if where not in _hosted:
        if address is None:
            _hosted[where], _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        else:  # an IPv6 address as in a URL
            _hosted[where] = dist.TCPStore(address[0].strip("[]"), address[1], size, rank == 0, timeout=timeout)
    _hosted[where].set_timeout(timeout)
    return dist.PrefixStore(part, _hosted[where])


def _agent_hosts_store() -> bool:
    """Return True if torchrun keeps the store, which then outlives rank 0."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
