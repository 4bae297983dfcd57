"""Writes how many lines a conversion changes, as git counts them, into benchmarks/results/conversions.md."""

from __future__ import annotations

import re
import subprocess

from tests.support.example_runs import ROOT

PAGE = ROOT / "benchmarks/results/conversions.md"
SCRIPTS = ("mnist", "nanogpt", "imagenet", "clm", "dino", "mae", "timm", "modded")
ROW = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \| \+(\d+) -(\d+) \|", re.MULTILINE)


def figures(name: str) -> tuple[int, int, int, int]:
    """Lines before and after, lines added and removed."""
    before, after = (ROOT / f"examples/own_loop/{name}_{side}.py" for side in ("before", "after"))
    command = ["git", "diff", "--no-index", "--numstat", str(before), str(after)]
    added, removed, _ = subprocess.run(command, capture_output=True, text=True).stdout.split(maxsplit=2)
    sizes = [len(path.read_text().splitlines()) for path in (before, after)]
    return sizes[0], sizes[1], int(added), int(removed)


def main() -> None:
    def row(found: re.Match[str]) -> str:
        before, after, added, removed = figures(found[1])
        return f"| {found[1]} | {before} | {after} | +{added} -{removed} |"

    PAGE.write_text(ROW.sub(row, PAGE.read_text()))


if __name__ == "__main__":
    main()
