"""docs/speed.md tells the truth: its configs can be read, and its table has the keys that there are."""

from pathlib import Path

import pytest

from halfmesh.config.load import load_config
from halfmesh.config.schema import CompileConfig
from tests.docs.test_readme import find_python, find_rows
from tests.support import compiling
from tests.support.models import make_engine, train

SPEED = (Path(__file__).resolve().parents[2] / "docs" / "speed.md").read_text()


@pytest.mark.parametrize(("name", "expected"), [("config.py", {}), ("detail.py", {"scope": "blocks"})])
def test_configs(name, expected, tmp_path):
    (tmp_path / name).write_text(find_python(SPEED, name))
    assert load_config(tmp_path / name).compile == CompileConfig(**expected)


def test_the_table_of_keys():
    rows = find_rows(SPEED, "key")
    assert {key.strip("`"): eval(default.strip("`")) for key, default, _ in rows} == CompileConfig().model_dump()
    text = " ".join(rows[3])
    for mode in ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"):
        assert f'"{mode}"' in text
        assert load_config({"compile": {"mode": mode}}).compile.mode == mode


def test_the_line_of_the_plan(caplog):
    with compiling.watched(), caplog.at_level("INFO", "halfmesh"):
        train(make_engine({"compile": {"backend": compiling.NAME}}), max_batches=1)
    assert "  compile:    the whole model with halfmesh_test, when first called" in caplog.text
