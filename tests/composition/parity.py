"""The suite's check: whether what a cell did is what it has to do."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.support.models import COMPUTE_DTYPES, TOLERANCES, difference
from tests.support.ranks import RankFailure

from .cells import GROWTH_INTERVAL, INITIAL_SCALE, MODES, NO_PIPE, Cell
from .reference import Reference, reference
from .training import OVERFLOW_AT, Outcome
from .workloads import UPDATES, find_workload

# By the format that a mode computes in: how far a parameter may end from where the reference does, relative to the way
# that it went; and a gradient norm from the reference's. A few times what all cells show; faults show 6e-2 to 1.
MOVEMENT = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float8_e4m3fn: 4e-1}
NORM = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float8_e4m3fn: 1e-1}
STILL = 1e-5
"""Parameters that move less, as attention's k.bias, have a gradient of zero but for rounding."""


@dataclass(frozen=True)
class Differences:
    """How far a cell is from its reference.

    Attributes:
        weights: the largest difference of a weight, relative to the largest weight.
        movement: the largest of a parameter's way, relative to that way.
        norm: the largest of a gradient norm, relative; 0 where none was asked for.
    """

    weights: float
    movement: float
    norm: float


def tolerances(cell: Cell, expected: Reference) -> Differences:
    """How far it may be.

    On top of what the mode rounds, a `reduce_dtype` below fp32 rounds each gradient twice, by half its eps: when it is
    sent, and when two ranks' are summed. Ways are sums of gradients, and norms are made of them: both may be off by
    eps, and a weight by eps x the way that it went.
    """
    mode, reduced = COMPUTE_DTYPES[cell.mode], getattr(torch, cell.reduce_dtype)
    eps = 0.0 if reduced == torch.float32 else torch.finfo(reduced).eps
    return Differences(TOLERANCES[cell.mode] + eps * expected.path, MOVEMENT[mode] + eps, NORM[mode] + eps)


def differences(outcome: Outcome, expected: Reference) -> Differences:
    """How far rank 0 is from the reference."""
    assert outcome.weights is not None
    norms = zip((step.grad_norm for step in outcome.steps), expected.norms, strict=False)
    apart = [abs(norm - other) / other for norm, other in norms if norm is not None and other is not None]
    return Differences(
        difference(outcome.weights, expected.model),
        max(_movements(outcome.weights, expected)),
        max(apart, default=0.0),
    )


def find_problems(cell: Cell, result: list[Outcome] | RankFailure) -> list[str]:
    """Everything that is wrong with what the ranks of `cell` did."""
    if isinstance(result, RankFailure):
        return [str(result)]
    expected = reference(cell.model, cell.clip_grad_norm, cell.scaled)
    kinds, whole = _kinds(result[0].weights), _kinds(expected.model.state_dict())
    if kinds != whole:
        return [f"the model is given back with {kinds.items() - whole.items()}"]
    return [
        *_between_ranks(result),
        *_from_reference(cell, result[0], expected),
        *_in_time(cell, result[0]),
        *_in_loss(result),
        *_in_format(cell, result),
    ]


def _kinds(weights: dict[str, torch.Tensor] | None) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in (weights or {}).items()}


def _movements(weights: dict[str, torch.Tensor], expected: Reference) -> Iterator[float]:
    for name, param in expected.model.named_parameters():
        way = (param.detach() - expected.start[name]).norm().item()
        if way > STILL * param.numel() ** 0.5:
            yield (weights[name] - param.detach()).norm().item() / way


def _between_ranks(result: Sequence[Outcome]) -> Iterator[str]:
    """What has to be the same bit by bit."""
    first = result[0]
    for rank, other in enumerate(result):
        for number, (mine, theirs) in enumerate(itertools.zip_longest(first.steps, other.steps)):
            if repr(mine) != repr(theirs):  # nan is nan here
                yield f"update {number}: rank 0 has {mine}, and rank {rank} {theirs}"
                break
        if other.digest != first.digest:
            yield f"rank {rank} ends with other weights than rank 0"


def _from_reference(cell: Cell, outcome: Outcome, expected: Reference) -> Iterator[str]:
    found, allowed = differences(outcome, expected), tolerances(cell, expected)
    for what, words in {
        "weights": "a weight differs from one process's",
        "movement": "a parameter moved otherwise than in one process",
        "norm": "a gradient norm differs from one process's",
    }.items():
        value, limit = getattr(found, what), getattr(allowed, what)
        if not value <= limit:  # nan is not
            yield f"{words} by {value:.1e}, which is more than {limit:.1e}"


def _in_time(cell: Cell, outcome: Outcome) -> Iterator[str]:
    """Which updates were skipped, what became of the scale, what was clipped."""
    skipped = [number for number, step in enumerate(outcome.steps) if step.skipped]
    if len(outcome.steps) != UPDATES or skipped != ([OVERFLOW_AT] if cell.scaled else []):
        yield f"there were {len(outcome.steps)} updates, and {skipped} were skipped"
    scales = [step.loss_scale for step in outcome.steps]
    if scales != _expected_scales(cell):
        yield f"the loss scales were {scales} and not {_expected_scales(cell)}"
    if cell.clip_grad_norm:
        norms = [step.grad_norm for step in outcome.steps if not step.skipped]
        bites = {norm is not None and norm > find_workload(cell.model).max_norm for norm in norms}
        if bites != {False, True}:
            yield f"clipping has to bite in some updates and not in others; the norms were {norms}"


def _expected_scales(cell: Cell) -> list[float]:
    """One overflow halves it, GROWTH_INTERVAL updates without one double it."""
    if not cell.scaled:
        return [1.0] * UPDATES
    low = UPDATES - OVERFLOW_AT - 1 if MODES[cell.mode].row.mode == "apex" else GROWTH_INTERVAL
    scales = [INITIAL_SCALE] * (OVERFLOW_AT + 1) + [INITIAL_SCALE / 2] * low
    return scales + [INITIAL_SCALE] * (UPDATES - len(scales))


def _in_loss(result: Sequence[Outcome]) -> Iterator[str]:
    """It falls: else equal weights would prove little."""
    losses = torch.tensor([outcome.losses for outcome in result]).mean(0)
    edge = max(1, len(losses) // 4)
    begin, end = losses[:edge].mean().item(), losses[-edge:].mean().item()
    if not end < begin or not math.isfinite(end):
        yield f"the loss went from {begin:.3f} to {end:.3f}"


def _in_format(cell: Cell, result: Sequence[Outcome]) -> Iterator[str]:
    wanted = {COMPUTE_DTYPES[cell.mode]}
    if wanted == {torch.float8_e4m3fn}:  # emulated in fp32; heads and small layers stay in bf16
        wanted = {torch.bfloat16, torch.float32}
    for rank, outcome in enumerate(result):
        if not outcome.dtypes and cell.pipeline != NO_PIPE:  # a stage may be an embedding, or norms
            continue
        if not (outcome.dtypes <= wanted and wanted - {torch.float32} <= outcome.dtypes):
            yield f"rank {rank} multiplied matrices in {outcome.dtypes}"
