"""halfmesh check --model: what it prints and its exit status."""

import json

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from tests.support.llama import SMALL


@pytest.fixture
def run(tmp_path):
    def invoke(text, *args):
        (tmp_path / "config.py").write_text(text)
        return CliRunner().invoke(app, ["check", str(tmp_path / "config.py"), *args])

    return invoke


def test_a_plan(run):
    result = run(
        "bf16 = dict(mode='naive')\nparallel = dict(tensor=2)\n",
        "--world-size",
        "8",
        "--model",
        SMALL,
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].endswith("config.py: can run on 8 rank(s)")
    assert lines[4] == "  one update with AdamW, on tensors without memory"
    titles = [line[2:].split("  ")[0] for line in lines[5:]]
    assert titles == [
        "bytes, each part at its largest", "parameters", "masters", "optimizer", "gradients", "communication",
        "activations", "temporary", "between two updates", "peak", "sent over dp", "sent over tp",
    ]  # fmt: skip


def test_too_little_memory(run):
    args = ("--world-size", "2", "--model", SMALL, "--gpu-memory", "7MiB")
    result = run("", *args)
    assert result.exit_code == 1
    assert "can run on 2 rank(s), but does not fit" in result.stdout
    assert "  does not fit: rank 0 needs 7.6 MiB of 7.0 MiB" in result.stdout
    assert "  would fit: zero1 (parallel = dict(data='zero1')), by an estimate of " in result.stdout
    assert run("", *args[:-1], "9MiB").exit_code == 0
    assert "none of zero1, activation_checkpoint" in run("", *args[:-1], "9KB").stdout


def test_json(run):
    result = run("", "--world-size", "1", "--model", SMALL, "--gpu-memory", "1KB", "--json")
    answer = json.loads(result.stdout)
    assert result.exit_code == 1
    assert answer["ok"] is False
    assert answer["dry_run"]["fits"] is False
    assert answer["dry_run"]["limit"] == 1000
    (rank,) = answer["dry_run"]["ranks"]
    assert rank["bytes"]["parameters"] >= rank["parameters"] * 4
    assert rank["peak"] > rank["kept"]


def test_problems_of_config_and_model_together(run):
    result = run("parallel = dict(tensor=3)\n", "--world-size", "8", "--model", SMALL)
    assert result.exit_code == 1
    assert "refused:\n  - parallel: tensor=3" in result.stdout
    assert "problems with the model:\n" in result.stdout
    assert "8 heads are not divisible by tensor=3" in result.stdout


def test_options_that_need_a_model(run):
    result = run("", "--world-size", "1", "--gpu-memory", "80GB")
    assert result.exit_code == 2
    assert "--model, which is missing" in result.output


def test_a_picture(run, tmp_path):
    pytest.importorskip("matplotlib")
    args = ("--world-size", "2", "--model", SMALL, "--picture")
    result = run("", *args, str(tmp_path / "mesh.svg"), "--gpus-per-node", "1")
    assert result.exit_code == 0, result.output
    assert "node 1" in (tmp_path / "mesh.svg").read_text()
    assert run("", *args, "mesh.pdf").exit_code == 2
    again = run("", *args, str(tmp_path / "mesh.svg"))
    assert again.exit_code == 2
    assert "the file exists; --force replaces it" in " ".join(again.output.replace("\u2502", "").split())
    assert "--force says something about --picture" in run("", *args[:-1], "--force").output
    nodes = run("", *args, str(tmp_path / "two.svg"), "--gpus-per-node", "0")
    assert nodes.exit_code == 2
    assert "it must be at least 1" in nodes.output
    assert not (tmp_path / "two.svg").exists()
    assert "--picture, which is missing" in run("", *args[:-1], "--gpus-per-node", "1").output


def test_a_unit_that_is_none(run):
    result = run("", "--world-size", "1", "--model", SMALL, "--gpu-memory", "80GBB")
    assert result.exit_code == 2
    assert "'GBB' is no unit of memory" in result.output
