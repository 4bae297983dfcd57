"""docs/ tells the truth: its Python runs, its tables are what the code says, and what it names exists."""

import re
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh.amp.apex_amp import ApexAMP
from halfmesh.amp.apex_options import OPT_LEVELS, ApexOptions
from tests.docs.test_readme import find_python, find_rows, stand_ins
from tests.support.models import make_engine

ROOT = Path(__file__).resolve().parents[2]
APEX = (ROOT / "docs" / "migration" / "apex.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(APEX, "config.py"))
    return tmp_path


def test_the_loop_with_an_engine(folder):
    names = stand_ins() | {"torch": torch}
    exec(find_python(APEX, "train.py"), names)
    assert names["engine"].config.fp16.options.opt_level == "O2"
    state = torch.load("checkpoint.pt", weights_only=True)
    assert {value.dtype for value in state["model"].values()} == {torch.float32}
    assert state["global_step"] == 15
    assert names["loss"] < 0.7


def test_the_loop_of_ones_own(folder):
    names = stand_ins() | {"torch": torch}
    given = names["model"]
    exec(find_python(APEX, "convert.py"), names)
    assert names["model"].module is given
    assert set(torch.load("checkpoint.pt", weights_only=True)["model"]) == set(given.state_dict())
    assert names["loss"] < 0.7


def test_functions_of_ones_own(folder):
    names = stand_ins() | {"features": torch.randn(4, 4)}
    exec(find_python(APEX, "functions.py"), names)
    assert (names["scores"].dtype, names["value"].dtype) == (torch.float16, torch.float32)
    assert names["log_mean_exp"](torch.ones(2, dtype=torch.float16)).dtype == torch.float16, "it is inert elsewhere"


def test_the_table_of_levels():
    rows = find_rows(APEX, "| parameters")
    assert [row[0].strip("`") for row in rows] == list(OPT_LEVELS)
    for level, parameters, computes, masters, batchnorm, scale in rows:
        recipe = ApexAMP.recipe(ApexOptions(opt_level=level.strip("`")), torch.float16)
        assert parameters == ("fp16" if recipe.param_dtype == torch.float16 else "fp32")
        assert computes.startswith("fp16") == (recipe.compute_dtype == torch.float16)
        assert masters == ("yes" if recipe.master_weights else "no")
        assert batchnorm == ("fp16" if parameters == "fp16" and not recipe.keep_batchnorm_fp32 else "fp32")
        assert scale == ("dynamic" if recipe.skips else "1")


def test_named_calls_exist():
    names = stand_ins()
    model, optimizer, _ = halfmesh.convert_to_amp(names["model"], names["optimizer"])
    owners = {
        "engine": make_engine({"fp16": {"mode": "apex"}}),
        "optimizer": optimizer,
        "model": model,
        "halfmesh": halfmesh,
    }
    columns = [row[1:] for row in find_rows(APEX, "apex | with an engine")]
    named = re.findall(r"\b(engine|optimizer|model|halfmesh)\.(\w+)", " ".join(" ".join(row) for row in columns))
    assert len(named) > 25
    for owner, name in named:
        assert hasattr(owners[owner], name), (owner, name)
