"""docs/planning.md tells the truth: its example prints what it says."""

from pathlib import Path

import pytest

from tests.docs.test_readme import check, find_blocks, find_python
from tests.support.versions import TORCH

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "planning.md").read_text()


@pytest.mark.skipif(TORCH < (2, 15), reason="other versions of torch keep a little more or less at the peak")
def test_a_model_of_70_billion_parameters(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "big.py").write_text(find_python(PAGE, "big.py"))
    (block,) = find_blocks(PAGE, "console")
    command, expected = block.split("\n", 1)
    assert check(command) == expected
