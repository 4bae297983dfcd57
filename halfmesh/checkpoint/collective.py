"""Work that all ranks do together: it succeeds on every rank, or all raise the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from ..errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ..parallel.mesh import ParallelContext
from ..parallel.objects import gather_objects

T = TypeVar("T")


def gather_results(
    context: ParallelContext, what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> list[T]:
    """Do `work` on every rank. Returns the result of each rank, on all of them.

    Args:
        what: the beginning of the error message: "saving to here failed".
        group: of all ranks, for a thread that runs during training; None: torch's default one.

    Raises:
        CheckpointError, InputError: it failed on some ranks; raised on all, with the reason of each.
    """
    result, error, failure = None, None, None
    try:
        result = work()
    except Exception as raised:
        error = raised
        words = str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
        failure = words, isinstance(error, InputError)
    mine = failure, result
    everyone = context.everyone(mine) if group is None else gather_objects(mine, group)
    failures = {rank: failure for rank, (failure, _) in enumerate(everyone) if failure is not None}
    if failures:
        raise _join(context, what, failures) from error
    return [result for _, result in everyone]


def run_on_all_ranks(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
    """As `gather_results`, but returns this rank's result, which is not sent."""
    done: list[T] = []
    gather_results(context, what, lambda: done.append(work()))
    return done[0]


def run_on_rank_zero(
    context: ParallelContext, what: str, work: Callable[[], T], group: dist.ProcessGroup | None = None
) -> T:
    """Do `work` on rank 0 alone. Returns its result on all ranks; arguments and errors as of `gather_results`."""
    return gather_results(context, what, lambda: work() if context.rank == 0 else None, group)[0]  # type: ignore[return-value]


def _join(context: ParallelContext, what: str, failures: dict[int, tuple[str, bool]]) -> HalfmeshError:
    kind = InputError if all(is_input for _, is_input in failures.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failures.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failures) == context.size:
        return kind(f"{what}: {next(iter(reasons))}")
    names = context.rank_names
    return kind(bullet_list(f"{what}:", (f"{names.names(ranks)}: {words}" for words, ranks in reasons.items())))
