"""examples/notebook.ipynb runs from top to bottom, and is committed without outputs."""

from __future__ import annotations

import re

import pytest

from tests.support.example_runs import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")  # has the digits that it trains on
pytestmark = pytest.mark.slow
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_it_runs(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # raises where a cell does
    printed = "".join(
        output.get("text", "")
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stdout"
    )
    assert "apex fp16 x tensor: apex's contract" in printed
    first, last = map(float, re.search(r"loss (\S+) -> (\S+), gradient norm", printed).groups())
    assert last < first / 2
    assert "precision report: float16, dynamic loss scale 1024" in printed
    assert float(re.search(r"'eval_loss': ([\d.]+)", printed).group(1)) < 0.5


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook.cells)
