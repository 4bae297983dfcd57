"""The page of a GPU, rehearsed on the CPU."""

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
    assert all("| 1.00 |" not in line for line in rows if "halfmesh" in line), "a prediction is there"


def test_a_case_that_fails_or_comes_too_late_is_said(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("too much\nof it")

    monkeypatch.setattr(gpu, "measure", fail)
    page, found = tmp_path / "gpu.md", []
    for seconds in (100, -1):
        cases = [(gpu.TINY[1], gpu.MODES[0], False)]
        gpu.run(cases, torch.device("cpu"), 2, page, seconds=seconds, done=found.extend)
    said = ["not measured: OutOfMemoryError: too much", "not measured: TimeoutError: the -1 s are over"]
    assert [row[3] for row in found] == said
    assert f"| {said[1]} |" in page.read_text()


def test_what_an_h100_is_predicted_to_take(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--predict", "798", "3.0", "--out", str(tmp_path / "gpu.md")])
    monkeypatch.setattr(
        gpu, "WORKS", [work for work in gpu.WORKS if "batch 128" in work.title or "124 M" in work.title]
    )
    gpu.main()
    text = (tmp_path / "gpu.md").read_text()
    for row in (
        "| ViT-B/16, batch 128 | NAIVE fp16 | 45.5 | 39.4 | 0.86 |",
        "| ViT-B/16, batch 128 | TORCH fp16 | 45.5 | 44.7 | 0.98 |",
        "| GPT of 124 M, batch 8 x 1024 | NAIVE bf16 | 24.9 | 22.9 | 0.92 |",
    ):
        assert row in text, text
    assert "Nothing was measured. Predicted with 798 TFLOP/s and 3 TB/s" in text
