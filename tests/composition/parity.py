"""The suite's check: a cell is proven as `halfmesh verify` proves a layout, within the tolerances of its mode."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

from halfmesh.verify import phases
from halfmesh.verify.compare import Measures
from halfmesh.verify.record import Store
from tests.support.models import COMPUTE_DTYPES, TOLERANCES
from tests.support.proofs import FormatAlone, StructureAlone, TeamWork, prove

from .cells import Cell
from .training import make_optimizer, skip_obstacles
from .workloads import SAMPLES, UPDATES, criterion, find_workload

# By the format that a mode computes in: how far a parameter may end from where the reference does, relative to the way
# that it went; and a gradient norm from the reference's. Verify allows as much as rounding explains; this is the most.
MOVEMENT = {torch.float32: 5e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1, torch.float8_e4m3fn: 4e-1}
NORM = {torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 4e-2, torch.float8_e4m3fn: 1e-1}
STILL = 1e-5
"""Parameters that move less, as attention's k.bias, have a gradient of zero but for rounding."""
WORK = {"structure": StructureAlone, "format": FormatAlone, "both": TeamWork}
"""What is proven: the layout in float64, the mode in the layout, or one after the other."""


@dataclass
class Differences:
    """The largest that were seen: in the end, of a weight, relative to the largest weight, and of a parameter's way,
    relative to that; of a gradient norm, relative."""

    weights: float = 0.0
    movement: float = 0.0
    norm: float = 0.0

    def see(self, store: Store, measures: Sequence[Measures]) -> None:
        """What the ranks have measured."""
        last = max(key.update for key in store.tensors if key.what == "update")
        kept = {
            key.name: (value.double(), start.double())
            for key, value in store.tensors.items()
            if (key.update, key.what) == (last, "update")
            and (start := store.tensors.get(key._replace(update=-1))) is not None
        }
        largest = max(value.abs().max().item() for value, _ in kept.values())
        for rank in measures:
            for key, ways in rank.tensors.items():
                if (key.update, key.what) == (last, "update"):
                    (value, start), apart = kept[key.name], math.sqrt(ways[""].error)
                    self.weights = max(self.weights, apart / largest)
                    way = (value - start).norm().item()
                    if way > STILL * value.numel() ** 0.5:
                        self.movement = max(self.movement, apart / way)
            for at, value in rank.figures.items():
                if at[-1] == "grad_norm" and math.isfinite(value) and (expected := store.figures.get(at)):
                    self.norm = max(self.norm, abs(value / expected - 1))


def tolerances(cell: Cell) -> Differences:
    """How far a cell may be. A `reduce_dtype` below fp32 rounds each gradient twice, by half its eps: when it is sent,
    and when two ranks' are summed."""
    mode, reduced = COMPUTE_DTYPES[cell.mode], getattr(torch, cell.reduce_dtype)
    eps = 0.0 if reduced == torch.float32 else torch.finfo(reduced).eps
    return Differences(TOLERANCES[cell.mode] + eps, MOVEMENT[mode] + eps, NORM[mode] + eps)


def build(model: str, chunks: int, seed: int) -> Any:
    """What `halfmesh verify` is given. The samples of an update are the same in every layout, in `chunks` batches."""
    workload = find_workload(model)
    torch.manual_seed(torch.initial_seed() + 1000 * seed)
    parts = [part.roll(2 * seed * SAMPLES, 0).split(SAMPLES // chunks) for part in workload.data()]
    return workload.make(), list(zip(*parts, strict=True)), criterion


def find_problems(cell: Cell, what: str = "both", seed: int = 0) -> list[str]:
    """Everything that is wrong with `cell`; `what` is proven: see `WORK`."""
    skip_obstacles(cell)
    seen, inner = Differences(), phases.judge

    def judge(store: Store, measures: Sequence[Measures], *rest: Any) -> Any:
        seen.see(store, measures)
        return inner(store, measures, *rest)

    chunks = cell.data * cell.gradient_accumulation
    optimizer = partial(make_optimizer, lr=find_workload(cell.model).lr)
    # Where nothing else is rounded, a way is compared with the rounding of weights: it has to be long.
    updates = UPDATES if cell.mode == "none" and what == "both" else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "judge", judge)
        given = partial(build, cell.model, chunks, seed)
        report = prove(cell.config(), given, cell.world_size, WORK[what], optimizer=optimizer, updates=updates)
    assert report.problems or min(phase.compared for phase in report.phases) > 10
    return [*report.problems, *([] if report.first is None else [str(report)]), *_beyond(seen, tolerances(cell))]


def _beyond(seen: Differences, allowed: Differences) -> Iterator[str]:
    for what, limit in vars(allowed).items():
        if not (found := getattr(seen, what)) <= limit:
            yield f"{what}: differs by {found:.1e}, which is more than {limit:.1e}"
