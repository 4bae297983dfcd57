"""SIGKILL at random moments costs steps, and nothing else. KILLS=50 for more of them (`make test-kills`).

Two ranks train with dropout and shuffling, and save in the background every few steps. A rank, or both, get SIGKILL
between steps, or as soon as a save has begun. Then the program starts again, with `resume="auto"`, as torchrun or SLURM
would start it, until it is through.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from halfmesh.distributed.local_ranks import start_server
from tests.support.ranks import PRELOAD

KILLS = int(os.environ.get("KILLS", "5"))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kills.md"
EVERY, EPOCHS, PAUSE_S = 3, 8, 0.01
LIMIT_S = 90.0
"""Seconds that one start may take."""


@dataclass(frozen=True)
class Kill:
    """So many saves (if `saving`) or steps after the start, and `delay_s` after that, `ranks` get SIGKILL."""

    saving: bool
    count: int
    delay_s: float
    ranks: tuple[int, ...]

    @staticmethod
    def draw(chance: random.Random) -> Kill:
        saving = chance.random() < 0.5
        count = chance.randint(1, 4) if saving else chance.randint(0, 20)
        return Kill(saving, count, chance.random() * (0.01 if saving else 0.02), chance.choice([(0,), (1,), (0, 1)]))


@dataclass
class Fall:
    """What a kill has cost: it fell into a save or not, at the last step that any rank has made; `complete` is the step
    of the newest checkpoint that there was, `back_to` the one that both ranks went on from."""

    kill: Kill
    in_save: bool
    at: int
    complete: int
    back_to: int = -1

    @property
    def lost(self) -> int:
        return self.at - self.back_to


class Program:
    """A run of two ranks in `folder`, which may take several starts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.starts, self.started_at = folder, 0, 0
        self.out, self.checkpoints, self.log = folder / "weights.pt", folder / "checkpoints", folder / "log"
        self.log.mkdir(parents=True)
        self.checkpoints.mkdir()

    def start(self, kill: Kill | None, saves: bool = True) -> Fall | None:
        """Start it, and kill it. None if it came to its end.

        Raises:
            AssertionError: it ended with an error of its own, or took too long.
        """
        self.starts += 1
        self.started_at = time.time_ns()
        context = multiprocessing.get_context("forkserver")
        start_server(PRELOAD)
        options = {"log": str(self.log), "out": str(self.out), "epochs": EPOCHS, "pause": PAUSE_S}
        options |= {"folder": str(self.checkpoints), "every": EVERY} if saves else {}
        arguments = [(rank, str(self.folder), self.starts, options) for rank in range(2)]
        ranks = [context.Process(target=run_rank, args=given, daemon=True) for given in arguments]
        for process in ranks:
            process.start()
        try:
            return self._watch(ranks, kill)
        finally:
            for process in ranks:
                process.kill()
                process.join()

    def _watch(self, ranks, kill):
        until = time.monotonic() + LIMIT_S
        moments = None if kill is None else self._moments(kill)
        while any(process.is_alive() for process in ranks):
            assert time.monotonic() < until, f"took longer than {LIMIT_S:g} s:\n{self.output()}"
            if moments is not None and next(moments):
                time.sleep(kill.delay_s)
                if not all(process.is_alive() for process in ranks):
                    break
                for rank in kill.ranks:
                    ranks[rank].kill()
                in_save = bool(self._unfinished())
                for process in ranks:  # who has lost the other ends by itself, or the launcher ends it
                    process.join(5)
                for process in ranks:  # and saves nothing more
                    process.kill()
                    process.join()
                complete = max((int(path.name[5:13]) for path in self.checkpoints.glob("step-*")), default=0)
                at = max(int(self._lines(rank)[-1].removeprefix("from ").split()[0]) for rank in range(2))
                return Fall(kill, in_save, at, complete)
            if any(process.exitcode not in (None, 0) for process in ranks):
                break
            time.sleep(0.0005)
        for process in ranks:
            process.join(20)
        assert [process.exitcode for process in ranks] == [0, 0], self.output()
        return None

    def _moments(self, kill):
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
        path = self.log / f"rank-{rank}"
        return path.read_text().splitlines() if path.exists() else []

    def _unfinished(self) -> set[str]:
        """Folders that are being written or removed since the last start."""
        found = set()
        for entry in os.scandir(self.checkpoints):
            with suppress(FileNotFoundError):
                if entry.name.endswith(".tmp") and entry.stat().st_mtime_ns > self.started_at:
                    found.add(entry.name)
        return found

    def output(self) -> str:
        """The end of what the ranks have said at the last start."""
        return "\n".join((self.folder / f"out-{self.starts}-{rank}").read_text()[-3000:] for rank in range(2))

    def began_from(self) -> list[list[int]]:
        """For each rank: the steps that its starts went on from."""
        return [[int(line[5:]) for line in self._lines(rank) if line.startswith("from ")] for rank in range(2)]


