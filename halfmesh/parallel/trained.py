"""Whether ranks that hold the same parameters train the same ones of them (`requires_grad`).

What is trained decides which gradients are summed together: where ranks differ in it, gradients of unlike layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import InputError
from ..launching.env import RankNames
from ..launching.failures import is_echo
from .objects import gather_objects, is_alone

if TYPE_CHECKING:
    from .context import ParallelContext

_ADVICE = (
    "freeze and unfreeze the same parameters on every rank; draw what to freeze with the same seed on all of them, as "
    "in random.Random(0)"
)


def refuse_unlike(names: Sequence[str], everyone: Sequence[bytes], ranks: Sequence[str]) -> None:
    """Raise InputError, on all ranks, if they do not train the same.

    Args:
        names: of the parameters.
        everyone: what each rank says of each of them: 1 if it is trained there, else 0.
        ranks: how messages name the ranks.
    """
    unlike = [index for index, said in enumerate(zip(*everyone, strict=True)) if len(set(said)) > 1]
    if not unlike:
        return
    trains = [rank for rank, flags in zip(ranks, everyone, strict=True) if flags[unlike[0]]]
    freezes = [rank for rank in ranks if rank not in trains]
    more = f" (the first of {len(unlike)} parameters that differ)" if len(unlike) > 1 else ""
    raise InputError(
        f"requires_grad is not the same on all ranks: {names[unlike[0]]!r} is trained on {', '.join(trains)} and "
        f"frozen on {', '.join(freezes)}{more}; {_ADVICE}"
    )


class SameTrained:
    """Compares what is trained over the ranks of a pipeline stage, which hold the same parameters, or parts of them.

    All ranks of `context` make this together.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._is_alone = context.dp_size * context.tp_size == 1 or is_alone()
        if context.pp_size > 1 and not self._is_alone:
            _ = context.stage_group  # now: later each stage compares when something has changed there

    def compare(self, names: Sequence[str], trained: bytes) -> None:
        """What this rank trains has changed. Called by all ranks of the stage together.

        Args:
            names, trained: as for `refuse_unlike`.

        Raises:
            InputError: on another rank it has changed in another way, or not at all, which shows when the time limit
                of collectives has passed.
        """
        if self._is_alone:
            return
        context = self._context
        names_of = RankNames(context.size, context.pp_size, context.tp_size)
        try:
            everyone = gather_objects(trained, context.stage_group)
        except RuntimeError as error:
            if is_echo(error):
                raise
            raise InputError(
                f"requires_grad was changed on {names_of.name(context.rank)}, but not on all ranks that hold the same "
                f"parameters: some did not come to compare it within the config's timeout; {_ADVICE}"
            ) from error
        refuse_unlike(names, everyone, [names_of.name(rank) for rank in context.stage_ranks])
