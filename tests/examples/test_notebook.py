"""examples/notebook.ipynb runs from top to bottom, and is committed without outputs."""

from __future__ import annotations

import os
import re

import pytest

from tests.support.example_runs import ROOT

nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("sklearn")  # has the digits that it trains on
NOTEBOOK = ROOT / "examples" / "notebook.ipynb"


def test_it_runs(monkeypatch, tmp_path):
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
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
    assert "did you mean 'hysteresis'" in printed
    first, last = map(float, re.search(r"loss (\S+) -> (\S+), gradient norm", printed).groups())
    assert last < first / 2
    assert "precision report: float16, dynamic loss scale 1024" in printed
    assert float(re.search(r"'eval_loss': ([\d.]+)", printed).group(1)) < 0.5


def test_it_is_committed_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)
