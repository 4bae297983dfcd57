"""Every step of `day.py` is rehearsed on the CPU, so that nothing is a typo on the day: the steps run to their end, and
what counts as a failure is one. No figure of a rehearsal says anything about a GPU."""

from __future__ import annotations

import re
import tarfile
import time

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness import Quartiles
from tests.gpu import day, day_bench

ROWS = {0: 9, 1: 3, 2: 4, 3: 5, 4: 2, 5: 7, 7: 1, 8: 2, 9: 2, 10: 5, 11: 2}
"""Of each step's table; 6 is run as 7 is, and its tests are part of every suite."""


def pages_in(folder):
    """Of the archive in it: the text of each file, by name."""
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        names = [name for name in packed.getnames() if "." in name]
        return {name.rpartition("/")[2]: packed.extractfile(name).read().decode() for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("step", ROWS)
def test_rehearsal(step, tmp_path):
    status = day.main([str(step), "--device", "cpu", "--out", str(tmp_path)])
    text = pages_in(tmp_path)[f"step_{step}.md"]
    assert status == 0, text
    assert "A failure is: " in text
    assert "with 0 failure(s)" in text
    assert len([line for line in text.splitlines() if re.match(r"\| (?!---)", line)]) == 1 + ROWS[step], text
    assert "left out" not in text
    assert len(list(tmp_path.iterdir())) == 1 + (2 if step == 4 else 0), "so many files come back"


def test_the_calls_of_the_docstring_have_all_steps_and_files_that_are_there():
    minutes = {number: step.minutes for number, step in day.STEPS.items()}
    calls = [list(map(int, found.split())) for found in re.findall(r"day\.py ([\d ]+) --seconds 550", day.__doc__)]
    assert sorted(number for call in calls for number in call) == sorted(minutes) == sorted([*ROWS, 6])
    assert all(sum(map(minutes.get, call)) <= 10 for call in calls)
    suites = (day.SUITES | day.ONE_RANK).values()
    assert all((day.ROOT / word).is_file() for words in suites for word in words if word.endswith(".py"))


@pytest.fixture
def page(tmp_path, monkeypatch):
    """Of a step on a GPU."""
    monkeypatch.delenv("SIMULATED_GPU", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    return day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 200, ["case", "figure", "more"])


def replace_steps(monkeypatch, runs):
    monkeypatch.setattr(day, "STEPS", {n: day.Step(f"title {n}", 1, "any", run) for n, run in runs.items()})


def test_steps_of_a_call_share_a_clock_and_an_archive(page, tmp_path, monkeypatch, capsys):
    def last(page):
        given.append(page.left)
        page.out.with_suffix(".log").write_text("said")
        page.case("first", lambda: [1 / 0])
        page.case("second", lambda: [2])
        page.seconds = -1
        page.case("third", lambda: [3])

    given = []
    replace_steps(monkeypatch, {3: last, 4: lambda page: 1 / 0, 5: last})
    monkeypatch.setenv("OUT", str(tmp_path))
    assert day.main(["3", "4", "5", "--seconds", "45"]) == 1
    assert [left < 45.1 for left in given] == [True, True]
    pages = pages_in(tmp_path)
    assert sorted(pages) == ["step_3.log", "step_3.md", "step_4.md", "step_5.log", "step_5.md"]
    assert "- FAILURE: ZeroDivisionError: division by zero" in pages["step_4.md"]
    for line in ("- FAILURE: first: Zero", "| second", "| third | left out: the minutes are over"):
        assert line in pages["step_3.md"], "what follows a case that fails is run"
    assert [file.name for file in tmp_path.iterdir()] == ["day_3_4_5.tar.gz"]
    assert "Step 4: title 4: 1 failure(s), 0 finding(s)\n  ZeroDivisionError" in capsys.readouterr().out
    assert day.main(["3", "--seconds", "20", "--out", str(tmp_path / "more")]) == 0
    assert "left out: the minutes are over" in pages_in(tmp_path / "more")["step_3.md"]


def test_what_ends_a_call(page, tmp_path, monkeypatch, capsys):
    """What was found survives in the archive if it is killed."""

    def killed(page):
        page.add("found")
        raise SystemExit(137)

    runs = {0: lambda page: page.fail("no memory"), 1: lambda page: pytest.fail("runs"), 2: killed}
    replace_steps(monkeypatch, runs)
    assert day.main(["0", "1", "--out", str(tmp_path / "0")]) == 1
    assert "Step 1: left out, because step 0 has failed" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        day.main(["2", "--out", str(tmp_path / "2")])
    assert "found" in pages_in(tmp_path / "2")["step_2.md"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert day.main(["2", "--out", str(tmp_path / "3")]) == 2
    assert "no CUDA device here: nothing was run" in capsys.readouterr().out


STUCK = "def test_z(): pathlib.Path(__file__).with_name('late').touch(); time.sleep(100)"


@pytest.mark.parametrize(
    ("tests", "row", "fails"),
    [
        (f"def test_a(): pass\n{STUCK}", "out of time", False),
        (f"def test_a(): assert 0\n{STUCK}", "out of time", True),
        ("def a_test(): pass", 5, True),
        ("", "-", False),
    ],
)
def test_a_suite_that_the_clock_ends_has_not_failed(tests, row, fails, page, tmp_path, monkeypatch):
    """Time is up as soon as its last test is stuck."""
    own_wait = day.subprocess.Popen.wait

    def wait(process, timeout=None):
        while timeout and timeout > 20 and process.poll() is None:
            if (tmp_path / "late").exists():
                raise day.subprocess.TimeoutExpired("pytest", timeout)
            time.sleep(0.02)
        return own_wait(process, timeout)

    monkeypatch.setattr(day.subprocess.Popen, "wait", wait)
    (tmp_path / "test_it.py").write_text(f"import pathlib, time\n{tests}\n")
    page.seconds = 200 if tests else 20
    day.run_pytest(page, "these", str(tmp_path / "test_it.py"))
    assert (page.rows[0][1], bool(page.failures)) == (row, fails), page.rows


def bench_row(median, predicted="0.90", waits="0, 0", mode="NAIVE fp16", name=gpu.HALFMESH):
    ratio = Quartiles(median, median - 0.001, median + 0.001)
    cells = {"against fused=True": ratio, "predicted": predicted, "waits a step": waits}
    return ["GPT", mode, "no", name, *(cells.get(column, 1) for column in gpu.COLUMNS[4:])]


def not_measured(*errors):
    return [["GPT", "NAIVE fp16", "no", f"not measured: {error}: x"] for error in errors]


@pytest.mark.parametrize(
    ("rows", "failures", "findings"),
    [
        ([bench_row(1.06, "1.00", "1, 0")], 2, 0),
        ([bench_row(0.94)], 0, 0),
        ([bench_row(1.04)], 0, 1),
        ([bench_row(0.8)], 0, 1),
        ([bench_row(1.08, "1.00"), bench_row(1.04, name=gpu.AGAIN)], 0, 0),  # so much is noise
        ([bench_row(1.5, "-", mode="APEX O1")], 0, 1),
        (not_measured("OutOfMemoryError", "TimeoutError", "ModuleNotFoundError"), 1, 0),
    ],
)
def test_slower_than_the_fused_loop_is_a_failure_and_unlike_the_prediction_a_finding(rows, failures, findings, page):
    day_bench.judge(page, rows)
    assert (len(page.failures), len(page.findings)) == (failures, findings), (page.failures, page.findings)
