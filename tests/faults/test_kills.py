"""SIGKILL at random moments costs steps, and nothing else. KILLS=50 for more of them (`make test-kills`)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.faults.kills import EVERY, Fall, kill_and_restart

KILLS = int(os.environ.get("KILLS", "5"))
RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "kills.md"


@pytest.mark.distributed
@pytest.mark.timeout(60 + 40 * KILLS)
def test_kills(tmp_path):
    falls, runs = kill_and_restart(tmp_path, KILLS, seed=KILLS)
    assert len(falls) == KILLS
    for fall in falls:
        assert fall.back_to == fall.complete, fall  # the newest that is complete
        assert 0 <= fall.lost <= 2 * EVERY, fall  # those since the last save, and the one that was being written
    if KILLS >= 20:
        assert sum(fall.in_save for fall in falls) >= KILLS // 5, "too few fell into a save"
        RESULTS.write_text(table(falls, runs))


def table(falls: list[Fall], runs: int) -> str:
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
