"""Work of all ranks that ends on all of them in the same way: done, or with the same error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ..launching.env import RankNames
from ..parallel.context import ParallelContext
from ..parallel.objects import broadcast_object, gather_objects

T = TypeVar("T")


class Ranks(Protocol):
    """All ranks of a layout: a ParallelContext, or `HostRanks`."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def pp_size(self) -> int: ...
    @property
    def tp_size(self) -> int: ...

    def everyone(self, value: Any) -> list[Any]: ...
    def from_first(self, value: Any) -> Any: ...


@dataclass(frozen=True)
class HostRanks:
    """All ranks of a layout, in a process group of their own: what a thread says there meets no collective of training.

    Attributes:
        group: over gloo; None in a world of one rank.
    """

    rank: int
    size: int
    pp_size: int
    tp_size: int
    group: dist.ProcessGroup | None

    @staticmethod
    def of(context: ParallelContext) -> HostRanks:
        """Those of `context`. All ranks together: the first call makes the group."""
        return HostRanks(context.rank, context.size, context.pp_size, context.tp_size, context.host_group)

    def everyone(self, value: Any) -> list[Any]:
        """What each rank gave as `value`."""
        return gather_objects(value, self.group) if self.size > 1 else [value]

    def from_first(self, value: Any) -> Any:
        """What rank 0 gave as `value`."""
        return broadcast_object(value, 0, torch.device("cpu"), self.group) if self.size > 1 else value


def together(ranks: Ranks, what: str, work: Callable[[], T]) -> T:
    """Do `work` on every rank; all of them return when the last one has done it.

    Args:
        what: names it in the error: "saving to here".

    Raises:
        CheckpointError, InputError: it failed on some ranks; raised on all, with the reason of each.
    """
    error, result = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    everyone = ranks.everyone(None if error is None else (_words(error), isinstance(error, InputError)))
    failed = {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
    if failed:
        raise _joined(ranks, what, failed) from error
    return result  # type: ignore[return-value]  # there was no error


def on_first(ranks: Ranks, what: str, work: Callable[[], object]) -> None:
    """Do `work` on rank 0; all ranks return when it is done, or raise why it could not be."""

    def only_there() -> None:
        if ranks.rank == 0:
            work()

    together(ranks, what, only_there)


def _joined(ranks: Ranks, what: str, failed: dict[int, tuple[str, bool]]) -> HalfmeshError:
    kind = InputError if all(is_input for _, is_input in failed.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failed.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failed) == ranks.size:
        return kind(f"{what}: {next(iter(reasons))}")
    ranks_by_name = RankNames(ranks.size, ranks.pp_size, ranks.tp_size)
    return kind(bullet_list(f"{what}:", (f"{ranks_by_name.names(those)}: {words}" for words, those in reasons.items())))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
