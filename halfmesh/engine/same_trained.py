"""Compares over ranks which parameters are frozen or unfrozen during a run."""

from __future__ import annotations

from collections.abc import Sequence

from ..distributed.failures import is_echo
from ..errors import InputError
from ..parallel.mesh import ParallelContext
from ..parallel.objects import gather_objects, is_simulated
from ..parallel.replica_checks import ADVICE, refuse_unlike


class SameTrained:
    """Compares `requires_grad` over the ranks of a pipeline stage, which hold the same parameters or shards of them.

    All ranks of `context` make this together.
    """

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        self._is_alone = len(context.stage_ranks) == 1 or is_simulated()
        if len(context.stage_ranks) < context.size and not self._is_alone:
            _ = context.stage_group  # now: later each stage compares when something has changed there

    def compare(self, names: Sequence[str], trained: bytes) -> None:
        """Compare, after the trained parameters of this rank have changed. All ranks of the stage together.

        Args:
            names, trained: as for `refuse_unlike`.

        Raises:
            InputError: they changed differently on another rank; or not at all there, which is found when the time
                limit of collectives has passed.
        """
        if self._is_alone:
            return
        context = self._context
        names_of = context.rank_names
        try:
            everyone = gather_objects(trained, context.stage_group)
        except RuntimeError as error:
            if is_echo(error):
                raise
            raise InputError(
                f"requires_grad was changed on {names_of.name(context.rank)}, but not on all ranks that hold the same "
                f"parameters: some did not come to compare it within the config's timeout; {ADVICE}"
            ) from error
        refuse_unlike(names, everyone, [names_of.name(rank) for rank in context.stage_ranks])
