"""Ranks tell each other what they hold in the first save only."""

from pathlib import Path

from benchmarks.save_ranks import time_saves


def test_only_the_first_save_sends_what_ranks_hold(tmp_path: Path) -> None:
    timed = time_saves(size=8, parameters=3, saves=3, folder=str(tmp_path))
    assert [sent for _, sent in timed] == [True, False, False]
