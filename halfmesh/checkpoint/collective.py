"""Work that all ranks do together, with the same end on all of them: done, or the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ..launching.env import RankNames
from ..parallel.context import ParallelContext
from ..parallel.objects import gather_objects

T = TypeVar("T")


def all_gather_object(context: ParallelContext, value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank gave as `value`.

    Args:
        group: of all ranks, for a thread beside training; None: torch's default one.
    """
    return context.everyone(value) if group is None else gather_objects(value, group)


def run_on_all_ranks(
    context: ParallelContext, what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Do `work` on every rank; all of them return when the last one has done it.

    Args:
        what: begins the error's message: "saving to here".
        group: as of `all_gather_object`.

    Raises:
        CheckpointError, InputError: it failed on some ranks; raised on all, with the reason of each.
    """
    error, result = None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
    mine = None if error is None else (_words(error), isinstance(error, InputError))
    everyone = all_gather_object(context, mine, group)
    failed = {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
    if failed:
        raise _joined(context, what, failed) from error
    return result  # type: ignore[return-value]  # there was no error


def run_on_rank_zero(
    context: ParallelContext, what: str, work: Callable[[], object], group: dist.ProcessGroup | None = None
) -> None:
    """Do `work` on rank 0; all ranks return when it is done, or raise why it could not be."""
    run_on_all_ranks(context, what, lambda: work() if context.rank == 0 else None, group)


def _joined(context: ParallelContext, what: str, failed: dict[int, tuple[str, bool]]) -> HalfmeshError:
    kind = InputError if all(is_input for _, is_input in failed.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failed.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failed) == context.size:
        return kind(f"{what}: {next(iter(reasons))}")
    names = RankNames(context.size, context.pp_size, context.tp_size)
    return kind(bullet_list(f"{what}:", (f"{names.names(those)}: {words}" for words, those in reasons.items())))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
