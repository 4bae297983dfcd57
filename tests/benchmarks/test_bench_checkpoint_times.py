"""benchmarks.checkpoint_times: each row is timed, and the table is of the rows' own rounds."""

from __future__ import annotations

from benchmarks import checkpoint_times


def test_a_small_one(tmp_path, capsys):
    subject = checkpoint_times.Subject(1, 64, tmp_path)
    found = checkpoint_times.measure(subject, rounds=2)
    assert {len(seconds) for seconds in found.values()} == {2}
    assert all(seconds > 0 for row in found.values() for seconds in row)
    for folder in ("waiting", "background"):  # one for each round, of which one is kept
        assert len(list((tmp_path / folder).iterdir())) == 1
    subject.engine.close()
    checkpoint_times.report(found | {checkpoint_times.BACKGROUND: [s / 4 for s in found[checkpoint_times.TORCH]]})
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith(f"| {checkpoint_times.BACKGROUND} | ")
    assert lines[-2].endswith(" | 0.250 [0.250, 0.250] |")
