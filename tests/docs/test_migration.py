"""docs/migration/: our side of each page runs, theirs where it is installed, and then the weights are the same."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh.config.load import load_config
from halfmesh.migration.convert import convert
from halfmesh.migration.origins import ORIGINS
from halfmesh.migration.reading import read
from tests.docs.test_readme import find_blocks, find_python, find_rows, stand_ins
from tests.support.models import make_engine
from tests.support.ranks import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "migration"
PAGES = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
WITH_A_LOOP = [name for name, text in PAGES.items() if "# ours.py\n" in text and name != "pytorch"]
GUIDE = {  # each loop of the guide, the config that takes its place, and processes
    "fp32.py": ("fp32_config.py", 1),
    "amp.py": ("amp_config.py", 1),
    "accumulation.py": ("accumulation_config.py", 1),
    "ddp.py": ("ddp_config.py", 2),
    "no_sync.py": ("no_sync_config.py", 2),
    "fully_shard.py": ("fully_shard_config.py", 2),
}


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


@pytest.mark.parametrize("name", WITH_A_LOOP)
def test_our_side_runs(name, tmp_path, monkeypatch):
    if "save_weights" in find_python(PAGES[name], "ours.py"):
        pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(PAGES[name], "config.py"))
    names = stand_ins()
    before = names["model"][0].weight.detach().clone()
    exec(find_python(PAGES[name], "ours.py"), names)
    assert not torch.equal(names["model"][0].weight, before)
    assert names["engine"].global_step > 3


@pytest.mark.parametrize("name", ["accelerate", "fabric"])
def test_the_other_side_gives_the_same_weights(name, tmp_path):
    pytest.importorskip("accelerate" if name == "accelerate" else "lightning_fabric")
    page = PAGES[name]
    ours = train(find_python(page, "ours.py"), tmp_path, find_python(page, "config.py"))
    theirs = train(find_python(page, "theirs.py"), tmp_path)
    assert difference(ours, theirs) < 1e-6


@pytest.mark.parametrize("name", [name for name, (_, ranks) in GUIDE.items() if ranks == 1])
def test_the_guides_loops(name, tmp_path):
    assert compare(0, 1, name, tmp_path) < (2e-4 if name == "amp.py" else 1e-6)


@pytest.mark.distributed
def test_the_guides_loops_on_two_processes(tmp_path):
    found = run_ranks(compare_all, 2, [name for name, (_, ranks) in GUIDE.items() if ranks == 2], tmp_path, timeout=120)
    for ddp, no_sync, sharded in found:
        assert ddp < 1e-5
        assert no_sync < 1e-5
        assert sharded < 2e-3, "bf16 gradients of both"


def compare_all(rank, world_size, names, folder):
    return [compare(rank, world_size, name, folder) for name in names]


def compare(rank, world_size, name, folder):
    own = folder / f"rank{rank}"
    own.mkdir(exist_ok=True)
    theirs = train(find_python(PAGES["pytorch"], name), own)
    ours = train(find_python(PAGES["pytorch"], "ours.py"), own, find_python(PAGES["pytorch"], GUIDE[name][0]))
    assert difference(theirs, start()) > 1e-3, "they trained"
    return difference(ours, theirs)


def start():
    return dict(stand_ins()["model"].state_dict())


def test_every_loop_of_the_guide_is_compared():
    shown = re.findall(r"^# (\w+_config\.py)$", PAGES["pytorch"], re.MULTILINE)
    assert shown == [config for config, _ in GUIDE.values()]


def test_the_whole_script_goes_on_where_it_was(tmp_path, monkeypatch, capsys):
    """Begun again after its end, it has nothing left to do; after fewer epochs, it goes on with their number."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(PAGES["pytorch"], "accumulation_config.py"))
    code = find_python(PAGES["pytorch"], "whole.py")
    exec(code.replace(", 20):", ", 2):"), stand_ins())
    begun = re.findall(r"^epoch (\d+): accuracy (\S+)$", capsys.readouterr().out, re.MULTILINE)
    names = stand_ins()
    exec(code, names)
    gone_on = re.findall(r"^epoch (\d+): accuracy (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert [int(epoch) for epoch, _ in begun + gone_on] == list(range(len(begun + gone_on)))
    assert 2 < len(begun + gone_on) < 20, "it stopped early"
    assert names["best"].bad_epochs == 3
    assert names["best"].accuracy == pytest.approx(max(float(accuracy) for _, accuracy in begun + gone_on), abs=1e-3)
    exec(code, stand_ins())
    assert "epoch" not in capsys.readouterr().out


def test_the_loop_of_colossal(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.py").write_text(find_python(PAGES["colossal-ai"], "config.py"))
    names = stand_ins()
    exec(find_python(PAGES["colossal-ai"], "train.py"), names)
    assert names["engine"].global_step == 45
    assert names["loss"].item() < 0.7


def test_the_ds_config_of_the_page_becomes_the_config_of_the_page(tmp_path):
    (block,) = find_blocks(PAGES["deepspeed"], "json")
    found = convert(ORIGINS["deepspeed"], json.loads(block))
    (tmp_path / "config.py").write_text(find_python(PAGES["deepspeed"], "config.py"))
    assert found.config == load_config(tmp_path / "config.py")
    assert len(found.entries) == 8


def test_the_config_of_the_sagemaker_page_is_that_of_its_script(tmp_path):
    blocks = re.findall(r"^```\n(.*?)^```$", PAGES["sagemaker"], re.DOTALL | re.MULTILINE)
    script = next(block for block in blocks if "smp.init" in block)
    (tmp_path / "train.py").write_text(script)
    found = convert(ORIGINS["sagemaker"], read(str(tmp_path / "train.py"), "sagemaker")).config
    (tmp_path / "config.py").write_text(find_python(PAGES["sagemaker"], "config.py"))
    page = load_config(tmp_path / "config.py")
    assert found == page.replace(clip_grad_norm=0.0)


def test_what_the_pages_name_exists():
    engine = make_engine({})
    owners = {"engine": engine, "engine.context": engine.context, "halfmesh": halfmesh}
    named = [
        found
        for text in PAGES.values()
        for found in re.findall(r"(?<![\w./])(engine\.context|engine|halfmesh)\.([a-z]\w+)(?!\w*[./])", text)
    ]
    assert len(named) > 60
    theirs = {"execute_schedule", "global_steps", "cur_scale", "get_global_grad_norm", "save_checkpoint", "train_batch"}
    theirs |= {"is_gradient_accumulation_boundary", "migration"}
    for owner, name in named:
        assert name in theirs or name in dir(owners[owner]), f"{owner}.{name}"


def test_every_page_says_what_is_different_and_what_is_not_there():
    assert set(PAGES) == {"accelerate", "apex", "colossal-ai", "deepspeed", "fabric", "fsdp", "pytorch", "sagemaker"}
    for name, text in PAGES.items():
        if name != "apex":
            assert "## What means something else\n" in text
            assert "## No equivalent\n" in text
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert "://" in link or (FOLDER / link).exists(), f"{name}: {link}"


@pytest.mark.parametrize("name", ["deepspeed", "sagemaker"])
def test_keys_of_the_tables_of_keys_are_rules(name):
    """What the pages say of a key, convert-config knows."""
    text = PAGES[name][PAGES[name].index("## Key by key") :]
    rules = ORIGINS[name].rules
    known = set(rules) | {part for rule in rules for part in (rule.partition(".")[0], rule.rpartition(".")[2])}
    keys = [
        key
        for row in find_rows(text, "ds_config.json" if name == "deepspeed" else "SageMaker")
        for key in re.findall(r"`([a-z_.0-9]+)[^`]*`", row[0])
        if not key.startswith("smp.")
    ]
    assert len(keys) > 15
    assert not [key for key in keys if key not in known]
