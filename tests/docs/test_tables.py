"""Tables of the documentation are what the code says: keys with their defaults, names, options."""

from __future__ import annotations

import re

import pytest
import typer

import halfmesh
from halfmesh import hooks
from halfmesh.cli import app
from halfmesh.config import schema
from halfmesh.config.schema import Settings, parallel_config
from halfmesh.options import Options
from halfmesh.parallel.context.axis import ContextOptions
from halfmesh.parallel.sharding.fsdp import FSDPOptions
from halfmesh.parallel.sharding.zero1 import Zero1Options
from halfmesh.report.run import FILES
from tests.support.pages import check, defaults, find_rows, read_page, shown_commands

AMP = halfmesh.AMP_PLUGINS
PARALLEL = parallel_config({"context", "expert"})
SHORT_FORMS = {
    "activation_checkpoint": "enabled",
    "compile": "enabled",
    "parallel.tensor": "size",
    "parallel.pipeline": "size",
    "parallel.context": "size",
    "parallel.expert": "size",
    "parallel.data": "strategy",
    "clip_grad_norm": "max_norm",
}
TABLES_OF_DEFAULTS = {  # page, header: what has these defaults
    ("config.md", "key of parallel.tensor"): schema.TensorConfig,
    ("config.md", "key of parallel.pipeline"): schema.PipelineConfig,
    ("config.md", "key of parallel.context"): ContextOptions,
    ("config.md", "key of parallel.data"): lambda: [schema.DataConfig(), Zero1Options()],
    ("config.md", "key of parallel.data under fsdp"): FSDPOptions,
    ("config.md", "key of checkpoint"): lambda: schema.CheckpointConfig(directory="*required*"),
}


@pytest.mark.parametrize("table", TABLES_OF_DEFAULTS, ids=" ".join)
def test_the_tables_of_defaults(table):
    found = TABLES_OF_DEFAULTS[table]()
    expected = [options.model_dump() for options in (found if isinstance(found, list) else [found])]
    assert defaults(*table) == {key: default for options in expected for key, default in options.items()}


def default_of(path):
    model, value = Settings, None
    for part in path.split("."):
        value = PARALLEL() if part == "parallel" else model.model_fields[part].get_default()
        model = type(value) if isinstance(value, Options) else model
    return getattr(value, SHORT_FORMS[path]) if path in SHORT_FORMS else value


def test_the_table_of_all_config_keys():
    found = defaults("config.md", "key")
    assert {key.partition(".")[0] for key in found} == set(Settings.model_fields)
    within = {f"parallel.{name}" for name in PARALLEL.model_fields}
    assert {key for key in found if key.startswith("parallel.")} == within
    assert found == {key: default_of(key) for key in found}


@pytest.mark.promise("keys of NAIVE and TORCH")
def test_the_table_of_modes():
    rows = find_rows(read_page("config.md"), "mode")
    assert {row[0].strip("`") for row in rows} == set(AMP.names())
    for mode, _, keys in rows:
        assert eval(f"dict({keys.strip('`')})") == AMP.get(mode.strip("`")).options().model_dump(), mode


def test_the_table_of_schedules():
    rows = {row[0].strip("`"): row[1:] for row in find_rows(read_page("pipeline.md"), "schedule | order")}
    assert rows.keys() == set(halfmesh.SCHEDULES.names())
    for name, (_, _, waiting, _) in rows.items():
        for p, m, v in ((2, 4, 2), (4, 8, 3)):
            expected = eval(waiting, {"p": p, "m": m, "v": v})
            chunks = v if "v" in waiting else 1  # zbv waits for nobody, whatever the chunks
            assert halfmesh.SCHEDULES.get(name).bubble(p, chunks, m) == pytest.approx(expected), name


def first_cells(page, header):
    return {name for row in find_rows(read_page(page), header) for name in re.findall(r"`(\w+)", row[0])}


def test_the_tables_of_names():
    assert first_cells("tensor-parallel.md", "style") == set(halfmesh.TENSOR_STYLES.names())
    assert {f"{row[0]}" for row in find_rows(read_page("report.md"), "file")} == {f"`{name}`" for name in FILES}
    public = {name for name in vars(halfmesh.StepResult) if not name.startswith("_")}
    assert first_cells("loop.md", "attribute") == public
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| (.*?) \|", read_page("trainer.md"), re.MULTILINE)
    assert {name for names, _ in rows for name in re.findall(r"`(\w+)`", names)} == set(halfmesh.HOOKS.names())
    assert {name for _, classes in rows for name in re.findall(r"`(\w+)\(", classes)} == set(hooks.__all__)


def test_the_options_of_each_command():
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", read_page("cli.md"), re.DOTALL | re.MULTILINE))
    commands = typer.main.get_command(app).commands
    assert list(sections) == list(commands)
    for name, command in commands.items():
        rows = find_rows(sections[name], "option") if command.params else []
        shown = [
            (option, re.search(r"; (required|default `.*`)$", meaning))
            for options, meaning in rows
            for option in re.findall(r"`(.*?)`", options)
        ]
        expected = [(name_of_option(option), default_of_option(option)) for option in command.params]
        assert {(option, found and found[1]) for option, found in shown} == {*expected}
        assert len(shown) == len(expected)
        assert re.search(rf"^(?:\$ )?halfmesh {name}\b", sections[name], re.MULTILINE)


def name_of_option(option):
    return option.opts[0] if option.nargs == 1 else f"{option.metavar}..."


def default_of_option(option):
    if option.required:
        return "required"
    return None if option.default is None or option.default is False else f"default `{option.default}`"


def test_what_the_page_of_commands_shows(run):
    run("cli.md", files=("config.py",))
    for command, expected in shown_commands("cli.md"):
        assert check(command) == expected
