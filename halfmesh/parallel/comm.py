"""Sends Python objects and tensors of unequal lengths between ranks, and compares the values that ranks have and the
calls that they make. In a dry run, which has one process, all ranks have the values of this process."""

from __future__ import annotations

import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..distributed.env import list_ranks, ranks_by_value
from ..distributed.failures import ANSWER_S
from ..errors import InputError, shorten, show
from ..utils.log import get_logger
from ..utils.tensors import digest, has_values, tensors_of

if TYPE_CHECKING:
    from .mesh import ParallelContext

_log = get_logger(__name__)
LOOK_S = 0.5
"""Seconds between two checks for ranks that have ended."""
PATIENCE_S = 10.0
"""Seconds after which a warning names the ranks that are missing."""
LOST = ": connection reset by peer: "
"""In problems of ranks that have failed."""


def is_simulated(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `group` (None: all ranks) is that of a dry run, which sends nothing."""
    return dist.get_backend(group) == "fake"


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


def broadcast_object(value: Any, rank: int, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return the `value` of one rank of `group` (None: of all ranks) on all of its ranks."""
    if is_simulated():
        return value
    objects = [value]
    dist.broadcast_object_list(objects, group=group, device=device, group_src=rank)
    return objects[0]


def join_rows(rows: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """The rows [n, ...] of all ranks of `group` (None: all ranks), in order of rank; n may differ.

    Raises:
        InputError: dtypes, or shapes beyond dim 0, differ.
    """
    shapes = gather_objects((*rows.shape, str(rows.dtype)), group)
    if len({shape[1:] for shape in shapes}) > 1:
        given = shorten(list(map(show, shapes)))
        raise InputError(f"context.gather joins rows of one dtype and shape, but the ranks gave {given}")
    counts = [shape[0] for shape in shapes]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    received = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(received, padded, group=group)
    return torch.cat([rows[:count] for rows, count in zip(received, counts, strict=True)])


def same_on_ranks(tree: Any, group: dist.ProcessGroup | None = None, what: str = "") -> bool:
    """Return True if all ranks of `group` (None: all ranks) have the same `tree`, by `digest`. All of them together.

    Args:
        what: raise InputError with this message where they do not; "{ranks}" in it are those that differ from the first
            rank of the group.
    """
    everyone = gather_objects(digest(tree), group)
    others = [index for index, theirs in enumerate(everyone) if theirs != everyone[0]]
    if others and what:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        raise InputError(what.replace("{ranks}", list_ranks(ranks[index] for index in others)))
    return not others


@torch.no_grad()
def norms(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """The norm of each tensor, in float64 [n] on `device`; -1 for nan, and 0 for all but plain tensors of floats."""
    found = [torch.zeros((), dtype=torch.float64, device=device)]
    for tensor in (tensor.detach() for tensor in tensors):
        is_plain = type(tensor) is torch.Tensor and tensor.is_floating_point()
        found.append(torch.linalg.vector_norm(tensor, dtype=torch.float64).to(device) if is_plain else found[0])
    return torch.stack(found)[1:].nan_to_num(-1)


# -- batches of ranks that compute together ------------------------------------------------------------------------


def is_checked(number: int) -> bool:
    """Return True if call `number` is checked: the first, the tenth, the hundredth and so on."""
    return str(number).rstrip("0") == "1"


class SameCalls:
    """Compares the model's inputs and outputs over the ranks of a group: in the first call, inputs also in the tenth,
    the hundredth and so on; training and evaluation count separately. Ranks with different inputs would silently mix
    them, and an output that is sharded is not the model's.

    Args:
        group: the ranks.
        what: their name in messages ("tensor group").
    """

    def __init__(self, group: dist.ProcessGroup, what: str) -> None:
        self._group = group
        self._what = what
        self._inputs_seen: Counter[tuple[bool, str]] = Counter()
        self._outputs_seen: set[bool] = set()

    @torch.compiler.disable
    @torch.no_grad()
    def are_same(self, tree: Any, of: str, training: bool = True) -> bool:
        """Return True if all ranks have the same tensors in `tree`, or if this call, of its kind, is not checked."""
        self._inputs_seen[training, of] += 1
        is_due = is_checked(self._inputs_seen[training, of])
        return not is_due or same_on_ranks(tensors_of(tree), self._group)

    def compare_inputs(self, training: bool, args: Any, kwargs: Any, of: str = "inputs") -> None:
        """Raise InputError on all ranks if the inputs differ; `of`: their name in messages."""
        if not self.are_same((args, kwargs), of, training):
            raise InputError(f"the ranks of a {self._what} got different {of} for one batch; iterate engine.dataloader")

    @torch.compiler.disable
    @torch.no_grad()
    def compare_outputs(self, training: bool, output: Any) -> None:
        """Raise InputError on all ranks if outputs differ by more than rounding."""
        if training in self._outputs_seen:
            return
        self._outputs_seen.add(training)
        tensors = [tensor for tensor in tensors_of(output) if not hasattr(tensor, "to_local")]  # sharded on purpose
        chunks = [chunk for t in tensors if has_values(t) for chunk in (t, *t.detach().reshape(-1).chunk(7))]
        shapes, mine = [tuple(tensor.shape) for tensor in tensors], norms(chunks, torch.device("cpu")).tolist()
        everyone = gather_objects((shapes, mine), self._group)
        is_near = partial(math.isclose, rel_tol=2e-2, abs_tol=1e-6)  # equal up to rounding in bf16
        if not all(others == shapes and all(map(is_near, mine, theirs)) for others, theirs in everyone):
            raise InputError(
                f"the model's output differs between the ranks of a {self._what}: part of it is sharded. Give the last "
                "layer the style 'colwise_gather', and return no tensors from between sharded layers"
            )


# -- calls of an engine, through the store -----------------------------------------------------------------------------


def own_store(context: ParallelContext, connections: int = 1) -> list[Any]:
    """A part of the process group's store that only the caller uses, once per separate connection: each may be blocked
    in a wait. All ranks call it together."""
    name = context.from_first(uuid.uuid4().hex)  # torchrun's store outlives a group
    world: Any = dist.group.WORLD
    store = world.get_group_store()
    return [dist.PrefixStore(f"halfmesh/{name}", store.clone()) for _ in range(connections)]


def get_within(store: Any, key: str, timeout_s: float) -> bytes | None:
    """The value of `key`, or None if nobody sets it within `timeout_s`. Other errors of the store are raised."""
    end = time.monotonic() + timeout_s
    store.set_timeout(timedelta(seconds=max(timeout_s, 0.01)))  # 0 would be: for ever
    try:
        value: bytes = store.get(key)
    except RuntimeError:  # DistStoreError of most stores, which is one; a FileStore raises a plain one
        if time.monotonic() < end - 0.01:
            raise
        return None
    return value


class NamedCalls:
    """Compares the collective calls of one engine over its ranks, by name, before anything is sent: the messages of
    `if rank == 0: engine.save(...)` would mix with those of training on the other ranks. It uses no collective.

    The last rank that comes compares the calls of all. Until then the first one looks who is missing, and the others
    block on one key of the store: so the number of requests does not grow with ranks x seconds.

    Args:
        store: the store that `own_store` returned.
        timeout_s: the seconds that a rank waits for the other ranks.
        told: returns the last word that each other rank has sent: see `FailureWatch.told`.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, told: Callable[[], dict[int, str]]) -> None:
        self._store, self._rank, self._size, self._timeout_s, self._told = store, rank, size, timeout_s, told
        self._number = 0

    def agree_on(self, call: str) -> None:
        """Return when all ranks make this `call`.

        Raises:
            InputError: some make another call, have ended, or make none within the timeout.
            ConnectionResetError: some have failed.
        """
        self._number += 1
        end = f"end_{self._number}"
        try:
            self._store.append(f"calls_{self._number}", f"{self._rank} {call}\n")
            came = self._store.add(f"came_{self._number}", 1)
            if came == self._size:
                calls = [f"{each} was called on {list_ranks(of)}" for each, of in ranks_by_value(self._calls()).items()]
                problem = f"{', and '.join(calls)}; call each on every rank, in the same order"
                self._end_with(problem if len(calls) > 1 else "agreed")
                for key in ("calls", "came", "end"):  # all ranks have read those of the last call
                    self._store.delete_key(f"{key}_{self._number - 1}")
            elif came == 1:
                self._look_out(call)
            outcome = get_within(self._store, end, self._timeout_s + ANSWER_S)
            if outcome is None:  # the one that looks is gone
                self._end_with(self._absent(call))
                outcome = self._store.get(end)
        except BaseException:  # Ctrl-C, or the store is gone
            self._end_with(f"{call}{LOST}{list_ranks([self._rank])} failed meanwhile")
            raise
        if (problem := outcome.decode()) != "agreed":
            raise (ConnectionResetError if LOST in problem else InputError)(problem)

    def _calls(self) -> dict[int, str]:
        """The call of each rank that has come, by rank."""
        lines = self._store.get(f"calls_{self._number}").decode().splitlines()
        return dict(sorted((int(rank), call) for rank, _, call in (line.partition(" ") for line in lines)))

    def _end_with(self, outcome: str) -> None:
        """End the wait of all ranks, unless another rank has: "agreed", or a problem."""
        self._store.compare_set(f"end_{self._number}", "", outcome)

    def _absent(self, call: str, why: str = "") -> str:
        """The problem if some ranks have not come."""
        here, late = self._calls(), f"did not within {self._timeout_s:g} s (config key timeout)"
        missing = list_ranks(set(range(self._size)).difference(here))
        return (
            f"{call} was called on {list_ranks(here)} only; call it on every rank, without an `if` around it: "
            f"halfmesh chooses which rank writes ({missing} {why or late})"
        )

    def _look_out(self, call: str) -> None:
        """Wait until all ranks have come. If some will not come, tell the others which, and why."""
        begun, look, gone_since, warn = time.monotonic(), LOOK_S, math.inf, PATIENCE_S
        while not self._store.check([f"end_{self._number}"]):  # no `wait`: torch prints each time that it fails
            waited = time.monotonic() - begun
            time.sleep(min(0.1, max(0.001, waited / 10)))
            if waited < look:
                continue
            look, told = waited + LOOK_S, self._told()
            missing = sorted(set(range(self._size)).difference(self._calls()))
            if any(told.get(rank, "late") not in ("late", "running") for rank in missing):
                gone_since = min(gone_since, waited)
            is_over = waited > gone_since + ANSWER_S
            if failed := [rank for rank, word in told.items() if word == "failed"]:  # the report of failures says why
                self._end_with(f"{call}{LOST}{list_ranks(failed)} failed meanwhile")
            elif is_over and (silent := [rank for rank in missing if rank not in told]):  # killed?
                self._end_with(f"{call}{LOST}no answer from {list_ranks(silent)}")
            elif is_over or waited > self._timeout_s:
                self._end_with(self._absent(call, "ended, or waited elsewhere" if is_over else ""))
            elif waited > warn:
                warn, text = math.inf, "%s still waits for %s to call it, after %g s; call it on every rank"
                _log.warning(text, call, list_ranks(missing), PATIENCE_S, ranks=None)
