"""What `halfmesh.Trainer` adds to the loop, in epochs of the same engine.

python -m benchmarks.trainer_overhead --out benchmarks/results/trainer.md

Rows take turns within a round, and are divided by the loop of the same round.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import halfmesh

from .harness import Contender, Result, take_turns
from .machine import describe
from .works import make_transformer, token_loss

LOOP = "the loop"
WORKS = {"tiny": (1, 32, 16), "small transformer": (2, 128, 64)}
"""Depth, width and length of a sequence."""


def make_engine(depth: int, width: int, length: int, batches: int) -> halfmesh.Engine:
    """With a dataloader of so many batches of 8."""
    torch.manual_seed(0)
    model = make_transformer(depth, width, 64, length)
    ids = torch.randint(0, 64, (8 * batches, length + 1))
    loader = DataLoader(TensorDataset(ids[:, :-1].clone(), ids[:, 1:].clone()), 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    return halfmesh.initialize(model, optimizer, token_loss, loader, {}, device="cpu")


def contenders(engine: halfmesh.Engine, folder: Path) -> list[Contender]:
    """One step of each is an epoch."""

    def loop() -> None:
        total = torch.zeros(())
        for number, (x, y) in enumerate(engine.dataloader, start=1):
            engine.zero_grad()
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            total += loss.detach()
            if number % 10 == 0:  # what a user prints
                _ = (total / number).item()

    def fit(hooks: list[Any]) -> None:
        halfmesh.Trainer(engine).fit(epochs=engine.dataloader.next_epoch + 1, hooks=hooks)

    usual = ["throughput", "memory", {"type": "jsonl", "path": folder / "metrics.jsonl"}]
    rows = {LOOP: loop, "the loop again (A/A)": loop, "Trainer": lambda: fit([])}
    rows["Trainer with throughput, memory, jsonl"] = lambda: fit(usual)
    return [Contender(name, run, engine.model) for name, run in rows.items()]


def measure(name: str, batches: int, rounds: int) -> Result:
    """The four rows of a work."""
    engine = make_engine(*WORKS[name], batches)
    with tempfile.TemporaryDirectory() as folder:
        made = contenders(engine, Path(folder))
        for contender in made:
            contender.step()
        return Result(name, name, "fp32", take_turns(made, rounds, 1))


def table(result: Result, batches: int) -> str:
    """Milliseconds a step, and the ratio to the loop, median and quartiles of the rounds."""
    lines = [f"**{result.title}**", "", "| | ms a step | over the loop |", "|---|---|---|"]
    for row in result.rows:
        each = 1e3 * sorted(row.wall)[len(row.wall) // 2] / batches
        lines.append(f"| {row.name} | {each:.3f} | {result.ratios(row.name)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--batches", type=int, default=100, help="of an epoch")
    parser.add_argument("--out", type=Path, help="the file to write")
    chosen = parser.parse_args()
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    tables = [table(measure(name, chosen.batches, chosen.rounds), chosen.batches) for name in WORKS]
    made_on = ", ".join(f"{key} {value}" for key, value in describe().items())
    text = "\n\n".join(["# What the Trainer adds to the loop", *tables, f"{made_on}; {time.strftime('%Y-%m-%d')}."])
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
