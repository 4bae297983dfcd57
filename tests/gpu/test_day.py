"""Every step of `day.py` is rehearsed on the CPU, so that nothing is a typo on the day: the steps run to their end, and
what counts as a failure is one. No figure of a rehearsal says anything about a GPU: neither speed nor memory, nor the
order of streams, kernels or NCCL."""

from __future__ import annotations

import re
import tarfile
import time

import pytest
import torch

from benchmarks import gpu
from benchmarks.harness import Quartiles
from tests.gpu import day, day_bench, day_cases, day_loss

ROWS = {0: 12, 1: 3, 2: 4, 3: 5, 4: 2, 5: 7, 6: 11, 7: 1, 8: 2, 9: 5, 10: 5, 11: 2, 12: 2}


def pages_in(folder):
    """Of the archive in it: the text of each file, by name."""
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        return {
            name.rpartition("/")[2]: packed.extractfile(name).read().decode()
            for name in packed.getnames()
            if "." in name
        }


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


def test_each_call_of_the_docstring_takes_ten_minutes_at_most_and_they_have_all_steps():
    minutes = {number: step.minutes for number, step in day.all_steps().items()}
    calls = [list(map(int, found.split())) for found in re.findall(r"day\.py ([\d ]+) --seconds 550", day.__doc__)]
    assert sorted(number for call in calls for number in call) == sorted(minutes)
    assert all(sum(map(minutes.get, call)) <= 10 for call in calls)


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


@pytest.fixture(autouse=True)
def _nothing_is_simulated(request, monkeypatch):
    """For all but the rehearsals a GPU is one."""
    if "step" not in request.fixturenames:
        monkeypatch.delenv("SIMULATED_GPU", raising=False)


