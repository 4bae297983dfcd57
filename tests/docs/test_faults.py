"""docs/faults.md: its loop drifts apart as it says, with that message, and its report is one."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from halfmesh.errors import SyncError
from halfmesh.layout import Layout
from halfmesh.position_report import report
from halfmesh.positions import RUNS, WAITS, Position
from tests.docs.test_readme import find_python, stand_ins
from tests.support.ranks import run_ranks

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "faults.md").read_text()
LINE = re.compile(r"^  (ranks?) ([\d, -]+): (waiting, )?(?:in (\S+), )?after update (\d+) - (.*?)(   <- not waiting)?$")


def find_shown(first):
    """The block of text that begins so."""
    return PAGE[PAGE.index(f"```\n{first}") + 4 :].partition("\n```")[0]


def told(rank, world_size):
    names = stand_ins() | {"torch": torch}
    try:
        exec(find_python(PAGE, "train.py"), names)
    except SyncError as error:
        return str(error)
    return None


def rounded(text):
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", text)


def test_the_message():
    first, second = run_ranks(told, 2)
    assert first == second
    assert rounded(first) == rounded(find_shown("after step 4"))


def test_the_report():
    shown = find_shown("[rank 0] waited")
    lines = shown.splitlines()[2:]
    positions = {}
    for line in lines:
        match = LINE.match(line)
        assert match is not None, line
        _, ranks, waits, call, update, where, arrow = match.groups()
        assert bool(waits) != bool(arrow)
        position = Position(WAITS if waits else RUNS, call or "", (int(update),), where)
        for part in ranks.split(", "):
            first, _, last = part.partition("-")
            positions |= dict.fromkeys(range(int(first), int(last or first) + 1), position)
    assert len(positions) == 3
    assert report(positions, {}, Layout(3)) == "\n".join(shown.splitlines()[1:])
