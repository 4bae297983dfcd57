"""How long a step takes with the key `compile` and without, side by side in one process, on the CPU.

    python benchmarks/compile_step.py --rounds 7 --out benchmarks/results/compile_step.md

Two engines without `compile` show how far equal ones are apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, VOCABULARY

import halfmesh

MODES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16 torch": {"bf16": {"mode": "torch"}},
    "bf16 naive": {"bf16": {"mode": "naive"}},
}
KINDS: dict[str, Any] = {
    "plain": False,
    "plain again": False,
    "model": {"scope": "model"},
    "blocks": {"scope": "blocks"},
}
CONTEXT, WIDTH, DEPTH, HEADS, BATCH = 64, 128, 4, 4, 16


class Run:
    """An engine, and its time.

    Attributes:
        first: seconds of the first step, with what it compiles.
        seconds: of one step, in each round.
    """

    def __init__(self, mode: str, kind: str) -> None:
        torch.manual_seed(0)
        model = GPT(CONTEXT, WIDTH, DEPTH, HEADS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        config = MODES[mode] | {"compile": KINDS[kind]}
        self._engine = halfmesh.initialize(model, optimizer, _criterion, None, config, device="cpu")
        self._x = torch.randint(VOCABULARY, (BATCH, CONTEXT), generator=torch.Generator().manual_seed(0))
        self.seconds: list[float] = []
        self.first = self._step()
        self._step()

    def measure(self, steps: int) -> None:
        self.seconds.append(sum(self._step() for _ in range(steps)) / steps)

    def _step(self) -> float:
        begin = time.perf_counter()
        self._engine.zero_grad()
        self._engine.backward(self._engine.criterion(self._engine(self._x), self._x))
        self._engine.step()
        return time.perf_counter() - begin


def _criterion(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def measure(mode: str, rounds: int, steps: int) -> list[str]:
    """A row of the table for each kind."""
    runs = {kind: Run(mode, kind) for kind in KINDS}
    for _ in range(rounds):
        for run in runs.values():
            run.measure(steps)
    rows = []
    for kind, run in runs.items():
        ratios = [mine / plain for mine, plain in zip(run.seconds, runs["plain"].seconds, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        milliseconds = 1e3 * statistics.median(run.seconds)
        rows.append(
            f"| {mode} | {kind} | {milliseconds:.1f} | {statistics.median(ratios):.2f} ({spread}) | {run.first:.1f} |"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of each engine in a round")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    lines = [
        f"GPT of {DEPTH} blocks, width {WIDTH}, {BATCH} x {CONTEXT} bytes, AdamW, one thread of a CPU, torch "
        f"{torch.__version__}; {arguments.rounds} rounds of {arguments.steps} steps.",
        "",
        "| precision | compile | ms a step | beside plain: median (range) | first step, s |",
        "|---|---|---|---|---|",
    ]
    for mode in MODES:
        lines += measure(mode, arguments.rounds, arguments.steps)
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.out:
        arguments.out.write_text(f"# Steps with the key compile\n\n`benchmarks/compile_step.py`\n\n{text}")


if __name__ == "__main__":
    main()