@pytest.fixture
def steps(monkeypatch):
    """In place of the steps of the day: what each does with its page, by number."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    chosen = {}
    monkeypatch.setattr(
        day, "all_steps", lambda: {n: day.Step(f"title {n}", 1, "any", run) for n, run in chosen.items()}
    )
    return chosen


def test_steps_of_a_call_share_a_clock_and_an_archive(steps, tmp_path, monkeypatch, capsys):
    def last(page):
        given.append(page.left)
        page.out.with_suffix(".log").write_text("said")
        page.add("one")

    given = []
    steps |= {3: last, 4: lambda page: 1 / 0, 5: last}
    monkeypatch.setenv("OUT", str(tmp_path))
    assert day.main(["3", "4", "5", "--seconds", "45"]) == 1
    assert [left < 45.1 for left in given] == [True, True]
    pages = pages_in(tmp_path)
    assert sorted(pages) == ["step_3.log", "step_3.md", "step_4.md", "step_5.log", "step_5.md"]
    assert "- FAILURE: ZeroDivisionError: division by zero" in pages["step_4.md"]
    assert [file.name for file in tmp_path.iterdir()] == ["day_3_4_5.tar.gz"]
    assert "Step 4: title 4: 1 failure(s), 0 finding(s)\n  ZeroDivisionError" in capsys.readouterr().out
    assert day.main(["3", "--seconds", "20", "--out", str(tmp_path / "more")]) == 0
    assert "left out: the minutes are over" in pages_in(tmp_path / "more")["step_3.md"]


def test_nothing_follows_a_step_0_that_fails(steps, tmp_path, capsys):
    steps |= {0: lambda page: page.fail("no memory"), 1: lambda page: pytest.fail("runs")}
    assert day.main(["0", "1", "--out", str(tmp_path)]) == 1
    assert "Step 1: left out, because step 0 has failed" in capsys.readouterr().out


def test_what_runs_survives_in_the_archive_when_the_command_is_killed(steps, tmp_path):
    def killed(page):
        page.add("found")
        raise SystemExit(137)

    steps[2] = killed
    with pytest.raises(SystemExit):
        day.main(["2", "--out", str(tmp_path)])
    assert "found" in pages_in(tmp_path)["step_2.md"]


STUCK = "def test_z(): pathlib.Path(__file__).with_name('late').touch(); time.sleep(100)"


@pytest.mark.parametrize(
    ("tests", "row", "fails"),
    [
        (f"def test_a(): pass\n{STUCK}", "out of time", False),
        (f"def test_a(): assert 0\n{STUCK}", "out of time", True),
        (STUCK, "out of time", True),
        ("def a_test(): pass", 5, True),
        ("def test_a(): assert 0", 1, True),
        ("", "-", False),
    ],
)
def test_a_suite_that_the_clock_ends_has_not_failed(tests, row, fails, tmp_path, monkeypatch):
    """Time is up as soon as its last test is stuck."""
    own_wait = day.subprocess.Popen.wait

    def wait(process, timeout=None):
        while timeout and timeout > 20 and process.poll() is None:
            if (tmp_path / "late").exists():
                raise day.subprocess.TimeoutExpired("pytest", timeout)
            time.sleep(0.02)
        return own_wait(process, timeout)

    monkeypatch.setattr(day.subprocess.Popen, "wait", wait)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    (tmp_path / "test_it.py").write_text(f"import pathlib, time\n{tests}\n")
    page = day.Page(
        tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 200 if tests else 20, ["tests"] * 3
    )
    day.run_pytest(page, "these", str(tmp_path / "test_it.py"))
    assert (page.rows[0][1], bool(page.failures)) == (row, fails), page.rows


def bench_row(median, predicted="0.90", waits="0, 0", mode="NAIVE fp16", name=gpu.HALFMESH):
    ratio = Quartiles(median, median - 0.001, median + 0.001)
    cells = {"against fused=True": ratio, "predicted": predicted, "waits a step": waits}
    return ["GPT", mode, "no", name, *(cells.get(column, 1) for column in gpu.COLUMNS[4:])]


@pytest.mark.parametrize(
    ("rows", "failures", "findings"),
    [
        ([bench_row(1.06, "1.00", "1, 0")], 2, 0),
        ([bench_row(0.94)], 0, 0),
        ([bench_row(1.04)], 0, 1),
        ([bench_row(0.8)], 0, 1),
        ([bench_row(1.08, "1.00"), bench_row(1.04, name=gpu.AGAIN)], 0, 0),  # so much is noise
        ([bench_row(1.5, "-", mode="APEX O1")], 0, 1),
        ([["GPT", "NAIVE fp16", "no", "not measured: OutOfMemoryError: x"]], 1, 0),
        (
            [
                ["GPT", "NAIVE fp16", "no", f"not measured: {late}: y"]
                for late in ("TimeoutError", "ModuleNotFoundError")
            ],
            0,
            0,
        ),
    ],
)
def test_slower_than_the_fused_loop_is_a_failure_and_unlike_the_prediction_a_finding(
    rows, failures, findings, tmp_path
):
    page = day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 60)
    day_bench.judge(page, rows)
    assert (len(page.failures), len(page.findings)) == (failures, findings), (page.failures, page.findings)


def test_offload_that_saves_no_memory_is_a_failure(tmp_path):
    page = day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 60)
    day_cases.judge_peaks(page, {"plain": 100 << 20, "offload": 70 << 20})
    assert not page.failures
    day_cases.judge_peaks(page, {"plain": 100 << 20, "offload": 90 << 20})
    assert page.failures == ["offload: a peak of 90 MiB, and 100 without"]


def test_chunks_of_a_loss_are_to_save_memory_and_may_take_a_third_more_time(tmp_path):
    page = day.Page(tmp_path / "page.md", "Title", "anything", torch.device("cuda"), 60)
    day_loss.judge(page, (1.0, 100), (1.4, 40))
    assert (page.failures, page.findings) == ([], [])
    day_loss.judge(page, (1.0, 100), (1.6, 60))
    assert (len(page.failures), len(page.findings)) == (1, 1)
