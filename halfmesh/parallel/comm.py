"""Sends Python objects, and tensors of unequal lengths, between ranks; compares which calls they make. In a dry run,
which has one process, all ranks have the values of this one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..distributed.env import list_ranks
from ..distributed.failures import ANSWER_S
from ..errors import InputError, show
from ..utils.log import get_logger

_log = get_logger(__name__)
LOOK_S = 0.5
"""Seconds between two checks for ranks that have ended."""
PATIENCE_S = 10.0
"""Seconds after which a warning names the ranks that are missing."""


def is_simulated(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `group` (None: all ranks) is that of a dry run, which sends nothing."""
    return dist.get_backend(group) == "fake"


def host_backend() -> str:
    """The backend of groups whose messages are between hosts."""
    return "fake" if is_simulated() else "gloo"


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The `value` of each rank of `group` (None: all ranks), on each of them. A single process needs no group."""
    size = dist.get_world_size(group) if dist.is_initialized() else 1
    if size == 1:
        return [value]
    if is_simulated(group):
        return [value] * size
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, value, group=group)
    return everyone


def broadcast_object(value: Any, rank: int, device: torch.device) -> Any:
    """The `value` of that rank, on all of them."""
    if is_simulated():
        return value
    objects = [value]
    dist.broadcast_object_list(objects, rank, device=device)
    return objects[0]


def join_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows [n, ...] of all ranks of `group` (None: all ranks), in order of rank; n may differ.

    Raises:
        InputError: dtypes, or shapes beyond dim 0, differ.
    """
    shapes = gather_objects((tuple(rows.shape), str(rows.dtype)), group)
    if len({(shape[1:], dtype) for shape, dtype in shapes}) > 1:
        raise InputError(
            f"context.gather joins tensors along dim 0, but the ranks gave {show(shapes)}; give all of them one dtype, "
            "and the same size in each other dim"
        )
    counts = [shape[0] for shape, _ in shapes]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return torch.cat([rows[:count] for rows, count in zip(received, counts, strict=True)])


class NamedCalls:
    """Compares the collective calls of one engine over its ranks, by name, before anything is sent: the messages of
    `if rank == 0: engine.save(...)` would mix with those of training on the other ranks. It uses the store of the
    process group, and no collective.

    Args:
        name: the engine's, the same on all ranks.
        timeout_s: the seconds that a rank waits for the other ranks.
        told: the last word of each other rank that has told one: see `FailureWatch.told`.
    """

    def __init__(self, name: str, rank: int, size: int, timeout_s: float, told: Callable[[], dict[int, str]]) -> None:
        group: Any = dist.group.WORLD
        store = group.get_group_store().clone()  # a separate connection: the other one may be blocked in a wait
        self._store = dist.PrefixStore(f"halfmesh/calls/{name}", store)
        self._rank, self._size = rank, size
        self._timeout_s = timeout_s
        self._told = told
        self._number = 0

    def agree_on(self, call: str) -> None:
        """Return when all ranks make this `call`.

        Raises:
            InputError: some make another call, have ended, or make none within the timeout.
            ConnectionResetError: some have failed.
        """
        self._number += 1
        everyone = f"everyone_{self._number}"
        self._store.set(f"call_{self._rank}", f"{self._number} {call}")
        if self._store.add(f"came_{self._number}", 1) == self._size:  # the last one reads the calls of all
            said = [self._store.get(f"call_{rank}").decode().partition(" ")[2] for rank in range(self._size)]
            self._store.set(everyone, json.dumps(said))
        self._wait_for(everyone, call)
        calls: dict[str, list[int]] = {}
        for rank, theirs in enumerate(json.loads(self._store.get(everyone))):
            calls.setdefault(theirs, []).append(rank)
        if len(calls) > 1:
            (first, ranks), *rest = calls.items()
            others = ", and ".join(f"{other} on {list_ranks(theirs)}" for other, theirs in rest)
            raise InputError(
                f"{first} was called on {list_ranks(ranks)}, and {others}; call each on every rank, in the same order"
            )

    def _wait_for(self, key: str, call: str) -> None:
        begun, look, gone_since, has_warned = time.monotonic(), LOOK_S, 0.0, False
        while not self._store.check([key]):  # no `wait`: torch prints each time that it ends without the key
            waited = time.monotonic() - begun
            time.sleep(0.001 if waited < 0.02 else 0.02)
            if waited < look:
                continue
            look = waited + LOOK_S
            told, missing = self._told(), list(filter(self._is_missing, range(self._size)))
            if failed := [rank for rank, word in told.items() if word == "failed"]:  # the report of failures says why
                raise ConnectionResetError(f"{call}: connection reset by peer: {list_ranks(failed)} failed meanwhile")
            if any(told.get(rank, "running") != "running" for rank in missing):
                gone_since = gone_since or waited
            if gone_since and waited > gone_since + ANSWER_S:
                if silent := [rank for rank in missing if rank not in told]:  # killed?
                    raise ConnectionResetError(f"{call}: connection reset by peer: no answer from {list_ranks(silent)}")
                raise self._refuse(call, "ended, or waited elsewhere, without it")
            if waited > self._timeout_s:
                raise self._refuse(call, f"did not within {self._timeout_s:g} s (config key timeout)")
            if waited > PATIENCE_S and not has_warned:
                has_warned, text = True, "%s waits for %s to call it, too, since %g s; call it on all ranks, or on none"
                _log.warning(text, call, list_ranks(missing), PATIENCE_S, ranks=None)

    def _is_missing(self, rank: int) -> bool:
        key = f"call_{rank}"
        return not (self._store.check([key]) and self._store.get(key).decode().startswith(f"{self._number} "))

    def _refuse(self, call: str, why: str) -> InputError:
        missing = [rank for rank in range(self._size) if self._is_missing(rank)]
        here = sorted({*range(self._size)}.difference(missing))
        return InputError(
            f"{call} was called on {list_ranks(here)} only; call it on every rank, without an `if` around it: which "
            f"rank writes is chosen inside ({list_ranks(missing)} {why})"
        )
