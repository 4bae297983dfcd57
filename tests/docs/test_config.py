"""docs/config.md: its tables are the schema, its snippets run, and its messages are real."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import halfmesh
from halfmesh.amp.plugin import AMP_PLUGINS
from halfmesh.config.activations import CheckpointConfig
from halfmesh.config.automatic import AutomaticConfig
from halfmesh.config.schema import ClipConfig, CompileConfig, DataConfig, PipelineConfig, Settings, TensorConfig
from halfmesh.options import Options
from tests.docs.test_readme import check, find_blocks, find_python, find_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "config.md").read_text()
SHORT_FORMS = {
    "activation_checkpoint": "enabled",
    "compile": "enabled",
    "parallel.tensor": "size",
    "parallel.pipeline": "size",
    "parallel.data": "strategy",
    "clip_grad_norm": "max_norm",
}
LONG_FORMS = {
    "parallel.tensor": TensorConfig(),
    "parallel.pipeline": PipelineConfig(),
    "parallel.data": DataConfig(),
    "clip_grad_norm": ClipConfig(),
    "activation_checkpoint": CheckpointConfig(),
    "compile": CompileConfig(),
    "checkpoint": AutomaticConfig(directory="x"),
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(PAGE, "config.py"))
    return tmp_path


def default_of(path):
    model, value = Settings, None
    for part in path.split("."):
        value = model.model_fields[part].get_default()
        model = type(value) if isinstance(value, Options) else model
    return getattr(value, SHORT_FORMS[path]) if path in SHORT_FORMS else value


def test_the_table_of_keys():
    rows = find_rows(PAGE, "key")
    keys = [row[0].strip("`") for row in rows]
    assert {key.partition(".")[0] for key in keys} == set(Settings.model_fields)
    assert {key for key in keys if key.startswith("parallel.")} == {
        f"parallel.{name}" for name in type(Settings().parallel).model_fields
    }
    for key, default, _ in rows:
        assert eval(default.strip("`")) == default_of(key.strip("`")), key


def test_the_table_of_modes():
    rows = find_rows(PAGE, "mode")
    assert {row[0].strip("`") for row in rows} == set(AMP_PLUGINS.names())
    for mode, _, keys in rows:
        options = AMP_PLUGINS.get(mode.strip("`")).options
        assert eval(f"dict({keys.strip('`')})") == options().model_dump(), mode


@pytest.mark.parametrize("name", LONG_FORMS)
def test_the_tables_of_long_forms(name):
    found = {row[0].strip("`"): row[1].strip("`") for row in find_rows(PAGE, f"key of {name}")}
    expected = LONG_FORMS[name].model_dump()
    if name == "checkpoint":
        assert (found.pop("directory"), expected.pop("directory")) == ("*required*", "x")
    assert list(found) == list(expected)
    assert {key: eval(value) for key, value in found.items()} == expected


def test_both_forms_are_one_config(folder):
    (folder / "same.yaml").write_text(find_blocks(PAGE, "yaml")[0])
    config = halfmesh.load_config("config.py")
    assert config == halfmesh.load_config("same.yaml")
    assert halfmesh.compat.check(config, 4) == []


def test_looking_at_a_config(folder, capsys):
    names = {}
    exec(find_python(PAGE, "look.py"), names)
    assert "1000 zero1 0.004" in capsys.readouterr().out
    assert names["longer"].gradient_accumulation == 8
    assert names["config"].gradient_accumulation == 4


def test_names_from_elsewhere(folder):
    (folder / "elsewhere.py").write_text("max_grad_norm = 1.0\nzero = dict(level=2)\n")
    command, expected = find_blocks(PAGE, "console")[0].split("\n", 1)
    assert check(command) == expected


def test_the_readme_points_here():
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text()
    assert re.search(r"\[all config keys\]\(docs/config\.md\)", readme)
