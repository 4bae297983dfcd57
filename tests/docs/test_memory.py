"""docs/memory.md tells the truth: its configs can be read, and its numbers are measured again."""

from pathlib import Path

import pytest
import torch
from gpt import GPT

from halfmesh.config.load import load_config
from halfmesh.config.schema import Settings
from tests.docs.test_readme import find_python, find_rows
from tests.support.models import make_engine
from tests.support.saved_memory import bytes_left

MEMORY = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text()
MODES = ({}, {"bf16": {"mode": "torch"}})


@pytest.mark.parametrize(("name", "offload"), [("config.py", False), ("offload.py", True)])
def test_configs(name, offload, tmp_path):
    (tmp_path / name).write_text(find_python(MEMORY, name))
    config = load_config(tmp_path / name)
    assert (config.activation_checkpoint.label, config.activation_offload) == ("full", offload)


def test_the_table_of_values():
    values = [eval(value.strip("`")) for value, _ in find_rows(MEMORY, "value")]
    assert len(values) == 5
    assert [Settings(activation_checkpoint=value).activation_checkpoint.enabled for value in values] == [True] * 4 + [
        False
    ]


def left_after_a_forward(config) -> float:
    torch.manual_seed(0)
    model = GPT(context=64, width=64, depth=6, num_heads=4, dropout=0.1)
    engine = make_engine(config, model=model)
    ids = torch.randint(256, (8, 64))
    engine(ids)
    return bytes_left(lambda: engine(ids)) / 2**20


@pytest.mark.parametrize("row", find_rows(MEMORY, "`activation_checkpoint` | fp32"), ids=lambda row: row[0])
def test_what_is_left(row):
    form, *expected = row
    config = {"activation_checkpoint": eval(form.strip("`"))}
    for mode, mebibytes in zip(MODES, expected, strict=True):
        assert left_after_a_forward(mode | config) == pytest.approx(float(mebibytes), abs=0.006)
