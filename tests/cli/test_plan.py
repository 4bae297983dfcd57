"""halfmesh plan: what it prints and writes, and its exit status."""

import json
import os

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from halfmesh.config.load import load_config
from tests.support.llama import SMALL

ARGS = ("--world-size", "1", "--mode", "fp32", "--gpu-memory")


@pytest.fixture
def run():
    def invoke(*args, model=SMALL):
        return CliRunner().invoke(app, ["plan", "--model", model, *args])

    return invoke


def test_a_plan_is_written_and_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "config.py", tmp_path / "mesh.svg"
    result = run(*ARGS, "3900KiB", "--out", str(out), "--picture", str(picture))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == ("8 candidates on 1 rank(s), 8 to a node, each with 8 rows in an update; 2 dry run(s)")
    assert lines[1].split() == ["memory", "bubble", "between", "nodes", "within", "a", "node"]
    assert lines[2].split()[:2] == ["*", "dry"]
    assert lines[-3] == "chosen: fp32, one rank, 1 rows x 8 accumulated, checkpoint selective"
    assert lines[-2] == "  before the second by room: 10% of the memory left: 85% used, not 91% used"
    assert lines[-1] == f"written: {out}"
    assert "dry run of fp32, one rank" in result.stderr
    text = out.read_text()
    assert text.startswith("# Made by halfmesh plan for llama:small on 1 rank(s) in 1 node(s), AdamW.\n")
    assert text.endswith('\n\ngradient_accumulation = 8\nactivation_checkpoint = "selective"\n')
    assert load_config(out).activation_checkpoint.selective
    assert "rank 0" in picture.read_text()

    refused = run(*ARGS, "3900KiB", "--out", str(out))
    assert refused.exit_code == 2
    assert "the file exists; --force replaces it" in refused.output
    args = [
        "--world-size",
        "1",
        "--model",
        SMALL,
        "--batch",
        "1,32:int64",
        "--gpu-memory",
        "3900KiB",
    ]
    assert CliRunner().invoke(app, ["check", str(out), *args]).exit_code == 0


def test_nothing_fits(run, tmp_path):
    out = tmp_path / "config.py"
    result = run(*ARGS, "1000KiB", "--json", "--out", str(out))
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert answer["ok"] is False
    assert answer["chosen"] is None
    assert answer["closest"]["memory"] > answer["limit"] == 1000 * 1024
    assert answer["closest"]["is_estimate"] is False
    assert not out.exists()


def test_nothing_can_be_run(run, tmp_path, monkeypatch):
    text = "import llama\ndef build():\n    m, i, c = llama.small()\n    return m.requires_grad_(False), i, c\n"
    (tmp_path / "frozen_llama.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(*ARGS, "1GB", model="frozen_llama:build")
    assert result.exit_code == 1
    assert result.stdout.startswith("nothing of this can be run, with any memory")
    assert "fits" not in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--world-size", "0", "--gpu-memory", "1GB"), "--world-size 0: it must be at least 1"),
        (("--world-size", "1", "--gpu-memory", "80GBB"), "'GBB' is no unit of memory"),
        (("--world-size", "1", "--gpu-memory", "1GB", "--mode", "fp31"), "did you mean 'fp32'?"),
        (("--world-size", "1", "--gpu-memory", "1GB", "--out", "config.yaml"), "give a name that ends in .py"),
        (("--world-size", "1", "--gpu-memory", "1GB", "--out", "/none/config.py"), "there is no directory /none"),
        (("--world-size", "1", "--gpu-memory", "1GB", "--picture", "mesh.pdf"), "ends in .png or .svg"),
    ],
)
def test_what_is_refused(run, args, words):
    result = run(*args)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("\u2502", "").split())


@pytest.mark.parametrize(("option", "name"), [("--out", "config.py"), ("--picture", "mesh.svg")])
def test_files_that_cannot_be_written(run, tmp_path, monkeypatch, option, name):
    if option == "--picture":
        pytest.importorskip("matplotlib")

    def refusal(*more):
        result = run(*ARGS, "1GB", option, str(path), *more, model="none:build")
        assert result.exit_code == 2
        return " ".join(result.output.replace("\u2502", "").split())

    path = tmp_path / name
    path.mkdir()
    assert "this is a directory" in refusal("--force")
    path = tmp_path / f"old_{name}"
    path.write_text("mine")
    assert "the file exists; --force replaces it" in refusal()
    assert "there is no module 'none'" in refusal("--force")  # the next thing that is wrong
    monkeypatch.setattr("os.access", lambda place, mode: mode != os.W_OK or place != path)  # root may write to all
    assert "it cannot be written" in refusal("--force")
    assert path.read_text() == "mine"
    path = tmp_path / f"new_{name}"
    monkeypatch.setattr("os.access", lambda place, mode: mode != os.W_OK or place != tmp_path.resolve())
    assert "it cannot be written" in refusal()


def test_a_model_that_fails(run):
    result = run(*ARGS, "1GB", model="tests.support.llama:smal")
    assert result.exit_code == 2
    assert "did you mean 'small'?" in " ".join(result.output.replace("\u2502", "").split())
