"""What all commands share, and the short ones: init, configs, env, and the console script."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

import halfmesh
from halfmesh.cli import app
from tests.cli import run, words

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {command.name or command.callback.__name__: command for command in app.registered_commands}


def start(*command, **options):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize(
    ("ranks", "answers", "expected"),
    [
        (1, ["", "", "", "", ""], {"bf16": "torch", "clip_grad_norm": 1.0, "resume": "auto"}),
        (8, ["fp16", "naive", "pipeline", "2", "4", "0", "none"], {"fp16": "naive", "gradient_accumulation": 4}),
    ],
)
def test_init_writes_a_config_that_can_run(tmp_path, monkeypatch, ranks, answers, expected):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init", "mine.py"], input="\n".join([str(ranks), *answers, ""]))
    assert result.exit_code == 0, result.output
    assert f"halfmesh check mine.py --world-size {ranks}" in result.output
    config = halfmesh.load_config("mine.py")
    assert halfmesh.compat.check(config, ranks) == []
    written = config.to_dict()
    for key, value in expected.items():
        assert written[key] in (value, {"max_norm": value}, {"mode": value})


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ("4\nfp32\ntensor\n3\n\n\n\n", 2, "tensor=3 x pipeline=1 = 3"),
        ("4\n\n", 2, "the input ended before the last answer, so config.py is not written"),
    ],
)
def test_init_writes_nothing_that_cannot_run(tmp_path, monkeypatch, answers, status, said):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init"], input=answers)
    assert (result.exit_code, said in words(result.output)) == (status, True), result.output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_listed_and_its_example_is_understood(name):
    listed = run("--help").stdout
    assert re.search(rf"^  {name} +\w", listed, re.MULTILINE)
    assert run(name, "-h").stdout.startswith(f"Usage: root {name}")
    example = re.search(r"Example: halfmesh (.*)", COMMANDS[name].epilog, re.DOTALL)[1]
    given, *arguments = shlex.split(example.replace("\\\n", " ").partition(" > ")[0])
    assert given == name
    typer.main.get_command(app).commands[name].make_context(name, arguments, resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_for_people(name, monkeypatch):
    """No Python types, and no option or example is broken at a hyphen."""
    monkeypatch.setenv("COLUMNS", "80")
    text = run(name, "--help").stdout
    assert re.search(r"<[a-z]|[{}]|-$", text, re.MULTILINE) is None


def test_the_package_runs_as_a_module_and_its_help_needs_no_torch():
    run_module = "sys.argv = ['halfmesh', '--help']; runpy.run_module('halfmesh', run_name='__main__')"
    code = f"import sys, runpy\ntry: {run_module}\nfinally: assert 'torch' not in sys.modules"
    done = start("-c", code)
    assert (done.returncode, "precision and parallel layout from one config" in done.stdout) == (0, True), done.stderr
    assert run("-V").stdout == f"halfmesh {halfmesh.__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        "check {} --world-size 1",
        "plan {} --world-size 1 --gpu-memory 1GB --model a:b",
        "run train.py --config {}",
        "verify {} --world-size 2 --model a:b",
        "convert-config {} --from colossal",
        "report {}",
    ],
)
@pytest.mark.parametrize(("name", "text"), [("none.py", None), ("no.yaml", "a: ["), ("no.py", "seed = = 3"), ("d", "")])
def test_a_file_that_cannot_be_read_is_a_mistake_in_the_command_line(command, name, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    if text:
        (tmp_path / name).write_text(text)
    elif text == "":
        (tmp_path / name).mkdir()
    result = run(*command.format(name).split())
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert name in result.stderr


def test_configs_are_listed_and_printed_as_one_file(tmp_path):
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
    assert [line.split()[0] for line in run("configs").stdout.splitlines()] == names
    for name in names:
        (tmp_path / "config.py").write_text(run("configs", name).stdout)
        expected = halfmesh.load_config(ROOT / "configs" / f"{name}.py")
        assert halfmesh.load_config(tmp_path / "config.py") == expected
    wrong = run("configs", "naive_fp61")
    assert (wrong.exit_code, "there is no config 'naive_fp61'; did you mean 'naive_fp16'?" in words(wrong.stderr)) == (
        2,
        True,
    )
    listed = json.loads(run("configs", "--json").stdout)["configs"]
    assert json.loads(run("configs", "tensor", "--json").stdout)["about"] == listed["tensor"]


def test_env_has_what_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip3", "numpy==2"))  # it takes long
    text = run("env").stdout
    for said in (f"halfmesh: {halfmesh.__version__}", "gloo", "pydantic 2", "NCCL_DEBUG INFO", torch.__version__):
        assert said in text
    assert "hidden" not in text
    answer = json.loads(run("env", "--json").stdout)
    assert (answer["halfmesh"], answer["torch"]["torch_version"]) == (halfmesh.__version__, torch.__version__)
