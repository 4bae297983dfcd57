"""docs/migration/: our side runs, theirs where it is installed, and then the weights are the same."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from halfmesh.cli.convert_config import flatten
from halfmesh.config.load import load_config
from halfmesh.migration.convert import ORIGINS, convert
from halfmesh.migration.table import matches
from tests.support.pages import find_blocks, find_rows, read_page, snippet, stand_ins
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.slow

OUR_LOOP = snippet("migration/libraries.md", "ours.py")
CONFIGS = {  # of another library, in docs/migration/libraries.md
    "accelerate": snippet("migration/libraries.md", "accelerate_config.py"),
    "lightning_fabric": snippet("migration/libraries.md", "fabric_config.py"),
    "deepspeed": snippet("migration/libraries.md", "deepspeed_config.py"),
    "fsdp": snippet("migration/libraries.md", "fsdp_config.py"),
    "colossal": snippet("migration/libraries.md", "colossal_config.py"),
    "sagemaker": snippet("migration/libraries.md", "sagemaker_config.py"),
}
OTHERS = {  # package: their loop
    "accelerate": snippet("migration/libraries.md", "accelerate.py"),
    "lightning_fabric": snippet("migration/libraries.md", "fabric.py"),
}
OURS = snippet("migration/pytorch.md", "ours.py")
GUIDE = {  # loops of PyTorch's guide, and the config that takes their place: on one process, and on two
    "fp32": (snippet("migration/pytorch.md", "fp32.py"), snippet("migration/pytorch.md", "fp32_config.py")),
    "amp": (snippet("migration/pytorch.md", "amp.py"), snippet("migration/pytorch.md", "amp_config.py")),
    "accumulation": (
        snippet("migration/pytorch.md", "accumulation.py"),
        snippet("migration/pytorch.md", "accumulation_config.py"),
    ),
}
GUIDE_ON_TWO = {
    "ddp": (snippet("migration/pytorch.md", "ddp.py"), snippet("migration/pytorch.md", "ddp_config.py")),
    "no_sync": (snippet("migration/pytorch.md", "no_sync.py"), snippet("migration/pytorch.md", "no_sync_config.py")),
    "fully_shard": (
        snippet("migration/pytorch.md", "fully_shard.py"),
        snippet("migration/pytorch.md", "fully_shard_config.py"),
    ),
}


@pytest.fixture(autouse=True)
def accelerate_forgets():
    """Its settings belong to the process, and refuse others in the tests that follow."""
    yield
    if "accelerate" in sys.modules:
        state = sys.modules["accelerate.state"]
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()


def train(code, folder, config=None):
    """What a snippet leaves of the model, whose data it trains on in order."""
    if config is not None:
        (folder / "config.py").write_text(config)
    names = stand_ins()
    exec(code.replace('config="config.py"', f'config="{folder}/config.py"'), names)
    named = (names["engine"].model if "engine" in names else names["model"]).state_dict()
    return {name.removeprefix("module."): full(value).float() for name, value in named.items()}


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def difference(one, other):
    """The largest, relative to the largest weight."""
    assert one.keys() == other.keys()
    return max(((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in one)


@pytest.mark.parametrize("library", CONFIGS)
def test_our_side_trains(library, tmp_path):
    assert difference(train(OUR_LOOP, tmp_path, CONFIGS[library]), stand_ins()["model"].state_dict()) > 1e-2


@pytest.mark.parametrize("package", OTHERS)
def test_the_other_side_gives_the_same_weights(package, tmp_path):
    pytest.importorskip(package)
    ours = train(OUR_LOOP, tmp_path, CONFIGS[package])
    assert difference(ours, train(OTHERS[package], tmp_path)) < 1e-6


def compare(rank, world_size, loops, folder):
    """For each loop of the guide: how far our weights are from its."""
    own = folder / f"rank{rank}"
    own.mkdir()
    found = {}
    for name, (theirs, config) in loops.items():
        expected = train(theirs, own)
        assert difference(expected, dict(stand_ins()["model"].state_dict())) > 1e-3, "they trained"
        found[name] = difference(train(OURS, own, config), expected)
    return found


def test_the_guides_loops(tmp_path):
    found = compare(0, 1, GUIDE, tmp_path)
    assert found["fp32"] < 1e-6
    assert found["accumulation"] < 1e-6
    assert found["amp"] < 2e-4


@pytest.mark.distributed
def test_the_guides_loops_on_two_processes(tmp_path):
    for found in run_ranks(compare, 2, GUIDE_ON_TWO, tmp_path, timeout=120):
        assert found["ddp"] < 1e-5
        assert found["no_sync"] < 1e-5
        assert found["fully_shard"] < 2e-3, "bf16 gradients of both"


def test_the_whole_script_resumes(tmp_path, monkeypatch, capsys):
    """Begun again after its end, it has nothing left to do; after fewer epochs, it goes on with their number."""
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(GUIDE["accumulation"][1])
    code = snippet("migration/pytorch.md", "whole.py")
    shown = re.compile(r"^epoch (\d+): accuracy (\S+)$", re.MULTILINE)
    exec(code.replace(", 20):", ", 2):"), stand_ins())
    begun = shown.findall(capsys.readouterr().out)
    names = stand_ins()
    exec(code, names)
    found = begun + shown.findall(capsys.readouterr().out)
    assert [int(epoch) for epoch, _ in found] == list(range(len(found)))
    assert 2 < len(found) < 20, "it stopped early"
    assert names["best"].bad_epochs == 3
    assert names["best"].accuracy == pytest.approx(max(float(accuracy) for _, accuracy in found), abs=1e-3)
    exec(code, stand_ins())
    assert "epoch" not in capsys.readouterr().out


# --- apex -----------------------------------------------------------------------------------------------------------


def test_apex_with_an_engine(run):
    names = run("migration/apex.md", "train.py", files=("config.py",))
    assert names["engine"].config.fp16.options.opt_level == "O2"
    state = torch.load("checkpoint.pt", weights_only=True)
    assert {value.dtype for value in state["model"].values()} == {torch.float32}
    assert state["global_step"] == 15
    assert names["loss"] < 0.7


def test_apex_in_a_loop_of_ones_own(run):
    given = stand_ins() | {"torch": torch}
    model = given["model"]
    names = run("migration/apex.md", "convert.py", given=given)
    assert names["model"].module is model
    assert set(torch.load("checkpoint.pt", weights_only=True)["model"]) == set(model.state_dict())
    assert names["loss"] < 0.7


def test_apexs_casts_of_functions(run):
    names = run("migration/apex.md", "functions.py", given=stand_ins() | {"features": torch.randn(4, 4)})
    assert (names["scores"].dtype, names["value"].dtype) == (torch.float16, torch.float32)
    assert names["log_mean_exp"](torch.ones(2, dtype=torch.float16)).dtype == torch.float16, "it is inert elsewhere"


# --- configs of others ----------------------------------------------------------------------------------------------


def test_the_configs_of_others_become_the_configs_of_the_page(tmp_path):
    (block,) = find_blocks(read_page("migration/libraries.md"), "json")
    (tmp_path / "config.py").write_text(CONFIGS["deepspeed"])
    _, config = convert(ORIGINS["deepspeed"], dict(flatten(json.loads(block))))
    assert load_config(config) == load_config(tmp_path / "config.py")

    given = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000}}
    (tmp_path / "config.py").write_text(CONFIGS["sagemaker"])
    _, config = convert(ORIGINS["sagemaker"], dict(flatten(given)))
    assert load_config(config) == load_config(tmp_path / "config.py").replace(clip_grad_norm=0.0)


@pytest.mark.parametrize(("name", "header"), [("deepspeed", "ds_config.json"), ("sagemaker", "SageMaker")])
def test_keys_that_the_page_explains_are_converted(name, header):
    known = [key for keys in ORIGINS[name].rows for key in keys.split()]
    sections = {f"{key.rpartition('.')[0]}." for key in known if "." in key} | {""}
    rows = find_rows(read_page("migration/libraries.md"), header)
    keys = [key for row in rows for key in re.findall(r"`([a-z_.0-9]+)[^`]*`", row[0]) if not key.startswith("smp.")]
    assert len(keys) > 15
    assert [key for key in keys if not any(matches(part + key, row) for part in sections for row in known)] == []
