"""Kills a training program again and again, starts it again, and says what that has cost.

Two ranks train with dropout and shuffling, and save in the background every few steps. A rank, or both, get SIGKILL at
random moments: between steps, or as soon as a save has begun. Then the program starts again, with `resume="auto"`, as
torchrun, SLURM or a loop in a shell would do, until it is through.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch

EVERY = 3
EPOCHS = 8
PAUSE_S = 0.01
LIMIT_S = 90.0
"""Seconds that one start may take."""
PRELOAD = ["torch", "torch.distributed.checkpoint", "torch.distributed.tensor.parallel", "torch.distributed.fsdp"]
PRELOAD += ["numpy", "pydantic", "yaml", "halfmesh.assembly", "halfmesh.engine.checkpointing.automatic"]


@dataclass(frozen=True)
class Kill:
    """A moment, and who gets SIGKILL then.

    Attributes:
        saving: a save has begun, else: a step was made.
        count: so many saves, or steps, after the start.
        delay_s: after that.
        ranks: who.
    """

    saving: bool
    count: int
    delay_s: float
    ranks: tuple[int, ...]

    @staticmethod
    def draw(chance: random.Random) -> Kill:
        """Every second one while it is saved."""
        saving = chance.random() < 0.5
        count = chance.randint(1, 4) if saving else chance.randint(0, 20)
        return Kill(saving, count, chance.random() * (0.08 if saving else 0.02), chance.choice([(0,), (1,), (0, 1)]))


@dataclass(frozen=True)
class Fall:
    """What a kill has cost.

    Attributes:
        kill: when, and who.
        in_save: whether a checkpoint was being written, or removed.
        at: the last step that any rank has made.
        back_to: the step that both ranks went on from.
        complete: the newest checkpoint that there was.
    """

    kill: Kill
    in_save: bool
    at: int
    back_to: int
    complete: int

    @property
    def lost(self) -> int:
        """Steps."""
        return self.at - self.back_to


class Program:
    """A run of two ranks in `folder`, which may take several starts."""

    def __init__(self, folder: Path) -> None:
        self.out = folder / "weights.pt"
        self._folder = folder
        self._starts = 0
        self.checkpoints, self._log = folder / "checkpoints", folder / "log"
        self._log.mkdir(parents=True)
        self.checkpoints.mkdir()

    def start(self, kill: Kill | None, saves: bool = True) -> bool | None:
        """Start it; None if it came to its end, else, after the kill, whether it fell into a save.

        Raises:
            AssertionError: it ended with an error of its own, or took too long.
        """
        self._starts += 1
        self._started_at = time.time_ns()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        forkserver.ensure_running()
        options = {"log": str(self._log), "out": str(self.out), "epochs": EPOCHS, "pause": PAUSE_S}
        options |= {"folder": str(self.checkpoints), "every": EVERY} if saves else {}
        ranks = [
            context.Process(target=_rank, args=(rank, str(self._folder), self._starts, options), daemon=True)
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        try:
            return self._watch(ranks, kill)
        finally:
            for process in ranks:
                process.kill()
                process.join()

    def _watch(self, ranks: list[Any], kill: Kill | None) -> bool | None:
        until = time.monotonic() + LIMIT_S
        moment = None if kill is None else self._moments(kill)
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < until, f"took longer than {LIMIT_S:g} s:\n{self.output()}"
            if moment is not None and kill is not None and next(moment):
                time.sleep(kill.delay_s)
                if not all(process.is_alive() for process in ranks):
                    break
                for rank in kill.ranks:
                    ranks[rank].kill()
                in_save = bool(self._unfinished())
                for process in ranks:  # who has lost the other ends by itself, or the launcher ends it
                    process.join(5)
                return in_save
            if any(process.exitcode not in (None, 0) for process in ranks):
                break
            time.sleep(0.0005)
        for process in ranks:
            process.join(20)
        assert [process.exitcode for process in ranks] == [0, 0], self.output()
        return None

    def _moments(self, kill: Kill) -> Any:
        """Yields until it is the kill's moment."""
        before = [len(self._lines(rank)) for rank in range(2)]
        saves: set[str] = set()
        while True:
            if kill.saving:
                saves |= self._unfinished()
                yield len(saves) >= kill.count
            else:
                yield all(len(self._lines(rank)) - before[rank] > kill.count for rank in range(2))

    def _lines(self, rank: int) -> list[str]:
        path = self._log / f"rank-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def _unfinished(self) -> set[str]:
        """Folders that are being written or removed since the last start."""
        found = set()
        for entry in os.scandir(self.checkpoints):
            with suppress(FileNotFoundError):
                if entry.name.endswith(".tmp") and entry.stat().st_mtime_ns > self._started_at:
                    found.add(entry.name)
        return found

    def output(self) -> str:
        """The end of what the ranks have said at the last start."""
        return "\n".join((self._folder / f"out-{self._starts}-{rank}").read_text()[-3000:] for rank in range(2))

    def last_step(self) -> int:
        """The last that any rank has made since the last start."""
        return max(int(self._lines(rank)[-1].removeprefix("from ").split()[0]) for rank in range(2))

    def starts_at(self) -> list[list[int]]:
        """For each rank: the steps that its starts went on from."""
        return [[int(line[5:]) for line in self._lines(rank) if line.startswith("from ")] for rank in range(2)]

    def complete(self) -> int:
        """The step of the newest complete checkpoint; 0 where there is none."""
        return max((int(path.name[5:13]) for path in self.checkpoints.glob("step-*")), default=0)


