"""The arithmetic of a measurement, the page with one row for each workload, and the page of a GPU."""

import re
from pathlib import Path

import torch

from benchmarks import gpu, run
from benchmarks.harness import Quartiles, Row, ratio


def test_ratios_are_of_the_same_round():
    rows = [Row("first", [1.0, 2.0, 4.0]), Row("other", [0.5, 3.0, 1.0])]
    assert ratio(rows, "other", "first") == (0.5, 0.375, 1.0)
    assert ratio(rows, "first", "other") == (2.0, 4 / 3, 3.0)
    assert str(Quartiles(1.0, 0.98765, 1.5)) == "1.000 [0.988, 1.500]"


def test_the_committed_page_is_what_its_figures_render_to():
    page = Path(run.__file__).with_name("RESULTS.md")
    text = page.read_text()
    machine = dict(re.findall(r"^- ([A-Za-z-]+): (.*)$", text.partition("\n| ")[0], re.MULTILINE))
    notes = re.findall(r"^- (.*)$", text.partition(run.LIMITS)[2], re.MULTILINE)
    assert set(run.rows_of(page, machine["halfmesh"])) >= {case.name for case in run.CASES}
    assert "\n\n".join(run.render(run.rows_of(page, machine["halfmesh"]), machine, notes)) + "\n" == text


def test_a_case_that_fails_or_comes_too_late_is_said(tmp_path, monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError("too much\nof it")

    monkeypatch.setattr(gpu, "measure", fail)
    page, found, cases = tmp_path / "gpu.md", [], [(gpu.TINY[1], gpu.MODES[0], False)]
    for seconds in (100, -1):
        gpu.run(cases, torch.device("cpu"), 2, page, seconds=seconds, done=found.extend)
    said = ["not measured: OutOfMemoryError: too much", "not measured: TimeoutError: the -1 s are over"]
    assert [row[3] for row in found] == said
    assert f"| {said[1]} |" in page.read_text()


def test_what_an_h100_is_predicted_to_take(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["gpu", "--predict", "798", "3.0", "--out", str(tmp_path / "gpu.md")])
    monkeypatch.setattr(gpu, "WORKS", gpu.WORKS[1:3])
    gpu.main()
    text = (tmp_path / "gpu.md").read_text()
    for row in (
        "| ViT-B/16, batch 128 | NAIVE fp16 | 45.5 | 39.4 | 0.86 |",
        "| ViT-B/16, batch 128 | TORCH fp16 | 45.5 | 44.7 | 0.98 |",
        "| GPT of 124 M, batch 8 x 1024 | NAIVE bf16 | 24.9 | 22.9 | 0.92 |",
    ):
        assert row in text, text
    assert "Nothing was measured. Predicted with 798 TFLOP/s and 3 TB/s" in text
