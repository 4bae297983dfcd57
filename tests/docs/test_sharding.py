"""docs/sharding.md tells the truth: its configs can run, and its table has fsdp's keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmesh.compat import check
from halfmesh.config.load import load_config
from halfmesh.config.schema import DataConfig
from tests.docs.test_readme import find_python, find_rows

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "sharding.md").read_text()
COMMON = {"strategy", "size", "bucket_mb", "max_inflight"}


@pytest.mark.parametrize(("name", "strategy"), [("config.py", "zero1"), ("fsdp_config.py", "fsdp")])
def test_configs(name, strategy, tmp_path):
    (tmp_path / name).write_text(find_python(PAGE, name))
    config = load_config(tmp_path / name)
    assert config.parallel.data.strategy == strategy
    assert check(config, 8) == []


def test_the_table_of_keys():
    rows = {row[0].strip("`"): row[1].strip("`") for row in find_rows(PAGE, "key of `parallel.data`")}
    assert set(rows) == set(DataConfig.model_fields) - COMMON
    for key, default in rows.items():
        expected = getattr(DataConfig(), key)
        assert (expected is None) if default in ("the mode's", "as it comes", "all") else eval(default) == expected, key
