"""What docs/verify.md shows is what is printed; and a plan of docs/tensor-parallel.md is proven."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.pages import ROOT, shown_commands, snippet

pytestmark = [pytest.mark.slow, pytest.mark.distributed]


def printed(folder, command, status):
    """What `$ halfmesh ...` prints in `folder`, without seconds and shares of what is allowed."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    args = [sys.executable, "-m", *command.removeprefix("$ ").split()]
    ended = subprocess.run(args, cwd=folder, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    assert ended.returncode == status, ended.stderr
    return without_figures(ended.stdout)


def without_figures(text):
    return re.sub(r"[\d.]+ s\)|by [\d.e+-]+|[\d.e-]+ of what", "", text)


def test_the_page_about_verify(tmp_path):
    (tmp_path / "my_model.py").write_text(snippet("verify.md", "my_model.py"))
    (tmp_path / "config.py").write_text(snippet("verify.md", "config.py"))
    ((command, expected),) = shown_commands("verify.md")
    assert printed(tmp_path, command, 1) == without_figures(expected)
    (tmp_path / "from_python.py").write_text(snippet("verify.md", "from_python.py"))
    assert printed(tmp_path, "$ from_python", 0).startswith("False ")


def test_a_plan_is_proven(tmp_path):
    (tmp_path / "proof.py").write_text(snippet("tensor-parallel.md", "proof.py"))
    (tmp_path / "my_block.py").write_text(snippet("tensor-parallel.md", "my_block.py"))
    (tmp_path / "two_ranks.py").write_text(snippet("tensor-parallel.md", "two_ranks.py"))
    assert "equal" in printed(tmp_path, "halfmesh verify two_ranks.py --model proof:build --world-size 2", 0)
