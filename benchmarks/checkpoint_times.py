"""How long training waits for a checkpoint, beside torch.save and torch.load of the same state.

python -m benchmarks.checkpoint_times                 # a transformer of about 90 M parameters with AdamW: 1 GB
python -m benchmarks.checkpoint_times --folder /data  # on another disk

Rows take turns within a round, and are divided by torch.save of the same round, loading by torch.load with
load_state_dict. torch.save does not wait for the disk (no fsync), compares no checksums and renames nothing: what is
divided by is the least that a save can be.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import halfmesh

from .harness import Result, Row, rotated
from .report import checkpoint_table
from .works import make_transformer, token_loss, tokens

TORCH = "torch.save"
AGAIN = "torch.save again (A/A)"
WAITING = "engine.save"
BACKGROUND = "engine.save(in_background=True)"
TORCH_LOAD = "torch.load"
LOAD_AGAIN = "torch.load again (A/A)"
LOAD = "engine.load"


class Subject:
    """An engine that has trained a step, and what is timed of it."""

    def __init__(self, depth: int, width: int, folder: Path) -> None:
        model = make_transformer(depth, width, 64, 64)
        self.engine = halfmesh.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-4), token_loss, config={}, device="cpu"
        )
        self.folder = folder
        self.batch = tokens(batch=2)
        self.train()

    def train(self) -> None:
        """A step."""
        ids, targets = self.batch
        self.engine.zero_grad()
        self.engine.backward(self.engine.criterion(self.engine(ids), targets))
        self.engine.step()

    @property
    def state(self) -> dict[str, object]:
        return {"model": self.engine.model.state_dict(), "optimizer": self.engine.optimizer.state_dict()}

    def torch_save(self) -> None:
        torch.save(self.state, self.folder / "whole.pt")

    def torch_load(self) -> None:
        state = torch.load(self.folder / "whole.pt", weights_only=True)
        self.engine.model.load_state_dict(state["model"])
        self.engine.optimizer.load_state_dict(state["optimizer"])

    def save(self) -> None:
        self.engine.save(self.folder / "waiting", keep=1)

    def save_in_background(self) -> None:
        self.engine.save(self.folder / "background", keep=1, in_background=True)

    def load(self) -> None:
        self.engine.load(self.folder / "waiting")


def measure(subject: Subject, rounds: int) -> dict[str, list[float]]:
    """Seconds of each row, round by round."""
    rows: dict[str, Callable[[], None]] = {
        TORCH: subject.torch_save,
        AGAIN: subject.torch_save,
        WAITING: subject.save,
        BACKGROUND: subject.save_in_background,
        TORCH_LOAD: subject.torch_load,
        LOAD_AGAIN: subject.torch_load,
        LOAD: subject.load,
    }
    names, found = list(rows), {name: list[float]() for name in rows}
    for name in names:  # memory of the host, files and modules are there afterwards
        begin = time.perf_counter()
        rows[name]()
        print(f"the first {name}: {time.perf_counter() - begin:.2f} s")
        subject.engine.wait_for_save()
    for number in range(rounds):
        for place in rotated(len(names), number):
            subject.train()
            begin = time.perf_counter()
            rows[names[place]]()
            found[names[place]].append(time.perf_counter() - begin)
            subject.engine.wait_for_save()
    return found


def report(found: dict[str, list[float]]) -> None:
    """Print the table."""
    print(checkpoint_table(as_result(found, "", [])))


def as_result(found: dict[str, list[float]], title: str, notes: list[str]) -> Result:
    """For RESULTS.md."""
    rows = [Row(name, wall=seconds) for name, seconds in found.items()]
    return Result("checkpoints", title, "none", rows, group="checkpoints", notes=notes)


def measure_checkpoints(rounds: int, quick: bool = False) -> Result:
    """A model of some 13 M parameters, on the disk of temporary files."""
    torch.set_num_threads(1)
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="checkpoint_times_") as folder:
        subject = Subject(*((1, 64) if quick else (4, 512)), Path(folder))
        found = measure(subject, rounds)
        numbers = sum(param.numel() for param in subject.engine.model.parameters())
        subject.engine.close()
    title = f"A transformer of {numbers / 1e6:.1f} M parameters in fp32 with AdamW"
    note = (
        f"The median of {rounds} rounds, after a first one that is not counted; load average at the start {load:.1f}."
    )
    return as_result(found, title, [note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: that of temporary files)")
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="checkpoint_times_", dir=chosen.folder))
    try:
        subject = Subject(chosen.depth, chosen.width, folder)
        numbers = sum(param.numel() for param in subject.engine.model.parameters())
        print(f"{numbers / 1e6:.0f} M parameters in fp32 with AdamW, {torch.get_num_threads()} thread(s)")
        report(measure(subject, chosen.rounds))
        subject.engine.close()
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
