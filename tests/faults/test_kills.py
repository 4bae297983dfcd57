"""SIGKILL at random moments costs steps, and nothing else. KILLS=50 for more of them (`make test-kills`).

Two ranks train with dropout and shuffling, and save in the background every few steps. A rank, or both, get SIGKILL
between steps, or as soon as a save has begun. Then the program starts again, with `resume="auto"`, as torchrun or SLURM
would start it, until it is through.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfmesh.distributed.local_ranks import LocalRanks
from tests.faults import checkpoint_program
from tests.support.ranks import PRELOAD

KILLS = int(os.environ.get("KILLS", "3"))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kills.md"
EVERY = 3


@dataclass
class Fall:
    """So many saves (if `saving`) or steps after the start, and `delay_s` after that, `ranks` get SIGKILL: in a save or
    not, at the last step of any rank. Both go on from `back_to`; the newest checkpoint is of step `complete`."""

    saving: bool
    count: int
    delay_s: float
    ranks: tuple[int, ...]
    in_save: bool = False
    at: int = 0
    complete: int = 0
    back_to: int = -1

    @staticmethod
    def draw(chance):
        saving = chance.random() < 0.5
        count = chance.randint(1, 4) if saving else chance.randint(0, 20)
        return Fall(saving, count, chance.random() * (0.01 if saving else 0.02), chance.choice([(0,), (1,), (0, 1)]))


def train(options):
    checkpoint_program.main(**options)


class Program:
    """A run of two ranks in `folder`, which may take several starts."""

    def __init__(self, folder):
        self.out, self.checkpoints, self.log = folder / "weights.pt", folder / "checkpoints", folder / "log"
        self.log.mkdir(parents=True)
        self.checkpoints.mkdir()

    def start(self, fall, saves=True):
        """Start it, and kill it. False if it came to its end."""
        options = {"log": str(self.log), "out": str(self.out), "epochs": 8, "pause": 0.01}
        options |= {"folder": str(self.checkpoints), "every": EVERY} if saves else {}
        with LocalRanks(2, preload=PRELOAD) as ranks:
            ranks.begin(train, (options,), timeout=90)
            if fall is not None and self._kill(ranks, fall):
                return True
            ranks.wait()
        return False

    def _kill(self, ranks, fall):
        began, before, saves = time.time_ns(), [len(self._lines(rank)) for rank in range(2)], set()
        while not any(pipe.poll() for _, pipe in ranks._members) and time.monotonic() < ranks._deadline:
            saves |= self._unfinished(began)
            steps = min(len(self._lines(rank)) - before[rank] for rank in range(2))
            if len(saves) < fall.count if fall.saving else steps <= fall.count:
                time.sleep(0.0005)
                continue
            time.sleep(fall.delay_s)
            for rank in fall.ranks:
                ranks._members[rank][0].kill()
            fall.in_save = bool(self._unfinished(began))
            for _, pipe in ranks._members:
                pipe.poll(5)  # who has lost the other ends by itself, or the launcher ends it
            ranks.end()
            fall.complete = max((int(path.name[5:13]) for path in self.checkpoints.glob("step-*")), default=0)
            fall.at = max(int(self._lines(rank)[-1].removeprefix("from ").split()[0]) for rank in range(2))
            return True
        return False

    def _lines(self, rank):
        path = self.log / f"rank-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def _unfinished(self, began):
        """Folders that are being written or removed since then."""
        found = set()
        for entry in os.scandir(self.checkpoints):
            with suppress(FileNotFoundError):
                if entry.name.endswith(".tmp") and entry.stat().st_mtime_ns > began:
                    found.add(entry.name)
        return found

    def began_from(self):
        """For each rank: the steps that its starts went on from."""
        return [[int(line[5:]) for line in self._lines(rank) if line.startswith("from ")] for rank in range(2)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(60 + 40 * KILLS)
def test_a_run_that_is_killed_resumes_from_the_newest_complete_checkpoint(tmp_path):
    whole = Program(tmp_path / "whole")
    whole.start(None, saves=False)
    chance, falls, runs = random.Random(KILLS), [], 0
    while len(falls) < KILLS:
        runs += 1
        program, mine = Program(tmp_path / f"run-{runs}"), []
        while program.start(fall := Fall.draw(chance) if len(falls) + len(mine) < KILLS else None):
            mine.append(fall)
        first, second = program.began_from()
        assert first == second
        for fall, back_to in zip(mine, first[1:], strict=True):
            fall.back_to = back_to
        falls += mine
        found = torch.load(program.out)
        assert all(torch.equal(value, found[name]) for name, value in torch.load(whole.out).items()), program.out
    lost = [fall.at - fall.back_to for fall in falls]
    assert all(fall.back_to == fall.complete for fall in falls), falls
    assert 0 <= min(lost) <= max(lost) <= 2 * EVERY, falls  # since the last save, and the one that was being written
    if KILLS >= 20:
        within = sum(fall.in_save for fall in falls)
        assert within >= KILLS // 5, "too few fell into a save"
        RESULTS.write_text(
            f"# Kills\n\n`make test-kills`: {KILLS} times SIGKILL in {runs} runs of two ranks, which save in the "
            f'background every {EVERY} steps\nand start again with `resume="auto"`. {within} fell while a checkpoint '
            f"was written or removed. Each start went on from the\nnewest complete checkpoint; lost were "
            f"{sum(lost) / len(lost):.1f} steps on average, {max(lost)} at most. The weights of every run\nwere in the "
            "end those of a run that was not killed, bit by bit.\n"
        )
