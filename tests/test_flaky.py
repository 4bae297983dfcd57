"""Red tests are run once more, alone."""

import os
import subprocess
import sys
from pathlib import Path

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


def test_red_once_is_counted_and_red_twice_fails(tmp_path):
    (tmp_path / "pytest.ini").touch()
    (tmp_path / "test_some.py").write_text(TESTS)
    command = (sys.executable, "-m", "pytest", "-p", "tests.support.flaky", "-n", "2")
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert "1 failed, 2 passed, 2 flaky" in lines[-1]
    flaky = {line.partition(": red once")[0] for line in lines if line.startswith("FLAKY")}
    assert flaky == {f"FLAKY test_some.py::{name}" for name in ("test_teardown[a b[c]-1]", "test_red_once")}
    assert any("comes_again('call')" in line for line in lines), "the first failure is shown, too"
