"""benchmarks.checkpoint_times: each row is timed, and the table is of the rows' own rounds."""

from __future__ import annotations

from benchmarks import checkpoint_times, report
from benchmarks.harness import load


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
    assert lines[-4].startswith(f"| {checkpoint_times.BACKGROUND} | ")
    assert lines[-4].endswith(" | 0.250 [0.250, 0.250] |")


def test_its_section_of_the_report(tmp_path):
    result = checkpoint_times.measure_checkpoints(3, quick=True)
    assert [row.name for row in result.rows if "again" not in row.name] == [
        *("torch.save", "engine.save", "engine.save(in_background=True)", "torch.load", "engine.load")
    ]
    walls = {"torch.save": 2.0, "engine.save": 3.0, "torch.load": 4.0, "engine.load": 5.0}
    for row in result.rows:
        row.wall = [walls.get(row.name, 1.0)] * 3
    text = report.render([result], {})
    assert "## Saving and loading" in text
    assert "| engine.save | 3.000 | 1.500 [1.500, 1.500] |" in text
    assert "| engine.load | 5.000 | 1.250 [1.250, 1.250] |" in text
    result.save(tmp_path)
    assert [one.group for one in load(tmp_path)] == ["checkpoints"]
