"""docs/migration/: our side runs, theirs where it is installed, and then the weights are the same."""

import json
import sys
from pathlib import Path

import pytest
import torch

import halfmesh
from halfmesh import compat
from halfmesh.cli.convert_config import flatten
from halfmesh.config.load import load_config
from halfmesh.migration.table import convert
from halfmesh.migration.tables import ORIGINS
from tests.support.pages import find_blocks, read_page, snippet, stand_ins
from tests.support.ranks import rank_device, run_ranks

pytestmark = pytest.mark.slow

CONFIGS = {  # by page
    "accelerate": snippet("migration/accelerate.md", "accelerate_config.py"),
    "fabric": snippet("migration/fabric.md", "fabric_config.py"),
    "transformers": snippet("migration/transformers.md", "transformers_config.py"),
    "deepspeed": snippet("migration/deepspeed.md", "deepspeed_config.py"),
    "fsdp": snippet("migration/fsdp.md", "fsdp_config.py"),
    "torchtitan": snippet("migration/torchtitan.md", "torchtitan_config.py"),
    "megatron": snippet("migration/megatron.md", "megatron_config.py"),
    "colossalai": snippet("migration/colossalai.md", "colossal_config.py"),
    "sagemaker": snippet("migration/sagemaker.md", "sagemaker_config.py"),
}


def side(page, sign):
    """One side of the difference that a page shows; with " " the lines of both."""
    (block,) = find_blocks(read_page(page), "diff")
    return "\n".join(line[1:] for line in block.splitlines() if line[0] in (" ", sign))


def weights_after(code, names):
    exec(code, names)
    weights = (names["engine"].model if "engine" in names else names["model"]).state_dict()
    return {name.removeprefix("module."): value.float() for name, value in weights.items()}


def assert_trained_alike(ours, theirs, tolerance=1e-6):
    """Differences are relative to the largest weight."""

    def difference(one, other):
        assert one.keys() == other.keys()
        return max(((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in one)

    assert difference(ours, stand_ins()["model"].state_dict()) > 1e-2, "it trained"
    assert difference(ours, theirs) < tolerance


def test_configs_can_run(tmp_path):
    for page, text in CONFIGS.items():
        (tmp_path / "config.py").write_text(text)
        assert compat.check(load_config(tmp_path / "config.py"), 8, "cuda") == [], page


@pytest.mark.parametrize(
    ("page", "package", "name"), [("accelerate", "accelerate", "Accelerator"), ("fabric", "lightning_fabric", "Fabric")]
)
def test_our_side_trains_to_the_weights_of_theirs(page, package, name, tmp_path, monkeypatch):
    names = {"halfmesh": halfmesh, name: getattr(pytest.importorskip(package), name)}
    monkeypatch.chdir(tmp_path)
    Path("config.py").write_text(CONFIGS[page])
    theirs, ours = (weights_after(side(f"migration/{page}.md", sign), stand_ins() | names) for sign in "-+")
    if state := sys.modules.get("accelerate.state"):  # its settings belong to the process, and reject others
        state.AcceleratorState._reset_state(True)
        state.GradientState._reset_state()
    assert_trained_alike(ours, theirs)


def fully_sharded(rank, world_size, by_hand):
    names = stand_ins()
    model, criterion, (x, y) = names["model"], names["criterion"], names["dataloader"].dataset[:]
    batches = torch.arange(60).view(-1, 2, 6)[:, rank]
    if by_hand:
        exec(snippet("migration/fsdp.md", "by_hand.py"), names)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)  # it is made after sharding
        for batch in batches:
            criterion(model(x[batch]).float(), y[batch]).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    else:
        exec(CONFIGS["fsdp"], config := {})
        config = {name: config[name] for name in ("bf16", "parallel", "clip_grad_norm")}
        engine = halfmesh.initialize(model, names["optimizer"], criterion, config=config)
        for batch in batches:
            engine.backward(engine.criterion(engine(x[batch]), y[batch]))
            engine.step()
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.distributed
def test_fully_shard_by_hand():
    theirs, ours = (run_ranks(fully_sharded, 2, by_hand, timeout=120)[0] for by_hand in (True, False))
    assert_trained_alike(ours, theirs)


def trained_by_both_loops(rank, world_size):
    weights = []
    for code in (snippet("migration/pytorch.md", "before.py"), snippet("migration/pytorch.md", "after.py")):
        names = stand_ins()
        scheduler = torch.optim.lr_scheduler.StepLR(names["optimizer"], 1, gamma=0.5)
        exec(code, names | {"dataset": names["dataloader"].dataset, "device": rank_device(), "scheduler": scheduler})
        weights.append(names["model"].state_dict())
    return weights


@pytest.mark.distributed
def test_the_loop_before_and_after_on_two_processes():
    for before, after in run_ranks(trained_by_both_loops, 2, timeout=120):
        assert_trained_alike(after, before, 2e-4)


def test_apex(run, tmp_path):
    run("migration/apex.md", files=("config.py",))
    exec(side("migration/apex.md", "+"), names := stand_ins() | {"halfmesh": halfmesh})
    assert names["engine"].config.fp16.options.opt_level == "O2"
    assert names["engine"].global_step == 15
    names = run("migration/apex.md", "convert.py", given=stand_ins() | {"halfmesh": halfmesh})
    assert names["loss"] < 0.7


def test_the_configs_of_others_become_the_configs_of_the_page(tmp_path):
    (block,) = find_blocks(read_page("migration/deepspeed.md"), "json")
    sagemaker = {"dynamic_loss_scale": True, "dynamic_loss_args": {"scale_window": 1000}}
    for origin, given, clip in (("deepspeed", json.loads(block), 1.0), ("sagemaker", sagemaker, 0.0)):
        (tmp_path / "config.py").write_text(CONFIGS[origin])
        _, config = convert(ORIGINS[origin], dict(flatten(given)))
        assert load_config(config) == load_config(tmp_path / "config.py").replace(clip_grad_norm=clip)
