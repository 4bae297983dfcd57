"""The page of a GPU, rehearsed on the CPU."""

import pytest
import torch

from benchmarks import gpu


def test_a_rehearsal(tmp_path, monkeypatch, capsys):
    page = tmp_path / "gpu.md"
    options = ["--device", "cpu", "--rounds", "2", "--only", "tiny GPT, NAIVE bf16", "--no-compile", "--out", str(page)]
    monkeypatch.setattr("sys.argv", ["gpu", *options])
    gpu.main()
    _, *rows = [line for line in page.read_text().splitlines() if line.startswith("| tiny GPT")]
    assert len(rows) == 3
    assert all(line.count(" | ") == len(gpu.COLUMNS) - 1 and line.count("]") == 2 for line in rows), rows


def test_a_case_that_fails_is_said(tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise torch.OutOfMemoryError("too much\nof it")

    monkeypatch.setattr(gpu, "measure", fail)
    page = tmp_path / "gpu.md"
    monkeypatch.setattr("sys.argv", ["gpu", "--device", "cpu", "--no-compile", "--out", str(page)])
    gpu.main()
    assert page.read_text().count("| not measured: OutOfMemoryError: too much |") == len(gpu.TINY) * len(gpu.MODES)


def test_cases_that_come_too_late_are_left_out(tmp_path):
    page, found = tmp_path / "gpu.md", []
    gpu.run(gpu.TINY[1:], gpu.MODES[:1], (False,), torch.device("cpu"), 2, page, seconds=-1, done=found.extend)
    assert [row[3] for row in found] == ["not measured: TimeoutError: the -1 s are over"]
    assert "TimeoutError: the -1 s are over" in page.read_text()


def test_contenders_that_do_not_fit_together_are_measured_one_after_the_other(monkeypatch):
    """As on a device with as much memory as one of them takes."""
    at_once = []
    measure = gpu.measure_together
    monkeypatch.setattr(
        gpu, "measure_together", lambda makers, *rest: at_once.append(len(makers)) or measure(makers, *rest)
    )
    for room, expected in ((10**12, [4]), (10**5, [1] * 4)):
        monkeypatch.setattr(gpu, "memory_of", lambda device, room=room: room)
        at_once.clear()
        rows = gpu.measure(gpu.TINY[1], gpu.MODES[0], False, torch.device("cpu"), 2, 1e9)
        assert (at_once, len(rows)) == (expected, 4)


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match="no CUDA device here: nothing was measured"):
        gpu.main()
