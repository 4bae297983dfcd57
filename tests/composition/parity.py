"""What the suite does with a cell: it is proven as `halfmesh verify` proves a layout, within tolerances of its mode; or
trained, by tests of overflows and of keys that change no weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import halfmesh
from halfmesh.verify import phases
from halfmesh.verify.compare import Measures
from halfmesh.verify.record import Store
from tests.support.models import COMPUTE_DTYPES, TOLERANCES
from tests.support.proofs import FormatAlone, StructureAlone, TeamWork, prove
from tests.support.ranks import find_obstacle, rank_device, run_ranks

from .cells import NO_PIPE, Cell
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


def build(model: str, chunks: int, seed: int) -> Any:
    """What `halfmesh verify` is given. The samples of an update are the same in every layout, in `chunks` batches."""
    workload = find_workload(model)
    torch.manual_seed(torch.initial_seed() + 1000 * seed)
    parts = [part.roll(2 * seed * SAMPLES, 0).split(SAMPLES // chunks) for part in workload.data()]
    return workload.make(), list(zip(*parts, strict=True)), criterion


def find_problems(cell: Cell, what: str = "both", seed: int = 0, *keys: str) -> list[str]:
    """Everything that is wrong with `cell`, which has other keys, too; `what` is proven: see `WORK`."""
    skip_obstacles(cell)
    seen, inner = Differences(), phases.judge

    def judge(store: Store, measures: Sequence[Measures], *rest: Any) -> Any:
        seen.see(store, measures)
        return inner(store, measures, *rest)

    chunks = cell.data * cell.gradient_accumulation
    optimizer = partial(make_optimizer, lr=find_workload(cell.model).lr)
    # Where only what is sent is rounded, little is allowed of a parameter's way, which has to be long.
    updates = UPDATES if cell.mode == "none" and cell.reduce_dtype != "float32" else 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(phases, "judge", judge)
        given = partial(build, cell.model, chunks, seed)
        options = {"optimizer": optimizer, "updates": updates, "overrides": keys}
        report = prove(cell.config(), given, cell.world_size, WORK[what], **options)
    assert report.problems or min(phase.compared for phase in report.phases) > 10
    # A `reduce_dtype` below fp32 rounds each gradient twice, by half its eps: sent, and when two ranks' are summed.
    mode, reduced = COMPUTE_DTYPES[cell.mode], getattr(torch, cell.reduce_dtype)
    eps = 0.0 if reduced == torch.float32 else torch.finfo(reduced).eps
    limits = {"weights": TOLERANCES[cell.mode] + eps, "movement": MOVEMENT[mode] + eps, "norm": NORM[mode] + eps}
    found = vars(seen)
    beyond = [f"{name}: {found[name]:.1e} > {limit:.1e}" for name, limit in limits.items() if not found[name] <= limit]
    return [*report.problems, *([] if report.first is None else [str(report)]), *beyond]


def make_optimizer(params: Any, lr: float) -> optim.Optimizer:
    return optim.SGD(params, lr=lr, momentum=0.9)


def make_engine(cell: Cell, rank: int, dropout: float = 0.0) -> halfmesh.Engine:
    """Each rank begins with other weights; rank 0's count."""
    workload = find_workload(cell.model)
    model = workload.build(seed=rank)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = dropout
        if hasattr(module, "dropout"):
            module.dropout = dropout
    optimizer = make_optimizer(model.parameters(), workload.lr)
    loader = DataLoader(TensorDataset(*workload.data()), SAMPLES // (cell.data * cell.gradient_accumulation))
    return halfmesh.initialize(model, optimizer, criterion, loader, cell.config(), device=rank_device())


def train(engine: halfmesh.Engine, updates: int) -> None:
    for x, y in engine.dataloader:
        engine.zero_grad()
        engine.backward(engine.criterion(engine(x), y))
        updates -= engine.step() is not None
        if not updates:
            return


def skip_obstacles(cell: Cell) -> None:
    if obstacle := find_obstacle(cell.world_size, sends=cell.pipeline != NO_PIPE):
        pytest.skip(obstacle)


def run_cell(cell: Cell, job: Any, *args: Any, **options: Any) -> Any:
    """What `job` returns on the ranks of `cell`, where it can run."""
    skip_obstacles(cell)
    return run_ranks(job, cell.world_size, *args, **options)


def digest(weights: dict[str, torch.Tensor]) -> str:
    """A short text that is the same for the same bits."""
    hashed = hashlib.sha256()
    for name, value in weights.items():
        hashed.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        hashed.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
