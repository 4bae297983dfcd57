"""What all commands share, and the short ones: halfmesh configs, halfmesh env, and the console script."""

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

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = {command.name or command.callback.__name__: command for command in app.registered_commands}


def run(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def start(*command, **options):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, timeout=120, **options)


# --- init -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "answers", "expected"),
    [
        (1, ["", "", "", "", ""], {"bf16": "torch", "clip_grad_norm": 1.0, "resume": "auto"}),
        (8, ["fp16", "naive", "pipeline", "2", "4", "0", "none"], {"fp16": "naive", "gradient_accumulation": 4}),
        (4, ["fp32", "fsdp", "1", "0", "none"], {"parallel": {"data": {"strategy": "fsdp"}}}),
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
        assert (written[key]["mode"] if key in ("bf16", "fp16") else written[key]) in (value, {"max_norm": value})
    again = CliRunner().invoke(app, ["init", "mine.py"])
    assert (again.exit_code, "--force replaces it" in again.output) == (2, True)


def test_init_whose_input_ends_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["init"], input="4\n\n")
    assert result.exit_code == 2
    said = " ".join(result.output.replace("│", " ").split())
    assert "the input ended before the last answer, so config.py is not written; run halfmesh init in a" in said
    assert list(tmp_path.iterdir()) == []


# --- help ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--version"], ["-V"]])
def test_the_version(arguments):
    assert run(*arguments).stdout == f"halfmesh {halfmesh.__version__}\n"


def test_help_has_a_short_option():
    assert run("-h").stdout == run("--help").stdout
    assert run("check", "-h").stdout == run("check", "--help").stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_is_listed_and_its_example_is_understood(name):
    listed = run("--help").stdout
    assert re.search(rf"^  {name} +\w", listed, re.MULTILINE)
    assert "..." not in listed.split("Commands:")[1], "a command's first sentence is too long for the list"
    assert run(name, "--help").stdout.startswith(f"Usage: root {name}")
    example = re.search(r"Example: halfmesh (.*)", COMMANDS[name].epilog or "", re.DOTALL)
    assert example, f"halfmesh {name} --help shows no example"
    words = shlex.split(example[1].replace("\\\n", " ").partition(" > ")[0])
    assert words[0] == name
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, words[1:], resilient_parsing=False)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_for_people(name, monkeypatch):
    """No Python types, each value has a name, and no option or example is broken at a hyphen."""
    monkeypatch.setenv("COLUMNS", "80")
    text = run(name, "--help").stdout
    assert re.search(r"<[a-z]|[{}]", text) is None
    assert re.search(r"-$", text, re.MULTILINE) is None
    example = (COMMANDS[name].epilog or "").removeprefix("\b\n").splitlines()
    assert all(f"\n  {line}\n" in text for line in example)


@pytest.mark.parametrize(
    ("command", "choices"),
    [
        *((name, "--device [cuda|cpu]") for name in ("check", "plan", "verify", "run", "convert-config")),
        ("convert-config", "--from LIBRARY  One of colossal, apex, sagemaker, deepspeed, accelerate."),
        ("configs", "The config to print: accumulation_clipping, apex, fsdp, naive_fp16, pipeline, tensor, three_d,"),
    ],
)
def test_help_names_the_choices(command, choices):
    assert " ".join(choices.split()) in " ".join(run(command, "--help").stdout.split())


def test_the_package_runs_as_a_module_and_its_help_needs_no_torch():
    code = (
        "import sys, runpy\n"
        "sys.argv = ['halfmesh', '--help']\n"
        "try: runpy.run_module('halfmesh', run_name='__main__')\n"
        "finally: assert 'torch' not in sys.modules"
    )
    done = start("-c", code)
    assert done.returncode == 0, done.stderr
    assert "precision and parallel layout from one config" in done.stdout


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


# --- configs -------------------------------------------------------------------------------------------------------


def test_configs_are_listed_and_printed_as_one_file(tmp_path):
    names = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))
    lines = run("configs").stdout.splitlines()
    assert [line.split()[0] for line in lines] == names
    assert all(len(line.split()) > 4 for line in lines), "each says what it is"
    target = tmp_path / "config.py"
    for name in names:
        text = run("configs", name).stdout
        target.write_text(text)
        assert halfmesh.load_config(target) == halfmesh.load_config(ROOT / "configs" / f"{name}.py"), name

    assert run("configs", "torch_fp16.py").stdout == run("configs", "torch_fp16").stdout
    wrong = run("configs", "naive_fp61")
    assert wrong.exit_code == 2
    assert wrong.stderr.rstrip().endswith("there is no config 'naive_fp61'; did you mean 'naive_fp16'?")
    assert "there is no config 'x'; there are accumulation_clipping, apex, " in run("configs", "x").stderr
    listed = json.loads(run("configs", "--json").stdout)["configs"]
    assert [f"{name:{max(map(len, names))}}  {about}" for name, about in listed.items()] == lines
    one = json.loads(run("configs", "tensor", "--json").stdout)
    assert one == {
        "name": "tensor",
        "about": listed["tensor"],
        "text": run("configs", "tensor").stdout.rstrip("\n") + "\n",
    }


@pytest.mark.slow
def test_an_installed_halfmesh_has_the_configs(tmp_path):
    """build_py makes what a wheel holds."""
    pytest.importorskip("setuptools")
    built = start("setup.py", "-q", "egg_info", "-e", tmp_path, "build", "-b", tmp_path / "build", cwd=ROOT)
    assert built.returncode == 0, built.stderr[-2000:]
    library = tmp_path / "build" / "lib"
    folder = library / "halfmesh" / "configs"
    names = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert names == {path.name: path.read_bytes() for path in (ROOT / "configs").glob("*.py")}
    done = start("-m", "halfmesh", "configs", "tensor", cwd=tmp_path, env={"PYTHONPATH": str(library), "PATH": ""})
    assert done.stdout == run("configs", "tensor").stdout, done.stderr[-2000:]


# --- env -----------------------------------------------------------------------------------------------------------


def test_env_has_what_a_bug_report_needs(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("SECRET_TOKEN", "hidden")
    monkeypatch.setattr("torch.utils.collect_env.get_pip_packages", lambda *_: ("pip3", "numpy==2"))  # it takes long
    text = run("env").stdout
    found = dict(re.findall(r"^(\w+): (.*)$", text.split("\n\n")[0], re.MULTILINE))
    assert found["halfmesh"] == halfmesh.__version__
    assert "gloo" in found["backends"]
    assert "pydantic 2" in found["packages"]
    assert "NCCL_DEBUG INFO" in found["variables"]
    assert "hidden" not in text
    assert f"PyTorch version: {torch.__version__}" in text

    answer = json.loads(run("env", "--json").stdout)
    assert (answer["halfmesh"], answer["torch"]["torch_version"]) == (halfmesh.__version__, torch.__version__)
    assert answer["variables"]["NCCL_DEBUG"] == "INFO"
    assert answer["packages"]["pydantic"].startswith("2")
    assert "gloo" in answer["backends"]
