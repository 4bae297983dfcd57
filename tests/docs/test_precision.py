"""docs/precision.md: its tables are the recipes and options, and its snippets run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh.amp.plugin import AMP_PLUGINS
from halfmesh.amp.recipe import FP32
from tests.docs.test_readme import find_python, find_rows, find_text, stand_ins

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "precision.md").read_text()
SHORT = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", None: "fp32"}


def recipe_of(words):
    if words == "none":
        return FP32
    mode, variant = words.replace("`", "").split()
    plugin = AMP_PLUGINS.get(mode)
    options = plugin.options(opt_level=variant) if mode == "apex" else plugin.options()
    return plugin.recipe(options, torch.bfloat16 if variant == "bf16" else torch.float16)


def test_the_table_of_recipes():
    rows = find_rows(PAGE, "| parameters")
    assert [row[0] for row in rows] == [
        *("none", "`torch` fp16", "`torch` bf16", "`naive` fp16", "`naive` bf16"),
        *(f"`apex` O{level}" for level in range(4)),
    ]
    for name, parameters, computes, masters, scale, batchnorm, output in rows:
        recipe = recipe_of(name)
        assert parameters == SHORT[recipe.param_dtype], name
        assert computes.endswith(SHORT[recipe.compute_dtype]), name
        assert computes.startswith("O1" if recipe.cast_lists == "apex" else "autocast") == recipe.autocast, name
        assert masters == ("yes" if recipe.master_weights else "no"), name
        moves = recipe.loss_scale is not None and recipe.loss_scale.dynamic
        assert scale == ("dynamic" if moves else "off"), name
        assert batchnorm == ("fp32" if recipe.keep_batchnorm_fp32 else SHORT[recipe.param_dtype]), name
        assert output == ("as it comes" if recipe.output_dtype is None else SHORT[recipe.output_dtype]), name


@pytest.mark.parametrize("mode", ["torch", "naive"])
def test_the_tables_of_keys(mode):
    rows = find_rows(PAGE, f"key of {mode}")
    assert {row[0].strip("`"): eval(row[1].strip("`")) for row in rows} == AMP_PLUGINS.get(mode).options().model_dump()


def test_hysteresis(capsys):
    exec(find_python(PAGE, "scale.py"), {})
    printed = capsys.readouterr().out
    assert printed == find_text(PAGE)[0]
    rows = find_rows(PAGE, "update")
    lines = printed.splitlines()
    assert [f"{float(cell)}" for cell in rows[1][1:]] == [line.split()[1] for line in lines]
    assert [str(cell == "1") for cell in rows[0][1:]] == [line.split()[0] for line in lines]


def test_a_part_in_fp32():
    names = {}
    exec(find_python(PAGE, "island.py"), names)
    model = names["Attention"](4)
    config = {"bf16": {"mode": "torch"}}
    engine = halfmesh.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), None, None, config)
    assert engine(torch.randn(2, 3, 4)).dtype == torch.float32
    assert engine.model.query.weight.dtype == torch.float32


def test_without_an_engine():
    names = stand_ins()
    exec(find_python(PAGE, "alone.py"), names)
    assert names["optimizer"].loss_scale <= 1024
    assert names["loss"] < 0.7
