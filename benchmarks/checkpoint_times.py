"""How long training waits for a checkpoint, beside torch.save and torch.load of the same state.

python -m benchmarks.checkpoint_times                 # a transformer of about 90 M parameters with AdamW: 1 GB
python -m benchmarks.checkpoint_times --folder /data  # on another disk

torch.save does not wait for the disk (no fsync), takes no checksums and renames nothing: it is the least that a save
can cost. Rows take turns within a round; saves are divided by torch.save of the same round, loads by torch.load with
load_state_dict.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import halfmesh

from .harness import Row, ratio, rotated
from .works import make_transformer, token_loss, tokens

SAVE, LOAD = "torch.save", "torch.load"


class Subject:
    """An engine that has trained a step, and what is timed of it."""

    def __init__(self, depth: int, width: int, folder: Path) -> None:
        model = make_transformer(depth, width, 64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.engine = halfmesh.initialize(model, optimizer, token_loss, config={}, device="cpu")
        self.folder = folder
        self.batch = tokens(batch=2)
        self.train()

    def train(self) -> None:
        """A step."""
        ids, targets = self.batch
        self.engine.zero_grad()
        self.engine.backward(self.engine.criterion(self.engine(ids), targets))
        self.engine.step()

    def torch_save(self) -> None:
        state = {"model": self.engine.model.state_dict(), "optimizer": self.engine.optimizer.state_dict()}
        torch.save(state, self.folder / "whole.pt")

    def torch_load(self) -> None:
        state = torch.load(self.folder / "whole.pt", weights_only=True)
        self.engine.model.load_state_dict(state["model"])
        self.engine.optimizer.load_state_dict(state["optimizer"])

    def rows(self) -> dict[str, Callable[[], object]]:
        return {
            SAVE: self.torch_save,
            f"{SAVE} again (A/A)": self.torch_save,
            "engine.save": lambda: self.engine.save(self.folder / "waiting", keep=1),
            "engine.save(in_background=True)": lambda: self.engine.save(
                self.folder / "background", keep=1, in_background=True
            ),
            LOAD: self.torch_load,
            f"{LOAD} again (A/A)": self.torch_load,
            "engine.load": lambda: self.engine.load(self.folder / "waiting"),
        }


def measure(subject: Subject, rounds: int) -> list[Row]:
    """Seconds of each row, round by round, after a first round that is not counted."""
    calls = list(subject.rows().items())
    rows = [Row(name) for name, _ in calls]
    for number in range(rounds + 1):
        for place in rotated(len(calls), number) if number else range(len(calls)):
            subject.train()
            begin = time.perf_counter()
            calls[place][1]()
            if number:
                rows[place].wall.append(time.perf_counter() - begin)
            subject.engine.wait_for_save()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: that of temporary files)")
    chosen = parser.parse_args()
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="checkpoint_times_", dir=chosen.folder) as folder:
        subject = Subject(chosen.depth, chosen.width, Path(folder))
        numbers = sum(param.numel() for param in subject.engine.model.parameters())
        print(f"{numbers / 1e6:.0f} M parameters in fp32 with AdamW, {torch.get_num_threads()} thread(s)")
        print("| | seconds | ratio |\n|---|---|---|")
        rows = measure(subject, chosen.rounds)
        base = SAVE
        for row in rows:
            base = LOAD if row.name == LOAD else base
            print(f"| {row.name} | {statistics.median(row.wall):.3f} | {ratio(rows, row.name, base)} |")
        subject.engine.close()


if __name__ == "__main__":
    main()
