"""Checkpoints that go from layout to layout, and runs that are told to end on N ranks and go on with M.

    python -m tests.checkpoint.resharding --out benchmarks/results/resharding.md

With the helpers of tests/checkpoint/test_layouts.py, which compares the same in every run of the slow tests.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.machine import describe
from halfmesh.errors import Preempted
from tests.checkpoint.test_layouts import CHOSEN, TOLERANCES, load_cells, on_ranks, save_cells
from tests.support.checkpoint_runs import LAYOUTS, Net, make_engine
from tests.support.ranks import run_ranks

MODES = {"none": "fp32", "torch": "TORCH fp16", "naive": "NAIVE fp16"}
TOLD_AT, EPOCHS = 6, 3
PREEMPTED = [
    *(("dp2", "one"), ("one", "dp2"), ("dp2", "tp2_fsdp2"), ("tp2_fsdp2", "dp2"), ("tp2_fsdp2", "one")),
    *(("pp2", "one"), ("fsdp", "pp2"), ("one", "tp2_fsdp2")),
]


INTRODUCTION = f"""`python -m tests.checkpoint.resharding`, with the helpers of `tests/checkpoint/test_layouts.py`: a
small model (linear layers, LayerNorm, a frozen layer, a buffer; AdamW, clipping) trains 5 batches and
saves. Each checkpoint is loaded into each layout, over another state. Weights, buffers, optimizer
state and counters of the whole model are then compared to the bit; of the losses of the next 3
batches the tables have the largest relative difference from those of the run that went on. They
differ by the order of sums, and in fp16 by what that rounds; the tests allow {TOLERANCES}.
`tp2_fsdp2` has 4 ranks, `one` 1, the others 2."""
PREEMPTION = """## Told to end on N ranks, going on with M

SIGTERM to the last rank in the middle of an epoch, shuffled data, fp32; all ranks save after the same step. The
next start has another layout, other initial weights and seeds, and `resume="auto"`. Its losses are compared with
those of one process that nobody interrupted: relative differences, the largest."""


def apart(results: list[list[float]], expected: list[list[float]]) -> float:
    """The largest relative difference of a loss; each is the mean over the ranks."""
    mine, theirs = (torch.tensor(losses, dtype=torch.float64).mean(0) for losses in (results, expected))
    return ((mine - theirs) / theirs).abs().max().item()


def reshard(folder: str) -> list[str]:
    """A table of losses for each mode, and how many tensors were not the ones that were saved."""
    lines = []
    for mode, title in MODES.items():
        place = f"{folder}/{mode}"
        sources = on_ranks(save_cells, [(layout, mode) for layout in CHOSEN], lambda cell: cell[0], place)
        states = {source: results[0][1] for source, results in sources.items()}
        cells = [((target, mode), (source, mode)) for target in CHOSEN for source in CHOSEN]
        loaded = on_ranks(load_cells, cells, lambda cell: cell[0][0], place, states)
        wrong = sum(len(names) for results in loaded.values() for _, names in results)
        lines += [f"**{title}**: {len(cells)} combinations, {wrong} tensors or counters that differ.", ""]
        lines += [
            f"| saved by | {' | '.join(f'into {target}' for target in CHOSEN)} |",
            "|---" * (len(CHOSEN) + 1) + "|",
        ]
        for source in CHOSEN:
            expected = [losses for losses, _ in sources[source, mode]]
            row = [
                apart([losses for losses, _ in loaded[(target, mode), (source, mode)]], expected) for target in CHOSEN
            ]
            lines.append(f"| {source} | {' | '.join(f'{value:.1e}' if value else '0' for value in row)} |")
        lines.append("")
    return lines


def train(rank: int, world_size: int, layout: str, seed: int, folder: str | None, told: bool) -> dict[int, float]:
    """The loss of each step of a run that resumes from `folder`; with `told` the last rank gets SIGTERM."""
    keys: dict[str, Any] = {"checkpoint": folder, "resume": "auto"} if folder else {}
    engine = make_engine(layout, "none", model=Net(seed=seed, norm=nn.LayerNorm), shuffle=True, **keys)
    losses = {}
    try:
        for _ in range(engine.dataloader.next_epoch, EPOCHS):
            for x, y in engine.dataloader:
                engine.zero_grad()
                loss = engine.criterion(engine(x), y)
                engine.backward(loss)
                engine.step()
                losses[engine.global_step] = loss.item()
                if told and engine.global_step == TOLD_AT and rank == world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
    except Preempted:
        pass
    engine.close()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return losses


def run(layout: str, *args: Any) -> list[dict[int, float]]:
    ranks = LAYOUTS[layout][0]
    return [train(0, 1, layout, *args)] if ranks == 1 else run_ranks(train, ranks, layout, *args)


def preempt(folder: str) -> list[str]:
    """A table of runs that were told to end in one layout, and went on in another."""
    whole = run("one", 1, None, False)[0]
    lines = [
        f"| told after step {TOLD_AT} in (ranks) | saved at | went on in | from | to | largest difference of a loss |",
        "|---|---|---|---|---|---|",
    ]
    for source, target in PREEMPTED:
        place = f"{folder}/{source}_{target}"
        first, second = run(source, 1, place, True), run(target, 2, place, False)
        steps = sorted(second[0])
        far = apart([[losses[step] for step in steps] for losses in second], [[whole[step] for step in steps]])
        at = f"{source} ({len(first)}) | {max(first[0])} | {target} ({len(second)})"
        lines.append(f"| {at} | {steps[0]} | {steps[-1]} | {far:.1e} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        text = ["# Resharding", "", INTRODUCTION, "", *reshard(folder), PREEMPTION, "", *preempt(folder)]
        about = describe()
        text += ["", f"{about['halfmesh']}, torch {about['torch']}, {about['processor']}, gloo."]
    out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
