"""Red tests are run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pathlib

import pytest

def comes_again(name):
    mark = pathlib.Path(__file__).with_name(name)
    came = mark.exists()
    mark.touch()
    return came

def test_green():
    pass

def test_red_once():
    assert comes_again("call")

@pytest.fixture
def ends_badly():
    yield
    assert comes_again("teardown")

@pytest.mark.parametrize("value", ["a b[c]-1"])
def test_teardown(value, ends_badly):
    pass

def test_red_twice():
    assert 1 == 2
"""


def run(folder, text, *options):
    (folder / "pytest.ini").touch()
    (folder / "test_some.py").write_text(text)
    command = (sys.executable, "-m", "pytest", "-p", "tests.support.flaky", *options)
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "status", "total"),
    [
        (("-n", "2"), 1, "1 failed, 2 passed, 2 flaky"),
        (("--deselect", "test_some.py::test_red_twice"), 0, "2 passed, 1 deselected, 2 flaky"),
    ],
)
def test_red_once_is_counted_and_red_twice_fails(tmp_path, options, status, total):
    code, lines = run(tmp_path, TESTS, *options)
    assert code == status
    assert total in lines[-1]
    flaky = {line.partition(": red once")[0] for line in lines if line.startswith("FLAKY")}
    assert flaky == {f"FLAKY test_some.py::{name}" for name in ("test_teardown[a b[c]-1]", "test_red_once")}
    assert any("comes_again('call')" in line for line in lines), "the first failure is shown, too"


def test_many_red_tests_are_no_accident(tmp_path):
    code, lines = run(tmp_path, "\n".join(f"def test_{n}():\n    assert False" for n in range(11)))
    assert code == 1
    assert not any("once more" in line for line in lines)