def kill_and_restart(folder: Path, kills: int, seed: int) -> tuple[list[Fall], int]:
    """So many kills, spread over as many runs as that takes; each run comes to its end. Returns what each has cost, and
    the number of runs.

    Raises:
        AssertionError: something was not as it should be.
    """
    chance, falls, runs = random.Random(seed), [], 0
    whole = _uninterrupted(folder / "whole")
    while len(falls) < kills:
        runs += 1
        program = Program(folder / f"run-{runs}")
        pending: list[tuple[Kill, bool, int, int]] = []
        while True:
            kill = Kill.draw(chance) if len(falls) + len(pending) < kills else None
            fell = program.start(kill)
            if fell is None:
                break
            assert kill is not None
            pending.append((kill, fell, program.last_step(), program.complete()))
        falls += _falls(program, pending)
        _refuse_difference(program.out, whole)
    return falls, runs


def _falls(program: Program, pending: list[tuple[Kill, bool, int, int]]) -> list[Fall]:
    """With where each start after a kill went on from."""
    starts = program.starts_at()
    assert starts[0] == starts[1], starts
    assert len(starts[0]) == len(pending) + 1, starts
    return [
        Fall(kill, in_save, at, back_to, complete)
        for (kill, in_save, at, complete), back_to in zip(pending, starts[0][1:], strict=True)
    ]


def _uninterrupted(folder: Path) -> dict[str, torch.Tensor]:
    program = Program(folder)
    assert program.start(None, saves=False) is None
    return dict(torch.load(program.out))


def _refuse_difference(out: Path, whole: dict[str, torch.Tensor]) -> None:
    found = torch.load(out)
    different = [name for name, value in whole.items() if not torch.equal(value, found[name])]
    assert not different, f"{out}: not those of the run that was not killed: {different}"


def _rank(rank: int, folder: str, start: int, options: dict[str, Any]) -> None:
    import torch.distributed as dist

    text = os.open(f"{folder}/out-{start}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(text, 1)
    os.dup2(text, 2)
    torch.set_num_threads(1)
    from tests.support import checkpoint_program

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{start}", rank=rank, world_size=2)
    checkpoint_program.main(**options)
    dist.destroy_process_group()
