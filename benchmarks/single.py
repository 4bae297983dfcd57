"""Works of one process: every contender measured beside the others, and its steps counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .contenders import Factory, Setup, make_again, make_bare, make_fused, make_halfmesh, make_loop
from .counts import count_calls, count_memory, count_ops
from .harness import BARE, REQUIRED, Contender, Result, Row, complaint, take_turns, warm_up
from .peers import ACCELERATE, DEEPSPEED, FABRIC, make_accelerate, make_deepspeed, make_fabric
from .works import WORKS

OURS: list[tuple[str, Factory]] = [
    (REQUIRED[0], make_loop),
    (REQUIRED[1], make_again),
    (REQUIRED[2], make_fused),
    (REQUIRED[3], make_halfmesh),
    (BARE, make_bare),
]
PEERS: list[tuple[str, Factory]] = [(ACCELERATE, make_accelerate), (FABRIC, make_fabric)]
CLIPPING_PEERS: list[tuple[str, Factory]] = [*PEERS, (DEEPSPEED, make_deepspeed)]
"""DeepSpeed stands beside loops that clip, in fp32 and in fp16: the two that say most about its own part of a step."""

LOOKS = 101
"""Steps in which host reads are counted where steps are short: halfmesh has a look at its verdicts once in 50."""


def measure(name: str, precision: str, clip: float, rounds: int, quick: bool = False) -> Result:
    """One work in one precision."""
    torch.set_num_threads(1)
    work = WORKS[name]
    setup = Setup.of(work, precision, clip)
    makers = OURS + (CLIPPING_PEERS if clip else PEERS)
    contenders, rows = fair([(label, lambda make=make: make(setup)) for label, make in makers], precision, work.warm)  # type: ignore[misc]
    steps = max(1, work.steps[precision] // (5 if quick else 1))
    timed = take_turns(contenders, rounds, steps)
    slow = precision == "fp16" and name != "mlp"
    for row, contender in zip(timed, contenders, strict=True):
        place = next(known for known in rows if known.name == row.name)
        place.wall, place.cpu = row.wall, row.cpu
        place.counts = {"Python calls": count_calls(contender, 1 if slow else 20 if name == "mlp" else 5)}
        place.counts |= count_ops(contender, 1 if slow else LOOKS if name == "mlp" else 4)
        close(contender)
    for row, (_, make) in zip(rows, makers, strict=True):
        if not row.missing:
            row.counts |= count_memory(lambda make=make: make(setup), [setup.x, setup.y])  # type: ignore[misc]
    return Result(name, work.title, precision, rows, clip, steps)


def fair(
    makers: Sequence[tuple[str, Callable[[], Contender]]], precision: str, warm: int
) -> tuple[list[Contender], list[Row]]:
    """The contenders that can be made and that compute the same as the first one, after `warm` steps of each; and a
    row for every maker, with the reason where it is missing.

    Raises:
        RuntimeError: one of ours computes something else. A peer's fault is a line of the table.
    """
    contenders, rows, first_loss = [], [], None
    for label, make in makers:
        row = Row(label)
        rows.append(row)
        try:
            contender = make()
            row.loss, row.dtype = warm_up(contender, warm)
            first_loss = row.loss if first_loss is None else first_loss
            row.missing = complaint(first_loss, row.loss, row.dtype, precision)
        except Exception as error:  # another version of a peer may fail in any way
            if label in REQUIRED:
                raise
            row.missing = str(error).partition("\n")[0] or type(error).__name__
            continue
        row.note = contender.note
        if not row.missing:
            contenders.append(contender)
        elif label in REQUIRED:
            raise RuntimeError(f"{label}: {row.missing}")
        else:
            close(contender)
    return contenders, rows


def close(contender: Contender) -> None:
    if contender.close is not None:
        contender.close()
