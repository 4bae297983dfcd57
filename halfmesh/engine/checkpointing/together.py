"""Work of all ranks that ends on all of them in the same way: done, or with the same error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...errors import CheckpointError, HalfmeshError, InputError, bullet_list
from ...layout import Layout
from ...parallel.context import ParallelContext

T = TypeVar("T")


def together(context: ParallelContext, what: str, work: Callable[[], T]) -> T:
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
    everyone = context.everyone(None if error is None else (_words(error), isinstance(error, InputError)))
    failed = {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}
    if failed:
        raise _joined(context, what, failed) from error
    return result  # type: ignore[return-value]  # there was no error


def on_first(context: ParallelContext, what: str, work: Callable[[], object]) -> None:
    """Do `work` on rank 0; all ranks return when it is done, or raise why it could not be."""

    def only_there() -> None:
        if context.rank == 0:
            work()

    together(context, what, only_there)


def _joined(context: ParallelContext, what: str, failed: dict[int, tuple[str, bool]]) -> HalfmeshError:
    kind = InputError if all(is_input for _, is_input in failed.values()) else CheckpointError
    reasons: dict[str, list[int]] = {}
    for rank, (words, _) in failed.items():
        reasons.setdefault(words, []).append(rank)
    if len(reasons) == 1 and len(failed) == context.size:
        return kind(f"{what}: {next(iter(reasons))}")
    layout = Layout(context.size, context.pp_size, context.tp_size)
    return kind(bullet_list(f"{what}:", (f"{layout.names(ranks)}: {words}" for words, ranks in reasons.items())))


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, HalfmeshError) else f"{type(error).__name__}: {error}"
