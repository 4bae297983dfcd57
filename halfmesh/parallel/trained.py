"""Whether ranks that hold the same parameters train the same ones of them (`requires_grad`).

What is trained decides which gradients are summed together: where ranks differ in it, gradients of unlike layers are.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import InputError

ADVICE = (
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
        f"frozen on {', '.join(freezes)}{more}; {ADVICE}"
    )
