"""halfmesh configs: each config of configs/ is listed, and what is printed of it is the whole of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmesh.cli import app
from halfmesh.cli.configs import describe, find_configs, read_whole
from halfmesh.config.load import load_config

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    return CliRunner().invoke(app, ["configs", *map(str, arguments)])


def test_the_list():
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
    lines = run().stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 4 for line in lines), "each says what it is"
    rows = json.loads(run("--json").stdout)["configs"]
    assert [row["name"] for row in rows] == names
    assert rows[0]["about"] == describe(ROOT / "configs" / f"{names[0]}.py")


def test_each_is_whole(tmp_path):
    for name, path in find_configs().items():
        target = tmp_path / f"{name}_alone.py"
        target.write_text(read_whole(path))
        assert load_config(target) == load_config(path), name
        assert "import *" not in target.read_text()
    assert read_whole(find_configs()["zero1_torch_fp16"]).count("BATCH_SIZE = ") == 1, "base.py once"


def test_print_and_copy(tmp_path):
    target = tmp_path / "config.py"
    result = run("zero1_torch_fp16.py", "--out", target)
    assert (result.exit_code, result.stdout) == (0, f"written: {target}\n")
    assert target.read_text() == run("zero1_torch_fp16").stdout
    assert json.loads(run("fp32", "--json").stdout)["config"] == run("fp32").stdout
    assert run("fp32", "--out", target).exit_code == 2
    assert run("fp32", "--out", target, "--force").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["naive_fp61"], "did you mean 'naive_fp16'?"),
        (["--force"], "name one"),
        (["fp32", "--force"], "--out, which is missing"),
        (["fp32", "--out", "x.json"], "ends in .py"),
    ],
)
def test_mistakes(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.replace("│", " ").split())


def test_an_installed_halfmesh_has_them(tmp_path):
    """build_py makes what a wheel holds."""
    pytest.importorskip("setuptools")
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build", "-b", str(tmp_path / "build")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert built.returncode == 0, built.stderr[-2000:]
    folder = tmp_path / "build" / "lib" / "halfmesh" / "configs"
    names = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert names == {path.name: path.read_bytes() for path in (ROOT / "configs").glob("*.py")}
    code = "from halfmesh.cli.configs import find_configs; print(find_configs()['fp32'])"
    found = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "build" / "lib"), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert found.stdout.strip() == str(folder / "fp32.py"), found.stderr[-2000:]
