"""Every command says what it does, with an example that it understands."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from halfmesh.cli import app

COMMANDS = {command.name or command.callback.__name__: command for command in app.registered_commands}


def test_all_commands_are_listed():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert all(re.search(rf"^  {name} +\w", result.stdout, re.MULTILINE) for name in COMMANDS)
    assert "..." not in result.stdout.split("Commands:")[1], "a command's first sentence is too long for the list"


def test_the_package_runs_as_a_module():
    """Where the console script is not on the path."""
    done = subprocess.run([sys.executable, "-m", "halfmesh", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Usage: python -m halfmesh ")


@pytest.mark.parametrize("name", COMMANDS)
def test_help(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: root {name}")


@pytest.mark.parametrize("name", COMMANDS)
def test_its_example_is_understood(name):
    """The words of the example are arguments that the command has; nothing is run."""
    example = re.search(r"Example: halfmesh (.*)", COMMANDS[name].epilog or "")
    assert example, f"halfmesh {name} --help shows no example"
    words = shlex.split(example[1])
    assert words[0] == name
    command = typer.main.get_command(app).commands[name]
    command.make_context(name, words[1:], resilient_parsing=False)
