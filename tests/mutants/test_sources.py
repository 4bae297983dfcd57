"""The suite turns red when a line that it guards is broken: each fault of `sources.py`, in a copy of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .sources import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.distributed]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The project, with a halfmesh/ of its own."""
    folder = tmp_path_factory.mktemp("copy")
    for path in ROOT.iterdir():
        if path.name in ("halfmesh", "tests"):
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_the_fault_is_seen(fault, copy):
    path = copy / "halfmesh" / fault.file
    text = path.read_text()
    assert text.count(fault.old) == 1, f"{fault.file} has changed: say there where the fault would be now"
    path.write_text(text.replace(fault.old, fault.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *fault.tests]
    try:
        ended = subprocess.run(
            command, cwd=copy, env=os.environ | {"PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=250
        )
    finally:
        path.write_text(text)
    assert ended.returncode == 1, ended.stdout[-2000:]  # tests ran, and one failed
    assert "\nFAILED " in ended.stdout
