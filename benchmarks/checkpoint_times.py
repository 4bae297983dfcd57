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
from pathlib import Path

import torch

import halfmesh

from .harness import Contender, ratio, take_turns, time_step
from .machine import describe, in_one_line, publish, table
from .works import make_transformer, token_loss, tokens


def contenders(engine: halfmesh.Engine, folder: Path) -> list[Contender]:
    """Each after a step of training, which is not timed."""
    ids, targets = tokens(batch=2)

    def train() -> None:
        engine.wait_for_save()
        engine.zero_grad()
        engine.backward(engine.criterion(engine(ids), targets))
        engine.step()

    def torch_save() -> None:
        torch.save([engine.model.state_dict(), engine.optimizer.state_dict()], folder / "whole.pt")

    def torch_load() -> None:
        model, optimizer = torch.load(folder / "whole.pt", weights_only=True)
        engine.model.load_state_dict(model)
        engine.optimizer.load_state_dict(optimizer)

    def save() -> None:
        engine.save(folder / "waiting", keep=1)

    def save_in_background() -> None:
        engine.save(folder / "background", keep=1, in_background=True)

    def load() -> None:
        engine.load(folder / "waiting")

    calls = {
        "torch.save": torch_save,
        "torch.save again (A/A)": torch_save,
        "engine.save": save,
        "engine.save(in_background=True)": save_in_background,
        "torch.load": torch_load,
        "torch.load again (A/A)": torch_load,
        "engine.load": load,
    }
    return [Contender(name, call, engine.model, before=train) for name, call in calls.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--folder", type=Path, help="on the disk that is measured (default: that of temporary files)")
    chosen = parser.parse_args()
    logging.getLogger("halfmesh").setLevel(logging.WARNING)
    model = make_transformer(chosen.depth, chosen.width, 64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with (
        tempfile.TemporaryDirectory(prefix="checkpoint_times_", dir=chosen.folder) as folder,
        halfmesh.initialize(model, optimizer, token_loss, config={}, device="cpu") as engine,
    ):
        each = contenders(engine, Path(folder))
        take_turns(each, 1, time_one=time_step)  # makes what is loaded
        rows = take_turns(each, chosen.rounds, time_one=time_step)
    cells = []
    for row in rows:
        base = "torch.load" if "load" in row.name else "torch.save"
        cells.append([row.name, f"{statistics.median(row.seconds):.3f}", ratio(rows, row.name, base)])
    numbers = sum(param.numel() for param in model.parameters())
    about = f"{numbers / 1e6:.0f} M parameters in fp32 with AdamW; {in_one_line(describe())}"
    publish(None, about, table(["", "seconds", "ratio"], cells))


if __name__ == "__main__":
    main()
