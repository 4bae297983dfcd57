"""halfmesh convert-config: what is printed, what is written, and the exit status."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from halfmesh.cli.convert_config import NAMES
from halfmesh.config.load import load_config
from halfmesh.migration.origins import ORIGINS

SOURCE = """
from colossalai.amp import AMP_TYPE
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
NUM_MICRO_BATCHES = 4
gradient_handler = [dict(type='PipelineSharedModuleGradientHandler')]
"""


def run(*arguments):
    return CliRunner().invoke(app, ["convert-config", *map(str, arguments)])


@pytest.fixture
def source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "colossal.py").write_text(SOURCE)
    return tmp_path


def test_printed_and_written(source):
    printed = run("colossal.py", "--from", "colossal")
    assert printed.exit_code == 0
    assert "NUM_MICRO_BATCHES = 4 -> parallel.pipeline.microbatches = 4" in printed.stderr
    assert "without equivalent: 1\n  gradient_handler = " in printed.stderr
    written = run("colossal.py", "--from", "colossal", "--out", "config.py")
    assert (written.exit_code, written.stdout) == (0, "written: config.py\n")
    assert (source / "config.py").read_text() == printed.stdout
    assert load_config(source / "config.py").parallel.pipeline.microbatches == 4
    again = run("colossal.py", "--from", "colossal", "--out", "config.py")
    assert again.exit_code == 2
    assert "--force replaces it" in again.stderr
    assert run("colossal.py", "--from", "colossal", "--out", "config.py", "--force").exit_code == 0


def test_a_full_disk(source):
    (source / "config.py").symlink_to("/dev/full")
    for command in (["convert-config", "colossal.py", "--from", "colossal"], ["configs", "naive_fp16"]):
        result = CliRunner().invoke(app, [*command, "--out", "config.py", "--force"])
        assert result.exit_code == 2
        assert "No space left on device); give another place" in " ".join(result.stderr.replace("│", " ").split())


def test_json(source):
    result = run("colossal.py", "--from", "colossal", "--world-size", "8", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["ok"], found["world_size"], found["findings"]) == (True, 8, [])
    assert [row["key"] for row in found["without_equivalent"]] == ["gradient_handler"]
    assert {"fp16.mode": "naive"} in [row["to"] for row in found["converted"]]


def test_a_layout_that_cannot_run(source):
    result = run("colossal.py", "--from", "colossal", "--world-size", "6")
    assert result.exit_code == 1
    assert "cannot run on 6 rank(s):" in result.stderr
    assert "fp16 = dict(" in result.stdout, "it is there to be changed"
    assert "# CANNOT RUN on 6 rank(s): " in result.stdout


def test_something_that_is_not_understood():
    result = run("opt_level=O2 patch=1", "--from", "apex")
    assert result.exit_code == 1
    assert "not understood: 1\n  patch = 1" in result.stderr
    assert "# not understood:\n# - patch = 1" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.py", "--from", "colosal"], "did you mean 'colossal'?"),
        (["nothing.py", "--from", "colossal"], "there is no such file"),
        (["a=1", "--from", "apex", "--out", "config.yaml"], "name that ends in .py"),
        (["a=1", "--from", "apex", "--force"], "--force says something about --out"),
        (["a=1", "--from", "apex", "--device", "tpu"], "allowed: cuda, cpu"),
    ],
)
def test_mistakes(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("|", " ").replace("│", " ").split())


def test_help_names_every_origin():
    assert tuple(ORIGINS) == NAMES
    text = run("--help").stdout
    assert all(f"{name}:" in text for name in NAMES)
    assert "Example: halfmesh convert-config" in text
