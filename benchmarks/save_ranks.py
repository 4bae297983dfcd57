"""How long rank 0 of 256 waits in `engine.save(in_background=True)`, under fsdp, where each has a part of every tensor.

python -m benchmarks.save_ranks
python -m benchmarks.save_ranks --out benchmarks/results/save_ranks.md

One process is rank 0; torch's backend "fake" stands for the other ranks. What these describe of their parts is made
before (rank 0's, with other offsets) and unpickled where it would arrive, so that the joining costs what it does in a
run. The time on the wire is missing, and so is what the others wait.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import pickle
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import halfmesh
from halfmesh.checkpoint import agreement, full_state
from halfmesh.parallel import mesh

from .machine import describe, in_one_line, publish, table

ROWS, COLUMNS = 4, 4  # of a weight, on each rank


class OtherRanks:
    """What all ranks answer, made from what rank 0 has."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._forms = list[bytes]()
        self.joined = 0
        self.preparing_s = 0.0

    def gather_digests(self, value: Any) -> list[Any]:
        """Of `gather_results`: each rank has another digest of what it describes, and the same of the rest."""
        failure, result = value
        if not (isinstance(result, tuple) and len(result) == 3 and isinstance(result[0], bytes)):
            return [value] * self._size
        form, known, rest = result
        own = [hashlib.sha256(form + bytes([rank % 256, rank // 256])).digest() for rank in range(1, self._size)]
        return [(failure, (digest, known, rest)) for digest in (form, *own)]

    def gather_forms(self, value: Any) -> list[Any]:
        """Of `JoinedForms`: what ranks describe. Of others: rank 0's."""
        if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[0], dict)):
            return [value] * self._size
        if not self._forms:
            start = time.perf_counter()
            self._forms = [pickle.dumps(self._moved(value, rank)) for rank in range(1, self._size)]
            self.preparing_s += time.perf_counter() - start
        self.joined += 1
        return [value] + [pickle.loads(form) for form in self._forms]

    def _moved(self, form: Any, rank: int) -> Any:
        described, *rest = form
        moved = {
            name: (shape, dtype, [((at[0] + rank * sizes[0], *at[1:]) if at else at, sizes) for at, sizes in boxes])
            for name, (shape, dtype, boxes) in described.items()
        }
        return (moved, *rest)


class Shift(nn.Module):
    """Adds the mean of its weight: a cheap forward, for it is the save that is timed."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, COLUMNS))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + self.weight.mean()


@contextlib.contextmanager
def simulated_ranks(size: int) -> Iterator[OtherRanks]:
    """A scope in which this process is rank 0 of `size`."""
    others = OtherRanks(size)
    where = {"RANK": "0", "WORLD_SIZE": str(size), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(size)}
    with (
        mock.patch.dict(os.environ, where),
        mock.patch.object(agreement, "gather_objects", others.gather_digests),
        mock.patch.object(mesh, "gather_objects", others.gather_forms),
        mock.patch.object(full_state, "is_simulated", return_value=False),
    ):
        dist.init_process_group("fake", rank=0, world_size=size)
        try:
            yield others
        finally:
            dist.destroy_process_group()


def time_saves(size: int, parameters: int, saves: int, folder: str) -> list[tuple[float, bool]]:
    """Of each save: the seconds until `engine.save` returns, and True if the ranks sent what they hold."""
    model = nn.Sequential(*(Shift(ROWS * size) for _ in range(parameters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    timed = []
    with (
        simulated_ranks(size) as others,
        halfmesh.initialize(model, optimizer, config={"parallel": {"data": "fsdp"}}, device="cpu") as engine,
    ):
        for _ in range(saves):
            engine.zero_grad()
            engine.backward(engine(torch.randn(2, COLUMNS)).square().mean())
            engine.step()
            joined, preparing_s, start = others.joined, others.preparing_s, time.perf_counter()
            engine.save(folder, keep=1, in_background=True)
            seconds = time.perf_counter() - start - (others.preparing_s - preparing_s)
            timed.append((seconds, others.joined > joined))
            engine.wait_for_save()
    return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--parameters", type=int, default=1000, help="AdamW has two tensors more for each")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    logging.getLogger("halfmesh").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="save_ranks_") as folder:
        timed = time_saves(chosen.ranks, chosen.parameters, chosen.saves, folder)
    title = "# What a save costs rank 0 of many"
    about = (
        f"`python -m benchmarks.save_ranks`: {chosen.ranks} ranks under fsdp, {3 * chosen.parameters} tensors that\n"
        f"each rank has a part of; seconds of rank 0's main thread in `engine.save(in_background=True)`.\n"
        f"{in_one_line(describe())}."
    )
    rows = [[n, f"{seconds:.2f}", "yes" if sent else "no"] for n, (seconds, sent) in enumerate(timed, 1)]
    publish(chosen.out, title, about, table(["save", "seconds", "ranks sent what they hold"], rows))


if __name__ == "__main__":
    main()