def run_rank(rank, folder, start, options):
    import torch.distributed as dist

    text = os.open(f"{folder}/out-{start}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(text, 1)
    os.dup2(text, 2)
    torch.set_num_threads(1)
    from tests.faults import checkpoint_program

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting-{start}", rank=rank, world_size=2)
    checkpoint_program.main(**options)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(60 + 40 * KILLS)
def test_a_run_that_is_killed_resumes_from_the_newest_complete_checkpoint(tmp_path):
    whole = Program(tmp_path / "whole")
    assert whole.start(None, saves=False) is None
    chance, falls, runs = random.Random(KILLS), [], 0
    while len(falls) < KILLS:
        runs += 1
        program, mine = Program(tmp_path / f"run-{runs}"), []
        while fall := program.start(Kill.draw(chance) if len(falls) + len(mine) < KILLS else None):
            mine.append(fall)
        first, second = program.began_from()
        assert first == second
        for fall, back_to in zip(mine, first[1:], strict=True):
            fall.back_to = back_to
        falls += mine
        found = torch.load(program.out)
        assert all(torch.equal(value, found[name]) for name, value in torch.load(whole.out).items()), program.out
    for fall in falls:
        assert fall.back_to == fall.complete, fall
        assert 0 <= fall.lost <= 2 * EVERY, fall  # those since the last save, and the one that was being written
    if KILLS >= 20:
        assert sum(fall.in_save for fall in falls) >= KILLS // 5, "too few fell into a save"
        RESULTS.write_text(table(falls, runs))


def table(falls, runs):
    """As a page."""
    lost = [fall.lost for fall in falls]
    within = sum(fall.in_save for fall in falls)
    lines = [
        "# Kills",
        "",
        f"`make test-kills`: {len(falls)} times SIGKILL in {runs} run(s) of two ranks, which save in the background",
        f'every {EVERY} steps and start again with `resume="auto"`. {within} fell while a checkpoint was written or',
        f"removed. Each start went on from the newest complete checkpoint; lost were {sum(lost) / len(lost):.1f} steps",
        f"on average, {max(lost)} at most ({EVERY} since the last save, and {EVERY} where that was not complete). The",
        "weights of every run were in the end those of a run that was not killed, bit by bit.",
        "",
        "| | wait for | killed | a save was under way | at step | went on from | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, fall in enumerate(falls, 1):
        kill = fall.kill
        moment = f"{'save' if kill.saving else 'step'} {kill.count}, then {1000 * kill.delay_s:.0f} ms"
        who = "both" if len(kill.ranks) == 2 else f"rank {kill.ranks[0]}"
        in_save = "yes" if fall.in_save else "no"
        lines.append(f"| {number} | {moment} | {who} | {in_save} | {fall.at} | {fall.back_to} | {fall.lost} |")
    return "\n".join(lines) + "\n"
