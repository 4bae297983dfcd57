"""Every step of `day.py` is rehearsed on the CPU, so that nothing is a typo on the day: the steps run to their end, and
what counts as a failure is one. No figure of a rehearsal says anything about a GPU: neither speed nor memory, nor the
order of streams, kernels or NCCL."""

from __future__ import annotations

import re

import pytest
import torch

from tests.gpu import day

ROWS = {0: 7, 1: 3, 2: 4, 3: 5, 4: 6, 5: 7, 6: 11, 7: 1, 8: 4, 9: 5}


@pytest.mark.slow
@pytest.mark.parametrize("step", ROWS)
def test_rehearsal(step, tmp_path):
    status = day.main([str(step), "--device", "cpu", "--out", str(tmp_path)])
    text = (tmp_path / f"step_{step}.md").read_text()
    assert status == 0, text
    assert "A failure is: " in text
    assert "with 0 failure(s)" in text
    assert len([line for line in text.splitlines() if re.match(r"\| (?!---)", line)]) == 1 + ROWS[step], text


def test_files_that_are_only_run_on_a_gpu_are_there():
    assert all((day.ROOT / word).is_file() for words in day.SUITES.values() for word in words if word.endswith(".py"))


def test_nothing_runs_where_there_is_no_device(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert day.main(["3", "--out", str(tmp_path)]) == 2
    assert "no CUDA device here: nothing was run" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_a_case_that_fails_is_a_failure_and_the_next_one_runs(tmp_path):
    page = day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cpu"), 60, ["case", "figure"])
    page.case("first", lambda: [1 / 0])
    page.case("second", lambda: [2])
    page.seconds = -1
    page.case("third", lambda: [3])
    text = page.out.read_text()
    assert page.failures == ["first: ZeroDivisionError: division by zero"]
    for line in ("- FAILURE: first: Zero", "| second | 2 |", "| third | left out: the minutes are over |"):
        assert line in text


def test_halfmesh_slower_than_the_fused_loop_or_waiting_is_a_failure(tmp_path):
    page = day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 60)
    row = ["GPT", "NAIVE fp16", "no", "halfmesh", "0.9", "1.060 [1.05, 1.07]", 1, 1, 1, "1, 0", "16", "40%"]
    day.judge(page, [row, [*row[:3], "not measured: OutOfMemoryError: x"], [*row[:3], "not measured: TimeoutError: y"]])
    assert len(page.failures) == 3
    day.judge(page, [[*row[:5], "1.040 [1.03, 1.05]", 1, 1, 1, "0, 0", "16", "40%"]])
    assert len(page.failures) == 3
