"""halfmesh plan: what it prints and writes, and its exit status."""

import json

import pytest
from typer.testing import CliRunner

from halfmesh import load_config
from halfmesh.cli import app
from tests.support.llama import SMALL

ARGS = ("--world-size", "1", "--mode", "fp32", "--gpu-memory")


def run(*args, model=SMALL):
    return CliRunner().invoke(app, ["plan", "--model", model, *map(str, args)])


def test_a_config_that_fits_is_written_and_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "config.py", tmp_path / "mesh.svg"
    result = run(*ARGS, "3900KiB", "--out", out, "--picture", picture)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-3] == "chosen: fp32, one rank, 1 rows x 8 accumulated, checkpoint selective"
    assert lines[-1] == f"written: {out}"
    text = out.read_text()
    assert text.startswith("# Made by halfmesh plan for tests.support.llama:small on 1 rank(s) in 1 node(s), AdamW.\n")
    config = load_config(out)
    assert (config.gradient_accumulation, config.activation_checkpoint.selective) == (8, True)
    assert "rank 0" in picture.read_text()
    refused = run(*ARGS, "3900KiB", "--out", out)
    assert refused.exit_code == 2
    assert "the file exists; --force replaces it" in refused.output
    args = ["--world-size", "1", "--model", SMALL, "--batch", "1,32:int64", "--gpu-memory", "3900KiB"]
    assert CliRunner().invoke(app, ["check", str(out), *args]).exit_code == 0


@pytest.mark.slow
def test_nothing_fits(tmp_path):
    out = tmp_path / "config.py"
    result = run(*ARGS, "1000KiB", "--json", "--out", out)
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["ok"], answer["chosen"]) == (False, None)
    assert answer["closest"]["memory"] > answer["limit"] == 1000 * 1024
    assert not out.exists()


def test_nothing_can_be_run(tmp_path, monkeypatch):
    text = "import llama\ndef build():\n    m, i, c = llama.small()\n    return m.requires_grad_(False), i, c\n"
    (tmp_path / "frozen_llama.py").write_text(text.replace("import llama", "from tests.support import llama"))
    monkeypatch.syspath_prepend(str(tmp_path))
    result = run(*ARGS, "1GB", model="frozen_llama:build")
    assert result.exit_code == 1
    assert result.stdout.startswith("nothing of this can be run, with any memory")


@pytest.mark.parametrize(
    ("args", "model", "words"),
    [
        (("--world-size", "0", "--gpu-memory", "1GB"), SMALL, "--world-size 0: it must be at least 1"),
        ((*ARGS[:3], "fp31", *ARGS[4:], "1GB"), SMALL, "did you mean 'fp32'?"),
        ((*ARGS, "1GB", "--out", "/none/config.py"), SMALL, "there is no directory /none"),
        ((*ARGS, "1GB"), "tests.support.llama:smal", "did you mean 'small'?"),
    ],
)
def test_what_is_refused(args, model, words):
    result = run(*args, model=model)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("\u2502", "").split())
