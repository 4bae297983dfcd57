"""halfmesh env: what a bug report needs."""

import importlib
import json

import torch
from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app


def test_what_is_there(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    result = CliRunner().invoke(app, ["env", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["halfmesh"] == halfmesh.__version__
    assert found["torch"].startswith(torch.__version__)
    assert "gloo" in found["backends"]
    assert found["variables"]["NCCL_DEBUG"] == "INFO"
    assert found["variables"]["RANK"] == "0"
    assert "hidden" not in result.stdout
    assert "numpy" in found["packages"]


def test_as_text(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setattr(
        importlib.import_module("halfmesh.cli.env"),
        "_devices",
        lambda: ["cuda:0 NVIDIA H200, 139 GiB, compute capability 9.0"],
    )
    lines = CliRunner().invoke(app, ["env"]).stdout.splitlines()
    assert f"halfmesh: {halfmesh.__version__}" in lines
    assert lines[lines.index("devices:") + 1] == "  cuda:0 NVIDIA H200, 139 GiB, compute capability 9.0"
    assert "  NCCL_DEBUG INFO" in lines
    assert any(line.startswith("plugins:") for line in lines)
