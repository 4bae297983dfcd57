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


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["gpu"])
    with pytest.raises(SystemExit, match="no CUDA device here: nothing was measured"):
        gpu.main()
